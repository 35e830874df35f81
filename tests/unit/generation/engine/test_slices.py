"""The gate by itself: who passes, who waits, and who is waited for."""

import asyncio
from collections.abc import Awaitable

import pytest

from generation.engine.slices import Slices, Turnstile, Unfinished


def answer() -> Unfinished:
    return Unfinished([5], seed=1, budget=100)


async def in_time(awaitable: Awaitable[None]) -> None:
    await asyncio.wait_for(awaitable, 60)


async def grow(
    turnstile: Turnstile, slices: int, seen: list[int], unfinished: Unfinished | None = None
) -> None:
    """Grow one answer by so many slices, and append the version of each to `seen`."""
    unfinished = unfinished or answer()
    for _ in range(slices):
        async with turnstile.slice(unfinished) as (version, tokens):
            assert tokens == min(7, unfinished.left)
            seen.append(version)
            await asyncio.sleep(0)


async def test_each_opening_is_one_slice_for_everybody() -> None:
    slices, seen = Slices(7), list[int]()

    async def episode(count: int) -> None:
        with slices.episode() as turnstile:
            await grow(turnstile, count, seen)

    tasks = [asyncio.ensure_future(episode(count)) for count in (1, 2, 3)]
    await asyncio.sleep(0)
    assert (slices.parked, seen) == (3, [])  # it was closed when they came
    for version, parked, passed in [(4, 2, 3), (4, 1, 2), (9, 0, 1)]:
        slices.open(version)
        assert slices.parked == 0, "those that are let go are waited for at once"
        await in_time(slices.settled())
        slices.close()
        assert slices.parked == parked
        assert seen == [version] * passed
        seen.clear()
    await in_time(asyncio.gather(*tasks))  # type: ignore[arg-type]


async def test_an_episode_in_a_tool_is_waited_for_and_counted() -> None:
    slices, tool, seen = Slices(7), asyncio.Event(), list[int]()

    async def episode() -> None:
        with slices.episode() as turnstile:
            await grow(turnstile, 1, seen)
            await tool.wait()
            await grow(turnstile, 2, seen)

    slices.open(0)
    task = asyncio.ensure_future(episode())
    await asyncio.sleep(0)
    settled = asyncio.ensure_future(slices.settled())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not settled.done()
    assert (slices.parked, slices.elsewhere) == (0, 1)
    tool.set()
    await in_time(settled)
    assert (slices.parked, slices.elsewhere, seen) == (1, 0, [0, 0])
    slices.open(1)
    await in_time(task)
    assert seen == [0, 0, 1]


async def test_an_episode_is_parked_when_all_its_requests_are() -> None:
    slices, seen, sampled = Slices(7), list[int](), asyncio.Event()

    async def long(turnstile: Turnstile) -> None:
        async with turnstile.slice(unfinished):
            await sampled.wait()
        await grow(turnstile, 1, seen, unfinished)

    unfinished = answer()
    slices.open(3)
    with slices.episode() as turnstile:
        both = asyncio.gather(long(turnstile), grow(turnstile, 2, seen))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not turnstile.parked and turnstile.running == 1
        sampled.set()
        await in_time(slices.settled())
        assert turnstile.parked and turnstile.unfinished is None, "two wait"
        slices.open(4)
        await in_time(both)  # type: ignore[arg-type]
    assert seen == [3, 4, 4]


async def test_a_slice_waits_for_work_beside_a_parked_request_where_the_episode_asks() -> None:
    slices, tool, seen = Slices(7), asyncio.Event(), list[int]()

    async def calls(turnstile: Turnstile) -> None:
        await grow(turnstile, 1, seen)
        with turnstile.away():
            await tool.wait()
        await grow(turnstile, 1, seen)

    async def episode() -> None:
        with slices.episode() as turnstile:
            await asyncio.gather(grow(turnstile, 2, seen), calls(turnstile))

    slices.open(3)
    task = asyncio.ensure_future(episode())
    settled = asyncio.ensure_future(slices.settled())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not settled.done() and (slices.parked, slices.elsewhere, seen) == (0, 1, [3, 3])
    tool.set()
    await in_time(settled)
    assert (slices.parked, slices.elsewhere, seen) == (1, 0, [3, 3, 3])
    slices.open(4)
    await in_time(task)
    assert seen == [3, 3, 3, 4]


async def test_a_parked_episode_leaves_its_place_to_others_and_takes_it_again() -> None:
    slices, room, seen = Slices(7), asyncio.Semaphore(2), list[int]()

    async def episode() -> None:
        await room.acquire()
        with slices.episode(room) as turnstile:
            await grow(turnstile, 2, seen)
        room.release()

    slices.open(0)
    tasks = [asyncio.ensure_future(episode()) for _ in range(6)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert (slices.parked, seen, room.locked()) == (6, [0] * 6, False), "two places, six episodes"
    slices.open(1)
    await in_time(asyncio.gather(*tasks))  # type: ignore[arg-type]
    assert (seen, room._value) == ([0] * 6 + [1] * 6, 2)


@pytest.mark.parametrize("released", [False, True])
async def test_an_episode_that_is_cancelled_is_forgotten(released: bool) -> None:
    slices, room, seen = Slices(7), asyncio.Semaphore(0), list[int]()

    async def episode() -> None:
        try:
            with slices.episode(room) as turnstile:
                await grow(turnstile, 3, seen)
        finally:
            room.release()

    task = asyncio.ensure_future(episode())
    await asyncio.sleep(0)
    assert slices.parked == 1
    if released:
        slices.open(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    slices.open(1)
    await in_time(slices.settled())
    assert (task.cancelled(), slices.parked, seen, room._value) == (True, 0, [], 1)


async def test_time_spent_at_the_gate_is_measured() -> None:
    slices, seen = Slices(7), list[int]()
    with slices.episode() as turnstile:
        task = asyncio.ensure_future(grow(turnstile, 1, seen))
        assert turnstile.parked_s == 0
        await asyncio.sleep(0.02)
        waited = turnstile.parked_s
        assert waited > 0
        slices.open(0)
        await in_time(task)
        after = turnstile.parked_s
        await asyncio.sleep(0.02)
        assert waited <= after == turnstile.parked_s


def test_a_slice_has_a_token() -> None:
    with pytest.raises(ValueError, match="slice_tokens must be at least 1, not 0"):
        Slices(0)
