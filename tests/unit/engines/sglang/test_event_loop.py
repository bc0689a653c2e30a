"""A loop in a thread of its own, and the thread that waits for what runs there."""

import asyncio
import threading

import pytest

from dapo_mega.engines.sglang.event_loop import LoopThread
from tests.unit.engines.sglang.scripted_server import DEADLINE_S


@pytest.fixture
def thread():
    made = LoopThread("tested")
    yield made
    made.close()


class Told(Exception):
    pass


def test_what_is_raised_meanwhile_cancels_the_work_and_waits_for_its_end(thread):
    begun, ended = threading.Event(), []

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            ended.append(True)

    def meanwhile():
        if begun.is_set():
            raise Told

    with pytest.raises(Told):
        thread.drive(work(), meanwhile)
    assert ended == [True]


def test_what_is_raised_before_the_work_begins_leaves_nothing_behind(thread):
    def meanwhile():
        raise Told

    with pytest.raises(Told):
        thread.drive(asyncio.sleep(DEADLINE_S), meanwhile)
    thread.run(asyncio.sleep(0))
    assert not asyncio.all_tasks(thread.loop)


@pytest.mark.parametrize("error", [TimeoutError, KeyError, SystemExit, KeyboardInterrupt])
def test_what_the_work_raises_is_raised_and_the_loop_goes_on(thread, error):
    other = thread.start(asyncio.sleep(0.3, "others go on"))

    async def work():
        await asyncio.sleep(0)
        raise error("scripted")

    with pytest.raises(error, match="scripted"):
        thread.drive(work(), lambda: None)
    assert other.result(DEADLINE_S) == "others go on"
    assert thread.drive(asyncio.sleep(0, "later"), lambda: None) == "later"


def test_meanwhile_is_called_again_and_again_and_the_end_is_noticed_at_once(thread):
    calls = []

    async def work():
        while len(calls) < 3:
            await asyncio.sleep(0.01)
        return "done"

    assert thread.drive(work(), lambda: calls.append(1)) == "done"
    assert len(calls) == 3
