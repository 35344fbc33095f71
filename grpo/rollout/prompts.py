"""Prompts with their images: from ranks to requests for engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from grpo.model.pictures import encoded, shared
from grpo.place.wire import Wire
from grpo.rollout.packing import PackedRows, Request, TokenIds, as_words, concat_rows, pack_rows, unpack_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pictured:
    """Images of a prompt."""

    pictures: tuple[bytes, ...]
    """Image files, in order."""
    expanded: np.ndarray
    """[L'] int32, expansion of the prompt by the trainer's processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head(Wire):
    """Header of a message, before its images."""

    sizes: tuple[int, ...]
    """Bytes of each distinct image."""
    of_rows: dict[int, tuple[int, ...]]
    """Indices of a row's images, by row."""
    expanded: dict[int, TokenIds]
    """Expansions by row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompts:
    """Prompts of a rank or a node."""

    rows: PackedRows
    """Token ids; with images, one placeholder for each, as engines expect."""
    pictured: Mapping[int, Pictured] = field(default_factory=dict)
    """Images by row, for rows with images."""

    @staticmethod
    def of(token_ids: Sequence[Sequence[int]]) -> "Prompts":
        """Make prompts of text alone."""
        return Prompts(rows=pack_rows(token_ids))

    @staticmethod
    def with_images(
        expanded: Sequence[Sequence[int]], images: Sequence[Sequence[Any] | None], engine_ids: Sequence[Sequence[int]]
    ) -> "Prompts":
        """Make prompts of text and images.

        Args:
            expanded: token ids of each prompt, expanded by the trainer's processor.
            images: PIL images in RGB of each prompt; None or empty for text.
            engine_ids: token ids of each prompt with one placeholder for each image.
        """
        pictured = {
            row: Pictured(pictures=tuple(encoded(image) for image in of_row), expanded=np.asarray(ids, np.int32))
            for row, (ids, of_row) in enumerate(zip(expanded, images, strict=True))
            if of_row
        }
        return Prompts(rows=pack_rows(engine_ids), pictured=pictured)

    def to_message(self) -> np.ndarray:
        """[.] int32: the rows; with images also the length of a header, the header, and each distinct image once."""
        if not self.pictured:
            return self.rows.to_message()
        files, places = shared(file for row in self.pictured.values() for file in row.pictures)
        numbers = iter(places)
        head = _Head(
            sizes=tuple(map(len, files)),
            of_rows={row: tuple(next(numbers) for _ in each.pictures) for row, each in self.pictured.items()},
            expanded={row: each.expanded for row, each in self.pictured.items()},
        )
        text = head.dumps().encode()
        return np.concatenate([self.rows.to_message(), [len(text)], as_words(text + b"".join(files))], dtype=np.int32)

    @staticmethod
    def from_message(message: np.ndarray) -> "Prompts":
        """Inverse of `to_message`; trailing zeros are ignored."""
        rows = PackedRows.from_message(message)
        rest = message[1 + rows.num_rows + len(rows.token_ids) :]
        if len(rest) == 0 or rest[0] == 0:
            return Prompts(rows=rows)
        data, begin = rest[1:].tobytes(), int(rest[0])
        head = _Head.loads(data[:begin])
        ends = np.cumsum([begin, *head.sizes]).tolist()
        files = [data[start:stop] for start, stop in pairwise(ends)]
        pictured = {
            row: Pictured(pictures=tuple(files[number] for number in numbers), expanded=head.expanded[row])
            for row, numbers in head.of_rows.items()
        }
        return Prompts(rows=rows, pictured=pictured)


def concat_prompts(parts: Sequence[Prompts]) -> Prompts:
    """Concatenate the prompts of all parts; at least one part."""
    pictured: dict[int, Pictured] = {}
    first = 0
    for part in parts:
        pictured |= {first + row: each for row, each in part.pictured.items()}
        first += part.rows.num_rows
    return Prompts(rows=concat_rows([part.rows for part in parts]), pictured=pictured)


def collapse(
    prompts: Prompts, seed_base: int, first_row: int, overrides: Mapping[str, Any] | None = None
) -> list[Request]:
    """Merge each run of equal neighbouring rows into one request, across ranks.

    The requests cover the rows in order, without gaps. vLLM gives sample i of a request the seed `seed + i`, so with
    `seed = seed_base + row of the job's batch` each row has a unique seed in the whole job, independent of the numbers
    of nodes and ranks. Seeds also differ in their low 32 bits, the only ones torch's CPU generator uses.

    Args:
        first_row: index of the first row in the job's batch.
        overrides: see `Request`; for all requests.
    """
    token_ids, pictured = unpack_rows(prompts.rows), prompts.pictured

    def pictures(row: int) -> tuple[bytes, ...]:
        return pictured[row].pictures if row in pictured else ()

    def begins(row: int) -> bool:
        is_other = row == 0 or not np.array_equal(token_ids[row], token_ids[row - 1])
        return is_other or pictures(row) != pictures(row - 1)

    starts = [row for row in range(len(token_ids)) if begins(row)]
    return [
        Request(
            token_ids=token_ids[start],
            n=stop - start,
            seed=(seed_base + first_row + start) % 2**63,
            overrides=overrides or {},
            pictures=pictures(start),
            expanded=pictured[start].expanded if start in pictured else None,
        )
        for start, stop in pairwise([*starts, len(token_ids)])
    ]
