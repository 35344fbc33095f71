"""Dispatch: numbers worked out by hand, and properties over seeded random batches."""

import itertools

import numpy as np
import pytest

from grpo.rollout.packing import (
    REFUSED,
    Completions,
    PackedRows,
    Request,
    concat_completions,
    concat_rows,
    engine_id,
    node_and_engine,
    pack_completions,
    pack_rows,
    seed_base,
    split_completions,
    to_lists,
    unpack_rows,
)
from grpo.rollout.prompts import Prompts, collapse, concat_prompts


def as_lists(packed):
    return [row.tolist() for row in unpack_rows(packed)]


@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[7]], [[1, 2, 3], [], [4], [5, 6]], [[], [1], []]])
def test_pack_rows_round_trips(rows):
    packed = pack_rows(rows)
    assert packed.num_rows == len(rows)
    assert packed.lengths.tolist() == [len(row) for row in rows]
    assert packed.token_ids.dtype == packed.lengths.dtype == np.int32
    assert as_lists(packed) == rows
    assert as_lists(pack_rows([np.array(row, np.int64) for row in rows])) == rows


def test_pack_rows_concatenates_tokens_and_unpacks_views():
    packed = pack_rows([[5, 6], [], [7, 8, 9]])
    assert packed.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert packed.lengths.tolist() == [2, 0, 3]
    assert all(np.shares_memory(row, packed.token_ids) for row in unpack_rows(packed) if len(row))


def test_concat_rows_keeps_rank_order():
    parts = [pack_rows([[1], [2, 3]]), pack_rows([]), pack_rows([[], [4]])]
    assert as_lists(concat_rows(parts)) == [[1], [2, 3], [], [4]]
    empty = concat_rows([pack_rows([])])
    assert empty.num_rows == 0
    assert empty.token_ids.dtype == np.int32


def shape(requests: list[Request]):
    return [(request.token_ids.tolist(), request.n) for request in requests]


def test_collapse_merges_adjacent_equal_prompts():
    a, b = [1, 2], [1, 2, 3]
    assert shape(collapse(Prompts.of([a, a, a, b, a]), 0, 0)) == [(a, 3), (b, 1), (a, 1)]
    assert collapse(Prompts.of([]), 0, 0) == []
    assert shape(collapse(Prompts.of([[], [], a]), 0, 0)) == [([], 2), (a, 1)]
    # same tokens end to end, cut elsewhere: not equal
    assert shape(collapse(Prompts.of([[1, 2], [3], [1], [2, 3]]), 0, 0)) == [
        ([1, 2], 1),
        ([3], 1),
        ([1], 1),
        ([2, 3], 1),
    ]


def test_collapse_of_group_across_ranks_makes_one_request():
    rank_0, rank_1 = Prompts.of([[9], [5], [5]]), Prompts.of([[5], [5], [4]])
    requests = collapse(concat_prompts([rank_0, rank_1]), 100, 0)
    assert shape(requests) == [([9], 1), ([5], 4), ([4], 1)]
    assert [request.seed for request in requests] == [100, 101, 105]


def test_collapse_seed_is_base_plus_row_and_wraps():
    (request,) = collapse(Prompts.of([[5]]), 7, 3)
    assert request.seed == 10
    (request,) = collapse(Prompts.of([[5]]), 2**63 - 1, 1)
    assert request.seed == 0


def seeds_of_rows(requests: list[Request]) -> list[int]:
    return [request.seed + i for request in requests for i in range(request.n)]


@pytest.mark.parametrize("bits", [64, 32])
def test_collapse_seeds_are_unique_and_independent_of_nodes(bits):
    """A group that covers several whole nodes: the same prompt and the same row numbers on each of them.

    32 bits: torch's CPU generator drops the upper half of a seed.
    """
    base = seed_base(seed=42, number=3, mode="train", draw=0, user_seed=None)
    rows = [[5]] * 300 + [[6]] * 5
    by_node = [seeds_of_rows(collapse(Prompts.of(rows), base, node * 305)) for node in range(5)]
    seeds = [seed % 2**bits for of_node in by_node for seed in of_node]
    assert len(set(seeds)) == len(seeds) == 5 * 305
    assert [seed for of_node in by_node for seed in of_node] == seeds_of_rows(collapse(Prompts.of(rows * 5), base, 0))


def test_seed_base_is_stable_and_depends_on_all_inputs():
    values = {
        "seed": [42, 43],
        "number": [0, 1, 11],
        "mode": ["train", "eval"],
        "draw": [0, 1],
        "user_seed": [None, 0, 1],
    }
    bases = [
        seed_base(**dict(zip(values, combination, strict=True))) for combination in itertools.product(*values.values())
    ]
    assert len(bases) == len(set(bases)) == 2 * 3 * 2 * 2 * 3
    assert all(0 <= base < 2**62 for base in bases)
    assert max(bases) > 2**61  # the bits are used to the top
    # the same on every machine and in every version: resumed runs rely on it
    # printf '[42, 7, "train", 0, null]' | b2sum -l 64  ->  ff8e829c77972b83
    assert seed_base(seed=42, number=7, mode="train", draw=0, user_seed=None) == 0xFF8E829C77972B83 >> 2


