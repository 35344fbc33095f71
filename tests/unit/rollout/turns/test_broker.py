"""Turns on their way from ranks to scripted engines and back: the real broker, pool and sockets."""

import asyncio
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo.rollout.packing import REFUSED, engine_id, turn_seed
from grpo.rollout.turns.broker import TurnBroker
from grpo.rollout.turns.channel import TurnChannel
from grpo.rollout.turns.sampler import Sampler
from tests.support.engines import DEADLINE_S, ThreadedEngine, answer_to
from tests.support.pools import Node, wait_until

BASE = 12345
NUM_ROWS = 4  # of each rank


class Watch:
    """What a broker says to a failure watch."""

    def __init__(self) -> None:
        self.failures: list[Any] = []
        self.covered: list[Path] = []

    def fail(self, cause: Any) -> None:
        self.failures.append(cause)

    def covers(self, folder: Path) -> None:
        self.covered.append(folder)

    def uncovers(self, folder: Path) -> None:
        if folder in self.covered:
            self.covered.remove(folder)


@pytest.fixture
def watch() -> Watch:
    return Watch()


class Ranks:
    """A broker and the channels of its node's ranks."""

    def __init__(self, nodes: Node, watch: Watch, *engines: ThreadedEngine, ranks: int = 2, **pool: Any) -> None:
        self.pool = nodes.pool(*engines, **pool)
        self.broker = TurnBroker(self.pool, watch, num_others=ranks - 1)  # type: ignore[arg-type]
        self.broker.accept()
        self.channels = [TurnChannel(self.broker.connect())]
        self.channels += [TurnChannel.to(str(self.broker.address)) for _ in range(ranks - 1)]
        self.samplers = [
            Sampler(channel, base_seed=BASE, rank=rank, num_rows=NUM_ROWS, max_model_len=64)
            for rank, channel in enumerate(self.channels)
        ]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.broker.close()


@pytest.fixture
def ranks_of(node: Node, watch: Watch) -> Iterator[Any]:
    made: list[Ranks] = []

    def make(*engines: ThreadedEngine, **more: Any) -> Ranks:
        made.append(Ranks(node, watch, *engines, **more))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def expected(prompt: list[int], *, rank: int, row: int, turn: int) -> list[int]:
    return answer_to(np.asarray(prompt), turn_seed(BASE, rank=rank, row=row, num_rows=NUM_ROWS, turn=turn))


def test_broker_with_uneven_ranks_answers_every_turn(ranks_of: Any) -> None:
    ranks = ranks_of(ThreadedEngine("engine 0"), ThreadedEngine("engine 1"), ranks=3)
    first, _, third = ranks.samplers

    async def episode() -> list[list[int]]:
        said, heard = [4, 5], []
        for turn in range(5):
            answer = await first.sample(said, row=2, turn=turn)
            assert answer.logprobs == [-float(token) for token in answer.token_ids]
            heard.append(answer.token_ids)
            said = said + answer.token_ids[:3]
        return heard

    done: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: done.append(asyncio.run(episode())))
    thread.start()
    prompts = [[row, row] for row in range(9)]
    turns = third.sample_all(prompts)
    assert [turn.token_ids for turn in turns] == [
        expected(prompt, rank=2, row=row, turn=-1) for row, prompt in enumerate(prompts)
    ]
    assert [turn.token_ids for turn in third.sample_all(prompts[:2])] == [
        expected(prompt, rank=2, row=row, turn=-2) for row, prompt in enumerate(prompts[:2])
    ]
    thread.join(DEADLINE_S)
    said = [4, 5]
    for turn, heard in enumerate(done[0]):
        assert heard == expected(said, rank=0, row=2, turn=turn)
        said = said + heard[:3]
    assert first.counts["turns"] == 5
    assert third.counts["tokens"] == sum(len(turn.token_ids) for turn in turns) + sum(
        len(expected(prompt, rank=2, row=row, turn=-2)) for row, prompt in enumerate(prompts[:2])
    )


