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
            await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)
            ended.append("cancelled")
            raise

    def meanwhile():
        if begun.is_set():
            raise Told

    with pytest.raises(Told):
        thread.complete(work(), meanwhile)
    assert ended == ["cancelled"]


def test_what_is_raised_before_the_work_begins_leaves_nothing_behind(thread):
    def meanwhile():
        raise Told

    with pytest.raises(Told):
        thread.complete(asyncio.sleep(DEADLINE_S), meanwhile)
    thread.run(asyncio.sleep(0))
    assert not asyncio.all_tasks(thread.loop)


async def fails(error):
    await asyncio.sleep(0)
    raise error("scripted")


@pytest.mark.parametrize("error", [TimeoutError, KeyError])
def test_what_the_work_raises_is_raised(thread, error):
    with pytest.raises(error, match="scripted"):
        thread.complete(fails(error), lambda: None)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_the_loop_outlives_what_would_end_its_thread(thread, error):
    other = thread.start(asyncio.sleep(0.3, "others go on"))
    with pytest.raises(error, match="scripted"):
        thread.run(fails(error), DEADLINE_S)
    assert other.result(DEADLINE_S) == "others go on"
    assert thread.run(asyncio.sleep(0, "later"), DEADLINE_S) == "later"


def test_meanwhile_is_called_again_and_again_and_the_end_is_noticed_at_once(thread):
    calls = []

    async def work():
        while len(calls) < 3:
            await asyncio.sleep(0.01)
        return "done"

    assert thread.complete(work(), lambda: calls.append(1)) == "done"
    assert len(calls) == 3
