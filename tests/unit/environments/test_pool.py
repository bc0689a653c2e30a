"""What environments do to their process is a failure of theirs: never a hang, and never another one's answer."""

import asyncio
import resource
import time

import pytest

from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.environments.pool import EnvironmentPool
from dapo_mega.rewards.processes import CallError

CODE = """
import fcntl, json, os, resource, sys, threading, time

class Unprintable(Exception):
    def __str__(self): raise ValueError("no text")

class Faulty:
    def reset(self, task, seed): self.task = task
    def step(self, action): return getattr(self, self.task)()
    def tell(self): return {"text": "told"}
    def unprintable(self): raise Unprintable
    def surrogates(self): return {"text": "a\\udcffb"}
    def unanswerable(self): json.dumps = None
    def recursive(self):
        mine = {}
        mine["parts"] = mine
        return mine
    def deep(self):
        sys.setrecursionlimit(10**5)
        nested = []
        for _ in range(5000): nested = [nested]
        return {"parts": nested}
    def runaway(self):
        def again(_): return sorted([1], key=again)
        again(1)
    def forged(self, answer={}):
        for number in range(1, 50):
            body = answer if isinstance(answer, bytes) else json.dumps({"number": number, **answer}).encode()
            for descriptor in self._pipes(): os.write(descriptor, len(body).to_bytes(4, sys.byteorder) + body)
        time.sleep(2)
    def nested_answer(self): self.forged(b"[" * 100_000)
    def _pipes(self):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                is_written = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
                if is_written and "pipe" in os.readlink(f"/proc/self/fd/{descriptor}"): yield descriptor
            except OSError: pass
    def late(self): time.sleep(2)
    def large(self): return {"text": str(len(bytearray(2**28)))}
    def process(self): return {"text": str(os.getpid())}
    def limits(self):
        limits = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_NOFILE)
        return {"text": " ".join(str(soft) for soft, _ in limits)}

class Threadless(Faulty):
    def reset(self, task, seed):
        self.task = task
        threading.stack_size(2**40)
"""


@pytest.fixture
def pool(tmp_path):
    """Makes a pool of one process of a class of the code; it ends with the test."""
    (tmp_path / "faulty.py").write_text(CODE)
    pools = []

    def make(name="Faulty", **keys):
        keys = {"num_workers": 1, "time_limit_s": 20, **keys}
        pools.append(EnvironmentPool(OwnEnvironment(path=f"{tmp_path / 'faulty.py'}:{name}", **keys)))
        return pools[-1]

    yield make
    for each in pools:
        each.close()


async def told(pool, task="tell"):
    """The text of one step."""
    live = await pool.open()
    try:
        await live.observe("reset", task, 0)
        _, observation, _ = await live.observe("step", {})
        return observation.messages[0]["content"] if observation.messages else None
    finally:
        live.close()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("unprintable", "its method step raises Unprintable"),
        ("recursive", "nested more than 100 times"),
        ("deep", "nested more than 100 times"),
        ("runaway", "its method step raises RecursionError"),
        ("unanswerable", r"its process died \(exit status 1\)"),
        ("forged", "the process answered with something else"),
        ("nested_answer", "the process answered with something else"),
    ],
)
def test_a_fault_is_said_at_once(pool, task, said):
    faulty = pool()
    asyncio.run(told(faulty))
    begin = time.monotonic()
    with pytest.raises(CallError, match=said):
        asyncio.run(told(faulty, task))
    assert time.monotonic() - begin < 15
    assert asyncio.run(told(faulty)) == "told"


def test_a_process_has_the_memory_and_the_time_that_are_set_and_there_are_as_many(pool):
    assert asyncio.run(told(pool(), "large")) == str(2**28)
    with pytest.raises(CallError, match="MemoryError"):
        asyncio.run(told(pool(memory_limit_mib=64), "large"))
    with pytest.raises(CallError, match=r"a call of step took longer than 0.5 s"):
        asyncio.run(told(pool(time_limit_s=0.5), "late"))

    async def processes(faulty):
        return {*await asyncio.gather(*(told(faulty, "process") for _ in range(4)))}

    assert [len(asyncio.run(processes(pool(num_workers=number)))) for number in (1, 2)] == [1, 2]


def test_what_is_no_utf_8_is_shown_as_a_question_mark(pool):
    assert asyncio.run(told(pool(), "surrogates")) == "a?b"


def test_one_whose_thread_cannot_start_is_a_failure_and_its_process_goes_on(pool):
    threadless = pool("Threadless")

    async def two():
        first = await threadless.open()
        await first.observe("reset", "tell", 0)
        with pytest.raises(CallError, match="no thread can be started"):
            await threadless.open()
        return (await first.observe("step", {}))[0]

    assert asyncio.run(two()) == {"text": "told"}
    begin = time.monotonic()
    threadless.close()
    assert time.monotonic() - begin < 5


def test_one_that_is_cancelled_before_its_process_runs_ends_no_other(pool):
    faulty = pool()

    async def cancelled():
        tasks = [asyncio.create_task(told(faulty)) for _ in range(6)]
        await asyncio.sleep(0.05)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(cancelled())
    assert found[1::2] == ["told"] * 3
    assert all(isinstance(each, asyncio.CancelledError) for each in found[::2])


def test_nobody_waits_for_a_pool_that_is_closed_while_its_processes_start(pool):
    faulty = pool(num_workers=2)

    async def closed():
        tasks = [asyncio.create_task(told(faulty)) for _ in range(40)]
        await asyncio.sleep(0)
        await asyncio.to_thread(faulty.close)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 15)

    assert all(isinstance(each, CallError) for each in asyncio.run(closed()))


def test_stacks_do_not_count_as_memory_and_coroutines_find_descriptors(pool):
    faulty = pool()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def limits(*lives):
        await lives[0].observe("reset", "limits", 0)
        return [int(limit) for limit in (await lives[0].observe("step", {}))[0]["text"].split()]

    async def measured():
        lives = [await faulty.open()]
        one, _ = await limits(*lives)
        lives += [await faulty.open() for _ in range(2)]
        several, descriptors = await limits(*lives)
        for live in lives[1:]:
            live.close()
        await asyncio.sleep(0.3)
        return several - one, several - (await limits(*lives))[0], descriptors

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        assert asyncio.run(measured()) == (2 * 2**23, 2 * 2**23, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