def test_turn_seed_is_unique_and_keeps_row_seed_at_first_turn() -> None:
    seeds = {
        turn_seed(BASE, rank=rank, row=row, num_rows=9, turn=turn)
        for rank in range(3)
        for row in range(12)  # three more than a rank has
        for turn in range(-4, 4)
    }
    assert len(seeds) == 3 * 12 * 8
    assert turn_seed(BASE, rank=0, row=7, num_rows=9, turn=0) == BASE + 7
    assert turn_seed(BASE, rank=2, row=7, num_rows=9, turn=0) == BASE + 25  # as one rank that has all rows
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_broker_keeps_turns_of_episode_on_one_engine(ranks_of: Any) -> None:
    engines = [ThreadedEngine(f"engine {number}") for number in range(3)]
    ranks = ranks_of(*engines, ranks=1, node=1)
    sampler = ranks.samplers[0]
    homes = {}
    for turn in range(4):
        for row in range(3):
            asyncio.run(sampler.sample([row, turn], row=row, turn=turn))
            homes.setdefault(row, sampler.engines[row])
            assert sampler.engines[row] == homes[row]
    assert set(homes.values()) <= {engine_id(1, number) for number in range(3)}


def test_sample_all_with_refused_prompts_reports_refusals(ranks_of: Any) -> None:
    engine = ThreadedEngine("engine 0")
    engine.refuses = lambda owed: owed.token_ids[0] == 6
    ranks = ranks_of(engine, ranks=1, max_model_len=5)
    refused, long, taken, _ = ranks.samplers[0].sample_all([[6], [1] * 5, [1], [1]])
    assert refused.refusal == "ValueError: too odd"
    assert "a prompt has 5 tokens; the engine holds 5" in str(long.refusal)
    assert (refused.token_ids, long.token_ids, taken.refusal) == ([], [], None)
    assert ranks.samplers[0].counts["refused"] == 2
    assert ranks.samplers[0].engines[0] == REFUSED


def test_sample_of_turn_already_asked_raises(ranks_of: Any) -> None:
    """Another call for it would bring the same tokens; not so after a refusal, or one that was given up."""
    engine = ThreadedEngine("engine 0")
    sampler = ranks_of(engine, ranks=1, max_model_len=5).samplers[0]
    wrong = r"row 0, turn 1 \[GRPO-615\]: both calls would get the same random numbers"

    async def best_of_two() -> None:
        await asyncio.gather(*(sampler.sample([1], row=0, turn=1) for _ in range(2)))

    async def impatient() -> None:
        await asyncio.wait_for(sampler.sample([1], row=0, turn=2), 0.2)

    for _ in range(2):
        assert asyncio.run(sampler.sample([1] * 5, row=0, turn=1)).refusal is not None
    engine.works.clear()
    with pytest.raises(ValueError, match=wrong):
        asyncio.run(best_of_two())
    engine.works.set()
    assert asyncio.run(sampler.sample([1], row=0, turn=1)).token_ids
    with pytest.raises(ValueError, match=wrong):
        asyncio.run(sampler.sample([1], row=0, turn=1))
    engine.works.clear()
    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    engine.works.set()
    assert asyncio.run(sampler.sample([1], row=0, turn=2)).token_ids


def test_sample_after_refusal_clears_it_but_sample_all_keeps_it(ranks_of: Any) -> None:
    """By `sample`, which reported the refusal; what `sample_all` was refused is in its row's completion for good."""
    ranks = ranks_of(ThreadedEngine("engine 0"), ranks=1, max_model_len=5)
    sampler = ranks.samplers[0]
    asyncio.run(sampler.sample([1] * 5, row=0, turn=0))
    assert [*sampler.refused] == [0]
    asyncio.run(sampler.sample([1], row=0, turn=1))
    assert sampler.refused == {}
    assert sampler.engines[0] == engine_id(0, 0)
    sampler.sample_all([[1], [1] * 5, [1], [1]])
    sampler.sample_all([[1]] * 4)
    assert [*sampler.refused] == [1]


