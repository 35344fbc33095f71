"""Prompts of ranks, with their images, to requests for engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from grpo.model.pictures import encoded, shared
from grpo.place.wire import Wire
from grpo.rollout.packing import PackedRows, Request, TokenIds, concat_rows, pack_rows, unpack_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pictured:
    """What a prompt with images has beside its tokens."""

    pictures: tuple[bytes, ...]
    """Its images as files, in their order."""
    expanded: np.ndarray
    """[L'] int32, what the trainer's processor makes of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head(Wire):
    """What stands in a message before its pictures."""

    sizes: tuple[int, ...]
    """Bytes of each of the different pictures."""
    of_rows: dict[int, tuple[int, ...]]
    """By row: the numbers of its pictures."""
    expanded: dict[int, TokenIds]
    """By row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompts:
    """A rank's or a node's prompts."""

    rows: PackedRows
    """Token ids; of a prompt with images with one placeholder for each, as engines take it."""
    pictured: Mapping[int, Pictured] = field(default_factory=dict)
    """By row: of those with images."""

    @staticmethod
    def of(token_ids: Sequence[Sequence[int]]) -> "Prompts":
        """Of text alone."""
        return Prompts(rows=pack_rows(token_ids))

    @staticmethod
    def with_images(
        expanded: Sequence[Sequence[int]], images: Sequence[Sequence[Any] | None], engine_ids: Sequence[Sequence[int]]
    ) -> "Prompts":
        """Of text and images.

        Args:
            expanded: token ids that the trainer's processor makes of each prompt.
            images: of each prompt, PIL images in RGB; none of one of text.
            engine_ids: token ids of each prompt with one placeholder for each image.
        """
        pictured = {
            row: Pictured(pictures=tuple(encoded(image) for image in of_row), expanded=np.asarray(ids, np.int32))
            for row, (ids, of_row) in enumerate(zip(expanded, images, strict=True))
            if of_row
        }
        return Prompts(rows=pack_rows(engine_ids), pictured=pictured)

    def to_message(self) -> np.ndarray:
        """[.] int32: the rows; with images the length of a head, the head, and each different picture once."""
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
        return np.concatenate([self.rows.to_message(), [len(text)], _words(text + b"".join(files))], dtype=np.int32)

    @staticmethod
    def from_message(message: np.ndarray) -> "Prompts":
        """What `to_message` was given; there may be zeros behind it."""
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
    """The prompts of all parts, of which there is one at least, in order."""
    pictured: dict[int, Pictured] = {}
    first = 0
    for part in parts:
        pictured |= {first + row: each for row, each in part.pictured.items()}
        first += part.rows.num_rows
    return Prompts(rows=concat_rows([part.rows for part in parts]), pictured=pictured)


def collapse(
    prompts: Prompts, seed_base: int, first_row: int, overrides: Mapping[str, Any] | None = None
) -> list[Request]:
    """Makes one request of each run of equal neighbouring rows, whichever ranks the rows came from.

    The requests cover the rows in order, without a gap. vLLM gives sample i of a request the seed `seed + i`, so with
    `seed = seed_base + row of the job's batch` each row has a seed of its own in the whole job, the same one on however
    many nodes and ranks. They differ also in the low 32 bits, which are all that torch's CPU generator keeps of a seed.

    Args:
        first_row: number of the first one in the job's batch.
        overrides: as `Request` has them, of all.
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


def _words(data: bytes) -> np.ndarray:
    """Bytes as [.] int32, with zeros at the end."""
    return np.frombuffer(data + bytes(-len(data) % 4), np.int32)
