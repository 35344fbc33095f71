"""What a checkpoint keeps of batches under way, and how another pool goes on with it."""

import itertools
from typing import Any

import numpy as np
import pytest

from grpo.engine.client import EngineError
from grpo.engine.messages import Begun
from grpo.rollout.ages import Moment
from grpo.rollout.packing import REFUSED, UNFINISHED, Completions, engine_id, pack_completions, to_lists
from grpo.rollout.partial import Kept
from tests.support.engines import DEADLINE_S, ThreadedEngine
from tests.support.pools import Node, expected_of, requests_of, wait_until

FIRST_TOKEN = -0.5


def stopped_in_the_middle(node: Node, *, version: int, is_dead: bool = False) -> tuple[list[Any], Completions]:
    """The requests of a batch, some of whose completions have ended: two engines have the first token of one each, and
    one of another that has ended with it."""
    engines = [ThreadedEngine(f"engine {number}", num_slots=2) for number in range(2)]
    requests = requests_of(np.random.default_rng(3), 12)
    pool = node.pool(*engines)
    pool.take_up(engines, policy_version=version)
    for engine in engines:
        engine.refuses = lambda owed, engine=engine: engine.works.clear() is not None  # after one more
    batch = pool.submit(requests)
    wait_until(lambda: len(batch.answers) >= 2 and not any(engine.works.is_set() for engine in engines))

    def so_far(engine: ThreadedEngine) -> dict[int, Begun]:
        if is_dead:
            raise EngineError(f"{engine.name} is gone")
        owed = itertools.islice(engine._waiting, 2)
        one = {"token_ids": np.array([77], np.int32), "engine_logprobs": np.array([FIRST_TOKEN], np.float32)}
        return {each.completion_id: Begun(**one, is_whole=bool(place)) for place, each in enumerate(owed)}

    for engine in engines:
        engine.script.control = lambda method, kwargs, engine=engine: so_far(engine)
    (completions,) = pool.so_far([batch])
    return requests, completions


def test_pool_so_far_returns_whole_begun_and_empty_rows(node: Node) -> None:
    requests, kept = stopped_in_the_middle(node, version=4)
    expected, _ = expected_of(requests)
    rows, logprobs = to_lists(kept)
    states = {"whole": 0, "begun": 0, "nothing": 0, "whole with others": 0}
    for row, tokens in enumerate(rows):
        if kept.engines[row] == UNFINISHED:
            states["begun" if tokens else "nothing"] += 1
            assert (tokens, kept.policy_versions[row]) in (([77], 4), ([], UNFINISHED))
        else:
            states["whole" if tokens == expected[row] else "whole with others"] += 1
            assert tokens in (expected[row], [77])
            assert (kept.engines[row] in (engine_id(0, 0), engine_id(0, 1)), kept.policy_versions[row]) == (True, 4)
        assert tokens != [77] or logprobs[row] == [FIRST_TOKEN]
    assert min(states.values()) >= 2, states


def test_pool_submit_with_kept_batch_samples_only_missing_tokens(node: Node) -> None:
    """Behind the first tokens of what was begun, under seeds that repeat no draw of theirs."""
    requests, completions = stopped_in_the_middle(node, version=4)
    engine = ThreadedEngine("another", num_slots=3)
    pool = node.pool(engine)
    pool.take_up([engine], policy_version=6)
    batch = pool.submit(requests, kept=Kept(completions=completions, step=4, lag=2))
    found = pool.collect(batch, DEADLINE_S)
    assert found is not None
    expected, before, after = expected_of(requests)[0], to_lists(completions)[0], to_lists(found)[0]
    whole = completions.engines != UNFINISHED
    begun = ~whole & (completions.lengths > 0)
    for row, tokens in enumerate(after):
        if whole[row]:
            assert tokens == before[row]
        elif begun[row]:
            assert tokens[0] == 77
            assert tokens[1:] != expected[row]
        else:
            assert tokens == expected[row]
    asked = [each for sample in engine.samples for each in sample.ids]
    assert len(asked) == (~whole).sum()
    assert sum(sample.begun is not None for sample in engine.samples) == begun.sum()
    assert found.policy_versions[whole | begun].tolist() == [4] * int((whole | begun).sum())
    assert found.policy_versions[~whole & ~begun].tolist() == [6] * int((~whole & ~begun).sum())
    assert batch.newer.steps == 2 * (~whole & ~begun).sum()
    assert batch.newer.versions == 2 * (~whole & ~begun).sum()
    assert batch.newer.least == 0


def test_pool_submit_with_whole_kept_batch_asks_no_engine(node: Node) -> None:
    requests = requests_of(np.random.default_rng(3), 4)
    rows, logprobs = expected_of(requests)
    kept = pack_completions(rows, logprobs, [3] * len(rows), [engine_id(0, 0)] * len(rows))
    engine = ThreadedEngine("engine 0")
    pool = node.pool(engine)
    batch = pool.submit(requests, kept=Kept(completions=kept, step=3, lag=0))
    assert batch.is_finished
    assert to_lists(pool.collect(batch, DEADLINE_S)) == (rows, logprobs)
    assert engine.reported == []


def test_pool_so_far_with_dead_engines_keeps_no_begun_rows(node: Node) -> None:
    requests, kept = stopped_in_the_middle(node, version=4, is_dead=True)
    rows, expected = to_lists(kept)[0], expected_of(requests)[0]
    assert all(tokens in ([], expected[row]) for row, tokens in enumerate(rows))
    assert 2 <= (kept.engines != UNFINISHED).sum() < len(rows)
    assert REFUSED not in kept.engines


@pytest.mark.parametrize(
    ("step", "syncs"), [(10, 7), (12, 8), (16, 10)], ids=["submitted", "one version later", "newest"]
)
def test_kept_moment_counts_back_from_present_policy(step: int, syncs: int) -> None:
    """Two optimizer steps a generation batch, three policies between."""
    kept = Kept(completions=pack_completions([], [], [], []), step=10, lag=3)
    assert kept.moment(step, Moment(step=16, syncs=10)) == Moment(step=step, syncs=syncs)
