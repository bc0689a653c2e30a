"""Functions in threads beside an event loop."""

import asyncio
import threading
import time

import pytest

from dapo_mega.distributed.event_loops import beside


def raising(error):
    raise error


def test_calls_that_follow_one_another_use_a_thread_again():
    async def threads():
        return {await beside(threading.current_thread) for _ in range(50)}

    assert len(asyncio.run(threads())) <= 2


def test_calls_at_once_have_a_thread_each_and_one_that_hangs_hinders_none():
    hangs = threading.Event()
    meeting = threading.Barrier(100)

    async def body():
        hung = asyncio.create_task(beside(hangs.wait))
        await asyncio.gather(*(beside(lambda: meeting.wait(30)) for _ in range(100)))
        assert not hung.done()
        hangs.set()
        assert await hung

    asyncio.run(body())
    time.sleep(0.1)
    assert sum(thread.name == "scoring" for thread in threading.enumerate()) <= 64


@pytest.mark.parametrize(("error", "raised"), [(KeyError("no"), KeyError), (SystemExit(1), RuntimeError)])
def test_what_a_call_raises_is_raised_and_its_thread_goes_on(error, raised):
    async def body():
        for _ in range(3):
            with pytest.raises(raised):
                await beside(lambda: raising(error))
        return await beside(lambda: 5)

    assert asyncio.run(body()) == 5


def test_a_call_that_nobody_waits_for_any_more_frees_its_thread():
    begins, ends = threading.Event(), threading.Event()

    async def body():
        call = asyncio.create_task(beside(lambda: (begins.set(), ends.wait())))
        await asyncio.to_thread(begins.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        ends.set()
        return await beside(lambda: 5)

    assert asyncio.run(body()) == 5
