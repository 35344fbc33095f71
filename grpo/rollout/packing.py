"""Conversions between prompts, requests, completion arrays and ranks: pure functions over numpy arrays.

A node's rows are the prompts of its ranks, concatenated by local rank. Row i's completion is completion i, whichever
engine sampled it.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from grpo.place.wire import Wire

REFUSED = -1
UNFINISHED = -2
_ENGINES_OF_A_NODE = 1024


def _to_base64(array: np.ndarray, *, dtype: type) -> str:
    return base64.b64encode(np.asarray(array, dtype).tobytes()).decode()


def _from_base64(text: Any, *, dtype: type) -> np.ndarray:
    if not isinstance(text, str):
        raise ValueError(f"{type(text).__name__} is no array as base64")
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def _as_base64(dtype: type) -> tuple[PlainValidator, PlainSerializer]:
    return PlainValidator(partial(_from_base64, dtype=dtype)), PlainSerializer(partial(_to_base64, dtype=dtype))


# Arrays of int32 and float32 in a `Wire`: a list would need a Python object per token.
TokenIds = Annotated[np.ndarray, *_as_base64(np.int32)]
Logprobs = Annotated[np.ndarray, *_as_base64(np.float32)]
FileBytes = Annotated[
    bytes,
    PlainValidator(lambda text: base64.b64decode(str(text), validate=True)),
    PlainSerializer(lambda data: base64.b64encode(data).decode()),
]


def as_words(data: bytes) -> np.ndarray:
    """Bytes as [.] int32, with zeros at the end."""
    return np.frombuffer(data + bytes(-len(data) % 4), np.int32)


def engine_id(node: int, engine: int) -> int:
    """Unique id of an engine within the job."""
    return node * _ENGINES_OF_A_NODE + engine


def node_and_engine(engine_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `engine_id`; `REFUSED` twice if there was no engine."""
    nodes, engines = np.divmod(engine_ids, _ENGINES_OF_A_NODE)
    return np.where(engine_ids == REFUSED, REFUSED, nodes), np.where(engine_ids == REFUSED, REFUSED, engines)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Token-id rows of different lengths in two arrays. No rows and empty rows are valid.

    Example:
        PackedRows(token_ids=np.array([9707, 11, 42], np.int32), lengths=np.array([2, 1], np.int32))
    """

    token_ids: np.ndarray
    """[T] int32, all rows concatenated."""
    lengths: np.ndarray
    """[R] int32, tokens per row; sums to T."""

    def __post_init__(self) -> None:
        assert self.lengths.sum() == len(self.token_ids), (self.lengths.sum(), len(self.token_ids))

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def to_message(self) -> np.ndarray:
        """[1 + R + T] int32: number of rows, lengths, token ids."""
        return np.concatenate([[self.num_rows], self.lengths, self.token_ids], dtype=np.int32)

    @staticmethod
    def from_message(message: np.ndarray) -> "PackedRows":
        """Inverse of `to_message`, as views; `message` may be longer."""
        tokens_begin = 1 + int(message[0])
        lengths = message[1:tokens_begin]
        return PackedRows(lengths=lengths, token_ids=message[tokens_begin : tokens_begin + int(lengths.sum())])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request(Wire):
    """One prompt, to be sampled `n` times."""

    token_ids: TokenIds
    """[L] int32, the prompt; a view into the batch."""
    n: int
    """Completions to sample, >= 1."""
    seed: int
    """Seed of the first completion; completion i has seed + i."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Sampling arguments of these completions, overriding the engine's."""
    home: int | None = None
    """Engine that sampled the beginning of the prompt, and may have it in its prefix cache."""
    pictures: tuple[FileBytes, ...] = ()
    """Image files of the prompt, in order."""
    expanded: TokenIds | None = None
    """[L'] int32, with images: the expected expansion of the prompt, by the trainer's processor."""

    @property
    def num_tokens(self) -> int:
        """Number of the prompt's tokens, with images expanded."""
        return len(self.token_ids if self.expanded is None else self.expanded)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completions:
    """Completions of consecutive rows.

    Example, two completions of 2 and 1 tokens:
        Completions(
            token_ids=np.array([40, 2, 2], np.int32), lengths=np.array([2, 1], np.int32),
            engine_logprobs=np.array([-0.1, -1.2, -0.7], np.float32),
            policy_versions=np.array([3, 3], np.int32), engines=np.array([0, 1], np.int32),
        )
    """

    token_ids: np.ndarray
    """[T] int32, all completions concatenated."""
    lengths: np.ndarray
    """[C] int32, tokens per completion; sums to T."""
    engine_logprobs: np.ndarray
    """[T] float32, natural log, of each token in `token_ids`."""
    policy_versions: np.ndarray
    """[C] int32, optimizer steps of the weights that sampled each completion; `REFUSED` if no engine accepted the
    prompt (no tokens then); `UNFINISHED` if it was not begun."""
    engines: np.ndarray
    """[C] int32, sampling engine of each completion: `engine_id(node, engine of the node)`; `REFUSED` as above;
    `UNFINISHED` until it has ended."""

    def __post_init__(self) -> None:
        sizes = (self.lengths.sum(), len(self.token_ids), len(self.engine_logprobs))
        assert sizes[0] == sizes[1] == sizes[2], sizes
        of_rows = (len(self.lengths), len(self.policy_versions), len(self.engines))
        assert of_rows[0] == of_rows[1] == of_rows[2], of_rows

    @property
    def num_completions(self) -> int:
        return len(self.lengths)

    def to_message(self) -> np.ndarray:
        """[1 + 3 C + 2 T] int32: number of completions, lengths, token ids, bits of the log-probabilities, policy
        versions, engines."""
        bits = self.engine_logprobs.view(np.int32)
        parts = [self.lengths, self.token_ids, bits, self.policy_versions, self.engines]
        return np.concatenate([[self.num_completions], *parts], dtype=np.int32)

    @staticmethod
    def from_message(message: np.ndarray) -> "Completions":
        """Inverse of `to_message`, as views; `message` may be longer."""
        rows = PackedRows.from_message(message)
        begin = 1 + rows.num_rows + len(rows.token_ids)
        end = begin + len(rows.token_ids)
        return Completions(
            lengths=rows.lengths,
            token_ids=rows.token_ids,
            engine_logprobs=message[begin:end].view(np.float32),
            policy_versions=message[end : end + rows.num_rows],
            engines=message[end + rows.num_rows : end + 2 * rows.num_rows],
        )