def test_completions_pack_split_and_concat_match_worked_example():
    completions = pack_completions([[1, 2], [], [3]], [[-0.5, -1.0], [], [-2.0]], [7, 8, 9], [1024, REFUSED, 3])
    assert completions.token_ids.tolist() == [1, 2, 3]
    assert completions.lengths.tolist() == [2, 0, 1]
    assert completions.engine_logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert (completions.token_ids.dtype, completions.engine_logprobs.dtype) == (np.int32, np.float32)
    assert to_lists(completions) == ([[1, 2], [], [3]], [[-0.5, -1.0], [], [-2.0]])
    first, none, rest = split_completions(completions, [1, 0, 2])
    assert to_lists(first) == ([[1, 2]], [[-0.5, -1.0]])
    assert to_lists(none) == ([], [])
    assert to_lists(rest) == ([[], [3]], [[], [-2.0]])
    assert [part.policy_versions.tolist() for part in (first, none, rest)] == [[7], [], [8, 9]]
    assert concat_completions([rest, none, first]).policy_versions.tolist() == [8, 9, 7]
    assert concat_completions([rest, none, first]).engines.tolist() == [REFUSED, 3, 1024]
    assert [each.tolist() for each in node_and_engine(completions.engines)] == [[1, -1, 0], [0, -1, 3]]
    assert (engine_id(1, 0), engine_id(0, 3)) == (1024, 3)
    assert np.shares_memory(first.token_ids, completions.token_ids)
    assert to_lists(concat_completions([rest, none, first])) == ([[], [3], [1, 2]], [[], [-2.0], [-0.5, -1.0]])
    assert to_lists(concat_completions([])) == to_lists(pack_completions([], [], [], [])) == ([], [])


@pytest.mark.parametrize("rows", [[], [[]], [[5, 6], [], [7]]])
def test_completions_message_with_padding_round_trips(rows):
    sent = pack_completions(
        rows, [[-0.1 * token for token in row] for row in rows], range(len(rows)), range(1, 1 + len(rows))
    )
    message = sent.to_message()
    assert message.dtype == np.int32
    assert message[: 1 + len(rows)].tolist() == [len(rows), *(len(row) for row in rows)]
    came = Completions.from_message(np.concatenate([message, [99, 99]]).astype(np.int32))  # padded
    assert to_lists(came) == to_lists(sent)
    assert came.engine_logprobs.dtype == np.float32
    assert came.policy_versions.tolist() == [*range(len(rows))]
    assert came.engines.tolist() == [*range(1, 1 + len(rows))]
    prompts = pack_rows(rows)
    assert prompts.to_message().dtype == np.int32
    assert as_lists(PackedRows.from_message(np.append(prompts.to_message(), np.int32(99)))) == rows


def test_completions_with_inconsistent_arrays_raise():
    with pytest.raises(AssertionError):
        pack_completions([[1, 2], [3]], [[-1.0], [-1.0, -1.0]], [0, 0], [0, 0])
    with pytest.raises(AssertionError):
        Completions(
            token_ids=np.arange(3),
            lengths=np.array([2]),
            engine_logprobs=np.zeros(3),
            policy_versions=np.zeros(1),
            engines=np.zeros(1),
        )
    with pytest.raises(AssertionError):
        pack_completions([[1, 2], [3]], [[-1.0, -1.0], [-1.0]], [0], [0, 0])
    with pytest.raises(AssertionError):
        pack_completions([[1, 2], [3]], [[-1.0, -1.0], [-1.0]], [0, 0], [0])
    with pytest.raises(AssertionError):
        split_completions(pack_completions([[1]], [[-1.0]], [0], [0]), [2])


@pytest.mark.parametrize("trial", range(30))
def test_split_completions_on_random_batches_restores_rank_and_row(trial):
    """Answers are numbers made of prompt and seed; ranks have ragged shares, and groups lie across the ranks."""
    rng = np.random.default_rng(1000 + trial)
    num_ranks = int(rng.integers(1, 6))
    base, first_row = int(rng.integers(0, 2**62)), int(rng.integers(0, 800))
    prompts = [rng.integers(0, 3, size=rng.integers(0, 4)).tolist() for _ in range(int(rng.integers(1, 12)))]
    rows = [prompt for prompt in prompts for _ in range(int(rng.integers(1, 5)))]
    cuts = [0, *sorted(rng.integers(0, len(rows) + 1, size=num_ranks - 1).tolist()), len(rows)]
    parts = [Prompts.of(rows[start:stop]) for start, stop in itertools.pairwise(cuts)]

    requests = collapse(concat_prompts(parts), base, first_row)
    assert all(not np.array_equal(a.token_ids, b.token_ids) for a, b in itertools.pairwise(requests))
    token_rows: list[list[int]] = []
    for request in requests:
        for i in range(request.n):
            length = (request.seed + i) % 4
            token_rows.append([*request.token_ids.tolist(), (request.seed + i) % 2**20][:length])
    assert len(token_rows) == len(rows)
    logprob_rows = [[-float(token) for token in tokens] for tokens in token_rows]
    completions = pack_completions(token_rows, logprob_rows, [0] * len(rows), [0] * len(rows))

    spans = list(itertools.pairwise(cuts))
    parts_of_ranks = split_completions(completions, [stop - start for start, stop in spans])
    for (start, stop), part in zip(spans, parts_of_ranks, strict=True):
        token_lists, logprob_lists = to_lists(part)
        seeds = [base + first_row + row for row in range(start, stop)]
        expected = [[*row, seed % 2**20][: seed % 4] for row, seed in zip(rows[start:stop], seeds, strict=True)]
        assert token_lists == expected
        assert logprob_lists == [[-float(token) for token in tokens] for tokens in expected]
