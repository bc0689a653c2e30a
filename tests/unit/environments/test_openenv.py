"""The recipe for OpenEnv servers, with a real server and OpenEnv's own client, through our pool."""

import asyncio
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo_mega.config.environment import OwnEnvironment
from dapo_mega.environments.pool import EnvironmentPool
from dapo_mega.rewards.processes import CallError

RECIPE = Path(__file__).parents[3] / "configs" / "recipes" / "openenv"
SERVER = """
import os, sys, time
from my_server import GuessTheNumber, Hint, serve

class Faulty(GuessTheNumber):
    hidden = 1  # Of a session that was never reset.
    def step(self, action, timeout_s=None, **options):
        match action.text:
            case "raise": raise ValueError("no disk")
            case "slow": time.sleep(1.5)
            case "die": os._exit(1)
        return super().step(action) if action.text.isdigit() else Hint(text="late", reward=1.0)

serve(Faulty, int(sys.argv[1]), 2)
"""


@pytest.fixture
def pool(tmp_path):
    """A pool whose environments are sessions of a server with two places. Both end with the test."""
    pytest.importorskip("openenv", reason="OpenEnv is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(RECIPE)!r}); exec({SERVER!r})", str(port)]
    with (tmp_path / "output").open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    settings = {"url": f"http://127.0.0.1:{port}", "timeout_s": 1, "place_s": 15}
    made = EnvironmentPool(
        OwnEnvironment(path=f"{RECIPE / 'my_openenv.py'}:OpenEnv", settings=settings, num_workers=1, time_limit_s=40)
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "output").read_text()
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        yield made
    finally:
        made.close()
        server.kill()
        server.wait(10)


async def opened(pool, seed=0):
    live = await pool.open()
    await live.observe("reset", {}, seed)
    return live


async def said(live, text):
    return (await live.observe("step", {"text": text}))[1]


def test_episodes_are_played_and_more_of_them_than_the_server_has_places(pool):
    async def play(seed):
        """By bisection; what was guessed, and what the last turn earned."""
        live = await opened(pool, seed)
        low, high, guesses = 0, 9, []
        while True:
            guesses.append((low + high) // 2)
            seen = await said(live, str(guesses[-1]))
            if seen.stop or len(guesses) == 4:
                break
            if seen.messages[0]["content"] == "+":
                low = guesses[-1] + 1
            else:
                high = guesses[-1] - 1
        live.close()
        return guesses, seen

    async def play_all():
        return await asyncio.wait_for(asyncio.gather(*map(play, range(6))), 60)

    played = asyncio.run(play_all())
    assert [guesses[-1] for guesses, _ in played] == [random.Random(seed).randint(0, 9) for seed in range(6)]
    assert [(seen.stop, dict(seen.earned)) for _, seen in played] == [("done", {"reward": 1.0, "correct": 1.0})] * 6
    assert max(len(guesses) for guesses, _ in played) > 1


@pytest.mark.parametrize(
    ("text", "reason"), [("slow", "TimeoutError"), ("raise", "EXECUTION_ERROR"), ("die", "ConnectionClosed")]
)
def test_a_fault_ends_the_session_and_is_never_an_observation(pool, text, reason):
    async def play():
        live = await opened(pool)
        with pytest.raises(CallError, match=reason):
            await said(live, text)
        if text == "slow":
            await asyncio.sleep(2)  # The late answer has come.
            with pytest.raises(CallError):
                await said(live, "1")
        live.close()
        if text == "die":
            return
        lives = [await opened(pool, 3) for _ in range(2)]  # All places: the first one's is free again.
        right = str(random.Random(3).randint(0, 9))
        assert [(await said(each, right)).earned["reward"] for each in lives] == [1.0, 1.0]

    asyncio.run(asyncio.wait_for(play(), 60))
