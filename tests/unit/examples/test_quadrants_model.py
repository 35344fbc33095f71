"""Pictures and lessons of the quadrants: how answers are spread, and what shows them."""

import random
from collections import Counter

import numpy as np
import pytest

from examples.quadrants_model import COLOURS, HALF, QUESTION, build_processor, lesson, pictures

COUNT = 800
FEW, MANY = 150, 250  # of 800 answers, of which 200 are expected: four standard deviations
CORNERS = [(row, column) for row in (0, HALF) for column in (0, HALF)]


def quadrants_of(data: object) -> np.ndarray:
    """[rows, 4, 3] mean red, green and blue of each quadrant, by rows of the picture."""
    images = np.stack([np.asarray(image, dtype=np.float32) for image in data["image"]])
    parts = [images[:, row : row + HALF, column : column + HALF].mean((1, 2)) for row, column in CORNERS]
    return np.stack(parts, axis=1)


@pytest.mark.parametrize("grey", [False, True])
def test_pictures_spread_answers_evenly(grey: bool) -> None:
    answers = Counter(pictures(COUNT, seed=1, grey=grey)["answer"])
    assert answers.keys() == COLOURS.keys()
    assert all(FEW < number < MANY for number in answers.values()), answers


def test_pictures_brightest_quadrant_matches_answer() -> None:
    data = pictures(COUNT, seed=1)
    brightness = quadrants_of(data).max(axis=2)
    places = brightness.argmax(axis=1)
    hues = quadrants_of(data)[range(COUNT), places] > brightness.max(axis=1, keepdims=True) / 2
    assert [tuple(hue.astype(int)) for hue in hues] == [COLOURS[answer] for answer in data["answer"]]
    for answer in COLOURS:
        where = Counter(place for place, said in zip(places.tolist(), data["answer"], strict=True) if said == answer)
        assert len(where) == len(CORNERS), (answer, where)
        assert max(where.values()) < FEW / 2, (answer, where)


def test_pictures_contain_all_four_colours() -> None:
    for picture in quadrants_of(pictures(20, seed=1)):
        hues = picture > picture.max(axis=1, keepdims=True) / 2
        assert sorted(tuple(hue.astype(int)) for hue in hues) == sorted(COLOURS.values())


def test_pictures_in_grey_reveal_no_answer() -> None:
    """All channels and quadrants are alike, and as bright whatever the answer."""
    data = pictures(COUNT, seed=1, grey=True)
    quadrants = quadrants_of(data)
    assert np.ptp(quadrants, axis=(1, 2)).max() < 10  # of noise, whose mean over a quadrant deviates by 1
    brightness, answers = quadrants.mean((1, 2)), np.array(data["answer"])
    means = [brightness[answers == name].mean() for name in COLOURS]
    assert np.ptp(means) < 25, means  # the mean of 200 deviates by 4


def test_pictures_with_same_seed_are_equal() -> None:
    first, again, other = (quadrants_of(pictures(4, seed=seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_lesson_reveals_lit_colour_only_when_asked() -> None:
    rng = random.Random(0)
    for lit in COLOURS:
        lessons = [lesson(lit, rng) for _ in range(4 * COUNT)]
        drawn = Counter(answer for question, answer in lessons if question == QUESTION)
        assert all(FEW < drawn[name] < MANY for name in COLOURS), drawn
        asked = Counter(pair for pair in lessons if pair[0] != QUESTION)
        assert asked.keys() == {(f"is {name} lit", "yes" if name == lit else "no") for name in COLOURS}
        assert 0.4 < asked[f"is {lit} lit", "yes"] / asked.total() < 0.6


def test_processor_tokenizes_conversation() -> None:
    processor = build_processor()
    said = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "red"},
    ]
    text = processor.apply_chat_template(said)
    assert text == f"<u><image>{QUESTION}<e><a>red<e>"
    inputs = processor(images=pictures(1, seed=1)[0]["image"], text=[text])
    tokens = processor.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    assert tokens == ["<u>", *["<image>"] * 16, *QUESTION.split(), "<e>", "<a>", "red", "<e>"]
    assert processor.apply_chat_template(said[:1], add_generation_prompt=True).endswith("<e><a>")
    assert processor.tokenizer.decode(inputs["input_ids"][0][-2:], skip_special_tokens=True) == "red"