def test_broker_without_engines_stalls_ranks_until_restart(node: Node, ranks_of: Any) -> None:
    engine = ThreadedEngine("engine 0")
    engine.works.clear()
    ranks = ranks_of(engine, ranks=2)
    future = ranks.channels[1].ask(np.array([1, 2], np.int32), place=0, order=0, seed=5, name="a turn", overrides={})
    wait_until(lambda: engine.samples)
    engine.die()
    wait_until(lambda: all(channel.is_stalled for channel in ranks.channels))
    assert {channel.trouble for channel in ranks.channels} == {None}
    successor = ThreadedEngine("engine 0 again")
    node.engines.append(successor)
    ranks.broker.deliveries += 1
    for channel in ranks.channels:
        channel.delivered()
    ranks.pool.take_up([successor], policy_version=3)
    assert not any(channel.is_stalled for channel in ranks.channels)
    answer = future.result(DEADLINE_S)
    assert (answer.token_ids.tolist(), answer.policy_version) == (answer_to(np.array([1, 2]), 5), 3)


def test_channel_connecting_without_engines_is_stalled(node: Node, watch: Watch) -> None:
    engine = ThreadedEngine("engine 0")
    broker = TurnBroker(node.pool(engine), watch, num_others=1)  # type: ignore[arg-type]
    broker.accept()
    engine.die()
    late = TurnChannel.to(str(broker.address))
    wait_until(lambda: late.is_stalled)
    late.close()
    broker.close()


def test_broker_after_three_engine_deaths_names_first_turn(node: Node, ranks_of: Any) -> None:
    engines = [ThreadedEngine(f"engine {number}") for number in range(3)]
    ranks = ranks_of(*engines, ranks=1)
    for engine in engines:
        engine.works.clear()
    ranks.channels[0].ask(
        np.array([1], np.int32), place=0, order=0, seed=5, name="turn 3 of row 0 of rank 7", overrides={}
    )
    for _ in range(3):
        wait_until(lambda: any(engine.samples for engine in engines))
        at_work = next(engine for engine in engines if engine.samples)
        engines.remove(at_work)
        at_work.die()
    wait_until(lambda: ranks.channels[0].trouble)
    assert "turn 3 of row 0 of rank 7" in str(ranks.channels[0].trouble)
    assert ranks.channels[0].is_stalled


def test_broker_with_deadly_turn_refuses_it(ranks_of: Any) -> None:
    engines = [ThreadedEngine(f"engine {number}") for number in range(4)]
    for engine in engines:
        engine.dies_of = lambda owed: 666 in owed.token_ids
    ranks = ranks_of(*engines, ranks=1)
    asked = ranks.channels[0].ask(np.array([666], np.int32), place=0, order=0, seed=5, name="turn 3", overrides={})
    answer = asked.result(DEADLINE_S)
    assert answer.engine == REFUSED
    assert "[GRPO-416]" in answer.refusal
    assert sum(engine.is_dead for engine in engines) == 3
    assert ranks.channels[0].trouble is None


def test_broker_with_engine_error_fails_job(watch: Watch, ranks_of: Any) -> None:
    engine = ThreadedEngine("engine 0")
    ranks = ranks_of(engine, ranks=1)
    engine._on_answer(engine.error("failed at a request"))
    wait_until(lambda: watch.failures)
    assert "failed at a request" in str(watch.failures[0])
    assert ranks.channels[0].trouble is None


def test_broker_after_cancel_or_lost_rank_aborts_turns(ranks_of: Any) -> None:
    engine = ThreadedEngine("engine 0")
    engine.works.clear()
    ranks = ranks_of(engine, ranks=2)
    turn = {"place": 0, "order": 0, "seed": 5, "name": "", "overrides": {}}
    asked = [channel.ask(np.array([1], np.int32), **turn) for channel in ranks.channels]
    wait_until(lambda: len(engine.samples) == 2)
    assert asked[0].cancel()
    wait_until(lambda: ("abort", (0,)) in engine.reported or ("abort", (1,)) in engine.reported)
    ranks.channels[1].close()
    wait_until(lambda: {word for word, _ in engine.reported if word == "abort"} and len(engine.reported) == 4)
    with pytest.raises(ConnectionError, match="local main is gone"):
        asked[1].result(DEADLINE_S)


