"""Engines that die again and again: of one prompt, which is found and left out; of themselves; of nothing."""

from collections.abc import Callable

import numpy as np
import pytest

from grpo.engine.client import EngineDied
from grpo.rollout.batch import Batch
from grpo.rollout.packing import REFUSED, Completions, Request, to_lists
from grpo.rollout.pool import EnginePool
from grpo.rollout.search import MAX_MORE_DEATHS, DeadlyRequests, Search
from tests.support.engines import DEADLINE_S, Owed, ThreadedEngine
from tests.support.pools import Node, expected_of, wait_until

POISON = 666


def is_poison(owed: Owed) -> bool:
    return POISON in owed.token_ids


def prompts(count: int, *poison: int, n: int = 2) -> list[Request]:
    """So many different ones, some of which are poison."""
    ids = [np.array([POISON, row] if row in poison else [row], np.int32) for row in range(count)]
    return [Request(token_ids=each, n=n, seed=10 * row) for row, each in enumerate(ids)]


class Deaths:
    """Engines that come back until all is answered, and how they have died."""

    def __init__(self, node: Node, dies_of: Callable[[Owed], bool], *, num_engines: int = 1, slots: int = 64) -> None:
        self._node, self._dies_of, self._slots = node, dies_of, slots
        self.pool: EnginePool = node.pool(*(self._engine(place) for place in range(num_engines)))

    def _engine(self, place: int) -> ThreadedEngine:
        engine = ThreadedEngine(f"engine {place}", num_slots=self._slots)
        engine.dies_of = self._dies_of
        return engine

    def sample(self, requests: list[Request]) -> tuple[Batch, Completions]:
        batch = self.pool.submit(requests)
        while (completions := self.pool.collect(batch, DEADLINE_S)) is None:
            self.come_back()
        return batch, completions

    def come_back(self) -> None:
        clients = [*self.pool._clients]
        for place, client in enumerate(clients):
            wait_until(lambda client=client: client.is_dead or self.pool._queue.has_engines())
            if client.is_dead:
                clients[place] = self._engine(place)
                self._node.engines.append(clients[place])
        self.pool.take_up(clients, policy_version=0)

    @property
    def heard(self) -> list[EngineDied]:
        return [engine._death for engine in self._node.engines if engine._death is not None]

    @property
    def num_of_requests(self) -> int:
        return sum(death.is_requests_fault for death in self.heard)


def expect(completions: Completions, requests: list[Request], *refused: int) -> None:
    """All as they would have been, but for the completions of these prompts."""
    tokens, logprobs = expected_of(requests)
    left_out = [request for request in refused for _ in range(requests[request].n)]
    begins = np.cumsum([0, *(request.n for request in requests)])
    rows = [row for request in dict.fromkeys(left_out) for row in range(begins[request], begins[request + 1])]
    for row in rows:
        tokens[row], logprobs[row] = [], []
    assert to_lists(completions) == (tokens, logprobs)
    assert np.flatnonzero(completions.engines == REFUSED).tolist() == rows


@pytest.mark.parametrize("place", range(16))
def test_search_among_16_prompts_finds_and_refuses_deadly_one(place: int, node: Node) -> None:
    deaths = Deaths(node, is_poison)
    requests = prompts(16, place)
    batch, completions = deaths.sample(requests)
    expect(completions, requests, place)
    assert len(deaths.heard) - deaths.num_of_requests == 2
    assert 1 <= deaths.num_of_requests <= MAX_MORE_DEATHS
    assert len(batch.refusals) == 2
    assert "engines die of a prompt of 2 tokens, which is not sampled again [GRPO-416]: engine 0" in batch.refusals[0]
    assert "\n" not in batch.refusals[0]
    before = len(deaths.heard)
    again = prompts(4, 1)
    again[1] = requests[place]
    expect(deaths.sample(again)[1], again, 1)
    assert len(deaths.heard) == before, "it is known"


