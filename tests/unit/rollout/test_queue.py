"""Which engine samples what: the decisions alone."""

import itertools

import numpy as np
import pytest

from grpo.rollout.queue import Chunk, RequestQueue


def chunks_of(*tokens_and_ids: tuple[int, list[int]]) -> list[Chunk]:
    return [Chunk(ids=ids, tokens=tokens) for tokens, ids in tokens_and_ids]


def test_request_queue_sends_largest_chunk_to_least_loaded_engine() -> None:
    requests = RequestQueue([4, 4])
    requests.add(chunks_of((5, [0, 1]), (15, [2, 3]), (10, [4, 5]), (5, [6, 7]), (5, [8, 9])))
    # the dearest first; 30 | 20 -> 10 to the second, which is then full -> 10 to the first
    assert requests.send() == [(0, [2, 3]), (1, [4, 5]), (1, [0, 1]), (0, [6, 7])]
    assert requests.send() == []
    requests.answered(1, 4)
    assert requests.send() == [(1, [8, 9])]  # one place: the other waits inside the engine
    assert requests.fullest() == 1
    assert requests.forget([2, 3, 8, 9]) == [(0, [2, 3]), (1, [8, 9])]
    assert requests.fullest() == 1


def test_request_queue_answered_and_forget_lower_outstanding_tokens() -> None:
    requests = RequestQueue([4, 4])
    requests.add(chunks_of((9, [0]), (5, [1])))
    assert requests.send() == [(0, [0]), (1, [1])]
    requests.answered(0, 0)
    requests.add(chunks_of((3, [2])))
    assert requests.send() == [(0, [2])]  # 0 | 5, and not 9 | 5
    assert requests.forget([1]) == [(1, [1])]
    requests.add(chunks_of((2, [3])))
    assert requests.send() == [(1, [3])]  # 3 | 0, and not 3 | 5


def test_request_queue_with_chunk_above_window_sends_it_whole() -> None:
    requests = RequestQueue([1, 2])
    requests.add(chunks_of((9, [0]), (2, [1, 2, 3]), (1, [4, 5, 6])))
    assert requests.send() == [(0, [0]), (1, [1, 2, 3])]
    requests.answered(1, 1)
    assert requests.send() == []  # two that are left take both places
    requests.answered(0, 0)
    assert requests.send() == [(0, [4, 5, 6])]


def test_request_queue_with_spare_slots_cuts_chunks_to_free_ones() -> None:
    requests = RequestQueue([4, 3], num_spare=1)
    requests.add(chunks_of((9, [0, 1, 2, 3]), (5, [4, 5])))
    assert requests.send() == [(0, [0, 1, 2]), (1, [3]), (1, [4])]  # three places and two
    assert not requests.all_sent()
    requests.add(chunks_of((50, [6, 7, 8])))
    requests.answered(1, 3)
    assert requests.send() == [(1, [5])], "a rest stays first in line"
    requests.answered(0, 0)
    requests.answered(0, 1)
    requests.answered(1, 4)
    assert requests.send() == [(1, [6]), (0, [7, 8])]  # the one with fewer tokens first
    assert requests.all_sent()


def test_request_queue_sends_rest_of_chunk_to_same_engine() -> None:
    requests = RequestQueue([3, 3], num_spare=1)
    requests.add(chunks_of((13, [0, 1]), (8, [2, 3, 4])))
    assert requests.send() == [(0, [0, 1]), (1, [2, 3])]
    requests.answered(0, 0)
    requests.answered(0, 1)
    requests.answered(1, 2)
    assert requests.send() == [(1, [4])]  # 8 | 0
    assert requests.lose(1) == [3, 4]
    requests.add(chunks_of((7, [5, 6, 7])))
    assert requests.send() == [(0, [5, 6])]
    assert requests.forget([5, 6, 7]) == [(0, [5, 6])]
    assert requests.all_sent(), "the rest is forgotten, too"


@pytest.mark.parametrize("num_spare", [0, 1, 2])
@pytest.mark.parametrize("trial", range(200))
def test_request_queue_on_random_loads_sends_each_completion_once(trial: int, num_spare: int) -> None:
    rng = np.random.default_rng(trial)
    windows = rng.integers(1, 12, size=rng.integers(1, 5)).tolist()
    requests = RequestQueue([window + num_spare for window in windows], num_spare)
    ids = itertools.count()
    left: list[dict[int, int]] = [{} for _ in windows]  # tokens of each completion that an engine holds, by id
    waiting: dict[int, list[int]] = {}  # chunks that were not sent, by first id
    sent_once: list[int] = []
    batches_left = int(rng.integers(1, 4))
    while batches_left or waiting or any(left):
        if batches_left and (rng.random() < 0.2 or not any(left)):
            batches_left -= 1
            chunks = [[next(ids) for _ in range(rng.integers(1, 5))] for _ in range(rng.integers(1, 12))]
            waiting |= {chunk[0]: chunk for chunk in chunks}
            requests.add([Chunk(ids=chunk, tokens=int(rng.integers(1, 100))) for chunk in chunks])
        for engine, chunk in requests.send():
            begun = waiting.pop(chunk[0])
            assert begun[: len(chunk)] == chunk
            if rest := begun[len(chunk) :]:
                assert num_spare
                waiting[rest[0]] = rest
            assert len(left[engine]) < windows[engine]
            assert not num_spare or len(left[engine]) + len(chunk) <= windows[engine]
            left[engine] |= {completion: int(rng.integers(1, 30)) for completion in chunk}
            sent_once += chunk
        for engine, held in enumerate(left):
            assert requests.is_idle(engine) == (not held)
            assert not waiting or len(held) >= windows[engine]  # no place is free while something waits
        engine = int(rng.choice([engine for engine in range(len(windows)) if left[engine]]))
        speed = int(rng.integers(1, 4))
        for completion, tokens in list(left[engine].items()):
            left[engine][completion] = tokens - speed
            if tokens <= speed:
                del left[engine][completion]
                requests.answered(engine, completion)
        if waiting and rng.random() < 0.1:  # a batch is dropped
            dropped = [*waiting.pop(min(waiting)), *itertools.islice(left[0], 1)]
            held = {completion for _, completions in requests.forget(dropped) for completion in completions}
            assert held == {completion for completion in dropped if completion in left[0]}
            for completion in held:
                del left[0][completion]
    assert len(sent_once) == len(set(sent_once))