def _pack(rows: Iterable[Sequence[float] | np.ndarray], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate rows; return values and lengths."""
    arrays: list[np.ndarray] = [np.asarray(row, dtype=dtype) for row in rows]
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return values, np.array([len(array) for array in arrays], np.int32)


def _bounds(lengths: Sequence[int] | np.ndarray) -> list[int]:
    """Row boundaries: [R + 1] start offsets, and the end of the last row."""
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]


def pack_rows(rows: Sequence[Sequence[int] | np.ndarray]) -> PackedRows:
    token_ids, lengths = _pack(rows, np.int32)
    return PackedRows(token_ids=token_ids, lengths=lengths)


def unpack_rows(packed: PackedRows) -> list[np.ndarray]:
    """Views of the rows."""
    return [packed.token_ids[start:stop] for start, stop in pairwise(_bounds(packed.lengths))]


def concat_rows(parts: Sequence[PackedRows]) -> PackedRows:
    """Concatenate the rows of all parts; at least one part."""
    return PackedRows(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
    )


def seed_base(*, seed: int, number: int, mode: str, draw: int, user_seed: int | None) -> int:
    """Derive 62 bits from the arguments, the same on every rank, in every run and on every machine.

    seed: the training seed; number: of the generation batch in the run, or of the optimizer step in evaluation; mode:
    "train" or "eval"; draw: number of the generation for that batch or evaluation; user_seed: a sampling seed of the
    user's, if any. The bits are the first of BLAKE2b over the arguments as a JSON list. Below 2**62, so that adding a
    row stays below 2**63.
    """
    return _bits([int(seed), int(number), str(mode), int(draw), None if user_seed is None else int(user_seed)])


def _bits(arguments: list[int | str | None]) -> int:
    digest = hashlib.blake2b(json.dumps(arguments).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def digest_of(token_ids: Sequence[int]) -> str:
    """Hash of token ids, the same in every process."""
    return hashlib.blake2b(np.asarray(token_ids, np.int32).tobytes(), digest_size=16).hexdigest()


def seed_behind(seed: int, num_tokens: int) -> int:
    """Seed to continue a completion after this number of tokens."""
    return _bits([int(seed), "behind", int(num_tokens)])


def turn_seed(base: int, *, rank: int, row: int, num_rows: int, turn: int | str) -> int:
    """Seed of one turn, independent of the time and engine of its sampling.

    base: from `seed_base`; row: index among the rank's `num_rows` rows; above them for further requests of a rollout
    function. Each turn, numbered or named, has its own base, except number 0; within a turn the rows of a job differ as
    in single-turn batches.
    """
    beyond, own = divmod(row, max(1, num_rows))
    if turn or beyond:
        base = _bits([int(base), turn, *([beyond] if beyond else [])])
    return (base + rank * num_rows + own) % 2**63


def pack_completions(
    token_rows: Sequence[Sequence[int] | np.ndarray],
    logprob_rows: Sequence[Sequence[float] | np.ndarray],
    policy_versions: Sequence[int],
    engines: Sequence[int],
) -> Completions:
    """Pack completions. Row i of `logprob_rows` has one number for each token of row i of `token_rows`; each row has a
    policy version and an engine."""
    token_ids, lengths = _pack(token_rows, np.int32)
    engine_logprobs, logprob_lengths = _pack(logprob_rows, np.float32)
    assert np.array_equal(lengths, logprob_lengths), (lengths, logprob_lengths)
    return Completions(
        token_ids=token_ids,
        lengths=lengths,
        engine_logprobs=engine_logprobs,
        policy_versions=np.asarray(policy_versions, dtype=np.int32),
        engines=np.asarray(engines, dtype=np.int32),
    )


def split_completions(completions: Completions, sizes: Sequence[int]) -> list[Completions]:
    """Split into parts with these numbers of completions, in order; as views."""
    assert sum(sizes) == completions.num_completions, (sum(sizes), completions.num_completions)
    rows, tokens = _bounds(sizes), _bounds(completions.lengths)
    return [
        Completions(
            token_ids=completions.token_ids[tokens[start] : tokens[stop]],
            lengths=completions.lengths[start:stop],
            engine_logprobs=completions.engine_logprobs[tokens[start] : tokens[stop]],
            policy_versions=completions.policy_versions[start:stop],
            engines=completions.engines[start:stop],
        )
        for start, stop in pairwise(rows)
    ]


def concat_completions(parts: Sequence[Completions]) -> Completions:
    """Concatenate the completions of all parts."""
    if not parts:
        return pack_completions([], [], [], [])
    return Completions(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        engine_logprobs=np.concatenate([part.engine_logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        engines=np.concatenate([part.engines for part in parts]),
    )


def to_arrays(completions: Completions) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Token ids and log-probabilities, one array per completion; as views."""
    spans = [slice(start, stop) for start, stop in pairwise(_bounds(completions.lengths))]
    return [completions.token_ids[span] for span in spans], [completions.engine_logprobs[span] for span in spans]


def to_lists(
    completions: Completions, of_refused: tuple[list[int], list[float]] = ([], [])
) -> tuple[list[list[int]], list[list[float]]]:
    """Token ids and log-probabilities, one list per completion.

    Args:
        of_refused: replaces refused completions.
    """
    token_ids, logprobs = ([row.tolist() for row in rows] for rows in to_arrays(completions))
    for row in np.flatnonzero(completions.policy_versions == REFUSED):
        token_ids[row], logprobs[row] = [*of_refused[0]], [*of_refused[1]]
    return token_ids, logprobs


class SingleValues(Sequence[tuple[float]]):
    """Sequence of one-element rows over numbers: log-probabilities in the form TRL reads.

    TRL reads `[row[0] for row in these]`, once. A list for each token would cost more than sending the completions to
    the ranks.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return (self._values[index],) if isinstance(index, int) else SingleValues(self._values[index])

    def __iter__(self) -> Iterator[tuple[float]]:
        return zip(self._values)