def test_search_with_two_deadly_prompts_refuses_both(node: Node) -> None:
    deaths = Deaths(node, is_poison)
    requests = prompts(12, 3, 8)
    ahead = deaths.pool.submit(later := prompts(5))
    expect(deaths.sample(requests)[1], requests, 3, 8)
    completions = deaths.pool.collect(ahead, DEADLINE_S)
    assert completions is not None
    expect(completions, later)


@pytest.mark.parametrize("trial", range(8))
def test_search_with_three_engines_refuses_deadly_prompt(trial: int, node: Node) -> None:
    rng = np.random.default_rng(trial)
    deaths = Deaths(node, is_poison, num_engines=3, slots=8)
    requests = prompts(40, place := int(rng.integers(0, 40)), n=4)
    expect(deaths.sample(requests)[1], requests, place)


def test_search_with_engine_dying_on_answered_prompts_blames_engine(node: Node) -> None:
    is_broken = False
    deaths = Deaths(node, lambda owed: is_broken)
    requests = prompts(6)
    expect(deaths.sample(requests)[1], requests)
    is_broken = True
    with pytest.raises(DeadlyRequests, match=r"at one that had been answered before: rows \[0, 1, 2.*, 11\].*GRPO-410"):
        deaths.sample(requests)
    assert len(deaths.heard) == 3
    assert deaths.num_of_requests == 0


def test_search_with_engine_dying_from_start_raises(node: Node) -> None:
    with pytest.raises(DeadlyRequests, match=r"rows \[0, 1\] of .* with prompts of \[1\] tokens \[GRPO-410\]"):
        Deaths(node, lambda owed: True).sample(prompts(1))


def test_search_after_two_unrelated_deaths_refuses_nothing(node: Node) -> None:
    left = [True] * 2
    deaths = Deaths(node, lambda owed: bool(left) and left.pop())
    requests = prompts(9)
    expect(deaths.sample(requests)[1], requests)
    assert len(deaths.heard) == 2


def test_search_among_32_prompts_gives_up_and_raises(node: Node) -> None:
    with pytest.raises(DeadlyRequests, match=r"and 4 times at parts of them: rows \[0, 1, 2, 3\] of .*GRPO-410"):
        Deaths(node, is_poison).sample(prompts(32, 0))


def test_search_of_dropped_batch_ends(node: Node) -> None:
    deaths = Deaths(node, is_poison)
    dropped = deaths.pool.submit(prompts(16, 5))
    for _ in range(3):
        assert deaths.pool.collect(dropped, DEADLINE_S) is None
        deaths.come_back()
    deaths.pool.drop(dropped)
    requests = prompts(7)
    expect(deaths.sample(requests)[1], requests)


def test_search_with_engine_replaced_in_trial_repeats_it(node: Node) -> None:
    deaths = Deaths(node, is_poison)
    batch = deaths.pool.submit(requests := prompts(4, 2))
    for _ in range(2):
        assert deaths.pool.collect(batch, DEADLINE_S) is None
        stuck = deaths._engine(0)
        stuck.works.clear()
        node.engines.append(stuck)
        if deaths.pool._trials._search is None:
            deaths.come_back()
        else:
            deaths.pool.take_up([stuck], policy_version=0)
    wait_until(lambda: stuck.samples)
    fresh = deaths._engine(0)
    node.engines.append(fresh)
    deaths.pool.take_up([fresh], policy_version=0)
    while (completions := deaths.pool.collect(batch, DEADLINE_S)) is None:
        deaths.come_back()
    expect(completions, requests, 2)


@pytest.mark.parametrize("count", range(1, 17))
def test_search_trials_find_deadly_item_within_max_deaths(count: int) -> None:
    for poison in range(count):
        search = Search(range(count))
        assert search.trial == []
        search.answered()
        found = None
        while found is None:
            assert set(search.trial) <= set(search.suspects)
            if poison in search.trial:
                found = search.died()
            else:
                search.answered()
        assert found == poison
        assert search.num_deaths <= MAX_MORE_DEATHS
        assert search.suspects == []
