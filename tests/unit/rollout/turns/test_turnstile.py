"""The order in which rows call tools in the main thread, by hand; `test_loop_like_trls.py` holds it to TRL's loop."""

import asyncio

from grpo.rollout.turns.turnstile import Turnstile


def order_of(*rows: list[tuple[int, bool]]) -> list[int]:
    """Who passes when.

    Args:
        rows: of each message of each row, how many steps of the event loop its turn takes, and whether it waits.
    """
    turnstile, passed = Turnstile(len(rows)), []

    async def episode(row: int, messages: list[tuple[int, bool]]) -> None:
        for steps, waits in messages:
            for _ in range(steps):
                await asyncio.sleep(0)
            async with turnstile.turn(row, waits=waits):
                passed.append(row)
        turnstile.leave(row)

    async def episodes() -> None:
        await asyncio.wait_for(asyncio.gather(*(episode(row, messages) for row, messages in enumerate(rows))), 20)

    asyncio.run(episodes())
    return passed


def test_turnstile_passes_rows_in_order() -> None:
    assert order_of([(9, True)], [(5, True)], [(1, True)]) == [0, 1, 2]


def test_turnstile_passes_each_row_once_per_round() -> None:
    assert order_of([(1, True), (1, True)], [(9, True), (1, True)]) == [0, 1, 0, 1]


def test_turnstile_skips_ended_rows() -> None:
    assert order_of([(1, True), (9, True)], [], [(5, True)]) == [0, 2, 0]
    assert order_of([], [(1, True), (1, True), (1, True)], []) == [1, 1, 1]


def test_turnstile_lets_thread_calls_pass_without_waiting() -> None:
    assert order_of([(50, True)], [(1, False), (1, False)]) == [1, 1, 0]
    assert order_of([(1, False)], [(5, True)]) == [0, 1]


def test_turnstile_after_cancelled_wait_lets_others_pass() -> None:
    async def given_up() -> bool:
        turnstile = Turnstile(2)

        async def waits() -> None:
            async with turnstile.turn(1, waits=True):
                raise AssertionError("row 0 is before it")

        waiting = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        turnstile.leave(1)
        async with turnstile.turn(0, waits=True):
            return waiting.cancelled()

    assert asyncio.run(given_up())
