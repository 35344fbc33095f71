"""Prompts with images: what travels, how often, and which requests come of them."""

import numpy as np
import pytest
from PIL import Image

from grpo.model.pictures import as_rgb, decoded, encoded
from grpo.place.wire import from_json, to_json
from grpo.rollout.packing import Request, unpack_rows
from grpo.rollout.prompts import Prompts, collapse, concat_prompts
from grpo.rollout.search import prompt_of

PLACEHOLDER = 9


def picture(value: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(value).integers(0, 256, (20, 30, 3), dtype=np.uint8))


def prompts_of(*rows: tuple[int, ...]) -> Prompts:
    """Each row has these pictures; a picture takes three tokens, after token 1 and before token 2."""
    return Prompts.with_images(
        [[1, *[PLACEHOLDER] * 3 * len(row), 2] for row in rows],
        [[picture(value) for value in row] for row in rows],
        [[1, *[PLACEHOLDER] * len(row), 2] for row in rows],
    )


def came(prompts: Prompts) -> Prompts:
    """As a rank's local main has it, behind which zeros stand."""
    return Prompts.from_message(np.append(prompts.to_message(), np.zeros(5, np.int32)))


def test_encoded_picture_decodes_to_same_pixels() -> None:
    assert np.array_equal(np.asarray(decoded(encoded(picture(3)))), np.asarray(picture(3)))


def test_as_rgb_turns_transparent_pixels_white() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0] = [10, 20, 30, 255]
    rgb = np.asarray(as_rgb(Image.fromarray(pixels)))
    assert rgb[0, 0].tolist() == [10, 20, 30]
    assert rgb[1, 1].tolist() == [255, 255, 255]


@pytest.mark.parametrize("rows", [[], [()], [(1,)], [(), (1,), (1, 2), ()], [(5, 5)]])
def test_prompts_message_with_images_round_trips(rows: list[tuple[int, ...]]) -> None:
    sent, there = prompts_of(*rows), came(prompts_of(*rows))
    assert [ids.tolist() for ids in unpack_rows(there.rows)] == [ids.tolist() for ids in unpack_rows(sent.rows)]
    assert there.pictured.keys() == {row for row, pictures in enumerate(rows) if pictures}
    for row, each in there.pictured.items():
        assert each.pictures == tuple(encoded(picture(value)) for value in rows[row])
        assert each.expanded.tolist() == [1, *[PLACEHOLDER] * 3 * len(rows[row]), 2]


def test_prompts_message_without_images_adds_nothing() -> None:
    assert prompts_of((), ()).to_message().tolist() == [2, 2, 2, 1, 2, 1, 2]


def test_prompts_message_of_group_holds_picture_once() -> None:
    alone, group = prompts_of((1,)).to_message(), prompts_of(*[(1,)] * 8).to_message()
    assert len(encoded(picture(1))) > 1000
    assert 4 * (len(group) - len(alone)) < len(encoded(picture(1)))


def test_collapse_with_other_pictures_separates_equal_tokens() -> None:
    one, other = came(prompts_of((1,), (1,), (2,))), came(prompts_of((2,), (), (1, 2)))
    requests = collapse(concat_prompts([one, other]), 100, 0)
    assert [(request.n, len(request.pictures), request.seed) for request in requests] == [
        (2, 1, 100), (2, 1, 102), (1, 0, 104), (1, 2, 105),
    ]  # fmt: skip
    assert [request.num_tokens for request in requests] == [5, 5, 2, 8]
    assert len({prompt_of(request) for request in requests}) == 4


def test_request_over_wire_keeps_pictures_and_expanded_ids() -> None:
    (request,) = collapse(prompts_of((1, 2)), 0, 0)
    (there,) = from_json(to_json([request], list[Request]), list[Request])
    assert there.pictures == request.pictures
    assert there.expanded.tolist() == request.expanded.tolist()
    (text,) = collapse(prompts_of(()), 0, 0)
    (there,) = from_json(to_json([text], list[Request]), list[Request])
    assert there.pictures == ()
    assert there.expanded is None