def test_sample_passes_overrides_to_engine(ranks_of: Any) -> None:
    engine = ThreadedEngine("engine 0")
    ranks = ranks_of(engine, ranks=1)
    asyncio.run(ranks.samplers[0].sample([1], row=0, turn=0, max_tokens=7, stop=["x"]))
    assert engine.samples[0].overrides == {"max_tokens": 7, "stop": ["x"]}


def test_broker_stops_listening_with_all_ranks_and_drops_bad_peers(watch: Watch, ranks_of: Any) -> None:
    ranks = ranks_of(ThreadedEngine("engine 0"), ranks=1)
    assert ranks.broker.address is None
    broker = TurnBroker(ranks.pool, watch, num_others=2)  # type: ignore[arg-type]
    folder = Path(str(broker.address)).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert watch.covered == [folder]
    broker.accept()
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(str(broker.address))
    stranger.sendall((4).to_bytes(4) + b"\xff\xff\xff\xff")
    assert stranger.recv(1) == b""  # closed
    stranger.close()
    channel = TurnChannel.to(str(broker.address))
    wait_until(lambda: not folder.exists() and not watch.covered)
    sampler = Sampler(channel, base_seed=BASE, rank=0, num_rows=4, max_model_len=64)
    assert sampler.sample_all([[1]])[0].token_ids == expected([1], rank=0, row=0, turn=-1)
    channel.close()
    broker.close()
    assert not watch.failures


def test_channel_stall_ends_with_weight_sync_and_returns_after_death(node: Node, ranks_of: Any) -> None:
    """An engine that dies between two batches is back with the next weight sync; one that dies behind a weight sync is
    missed."""
    engine = ThreadedEngine("engine 0")
    ranks = ranks_of(engine, ranks=1)
    engine.die()
    channel = ranks.channels[0]
    wait_until(lambda: channel.is_stalled)

    def deliver(*engines: ThreadedEngine) -> None:
        node.engines.extend(engines)
        ranks.broker.deliveries += 1
        channel.delivered()
        ranks.pool.take_up(engines, policy_version=1)

    second = ThreadedEngine("engine 0 again")
    deliver(second)
    assert not channel.is_stalled
    assert ranks.samplers[0].sample_all([[1]])[0].token_ids == expected([1], rank=0, row=0, turn=-1)
    second.die()
    wait_until(lambda: channel.is_stalled)
    ranks.broker.deliveries += 1  # as if it had died while it was delivered to
    channel.delivered()
    ranks.pool.take_up([second], policy_version=2)
    wait_until(lambda: channel.is_stalled)


def test_sample_after_timeout_aborts_turn(ranks_of: Any) -> None:
    engine = ThreadedEngine("engine 0")
    engine.works.clear()
    ranks = ranks_of(engine, ranks=1)

    async def impatient() -> None:
        await asyncio.wait_for(ranks.samplers[0].sample([1], row=0, turn=0), 0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    wait_until(lambda: "abort" in {word for word, _ in engine.reported})
    assert not ranks.samplers[0].asked


def test_sample_with_bad_arguments_or_closed_sampler_raises(ranks_of: Any) -> None:
    sampler = ranks_of(ThreadedEngine("engine 0"), ranks=1).samplers[0]
    with pytest.raises(TypeError, match=r"sample\(\) takes no seed; of vLLM's SamplingParams it takes .*temperature"):
        asyncio.run(sampler.sample([1], row=0, turn=0, seed=5))
    with pytest.raises(ValueError, match="both count from 0"):
        asyncio.run(sampler.sample([1], row=0, turn=-1))
    with pytest.raises(Exception, match=r"serializ|JSON|json"):
        asyncio.run(sampler.sample([1], row=0, turn=0, stop=object()))
    assert not sampler.asked
    sampler.close()
    with pytest.raises(RuntimeError, match="is over"):
        sampler.sample_all([[1]])
