"""Plays tasks of a taskset of verifiers with the policy, all in this process, while a command runs:

    python players.py FOLDER COMMAND...

verifiers takes seconds to start, and a game less; so `play.py`, which a run starts once for each trajectory, asks for
its game here.
"""

import asyncio
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import nltk
from in_process import CLIENT

folder = Path(sys.argv[1]).resolve()
nltk.data.path.append(str(folder / "nltk_data"))  # Where NLTK's own words are not there.

from verifiers.v1.clients import ModelContext, TrainClientConfig  # noqa: E402
from verifiers.v1.tasksets.textarena import TextArenaEnvConfig  # noqa: E402
from verifiers.v1.utils.loaders import load_environment  # noqa: E402

NUM_TASKS = {"train": 64, "evaluation": 16}


def environment():
    player = {"harness": {"id": "in_process"}, "runtime": {"type": "subprocess"}}
    return load_environment(TextArenaEnvConfig(taskset={"id": "textarena", "game": "Hangman-v0"}, player=player))


class Players:
    def __init__(self):
        self.environment = environment()
        self.tasks = list(self.environment.taskset.take(sum(NUM_TASKS.values())))
        self.keys = itertools.count()

    async def serve(self, reader, writer):
        """Play the game that is asked for, as long as who asks for it is there."""
        game = asyncio.ensure_future(self.play(**json.loads(await reader.readline())))
        is_gone = asyncio.ensure_future(reader.read())
        await asyncio.wait([game, is_gone], return_when=asyncio.FIRST_COMPLETED)
        if game.done():
            writer.write(game.result().encode())
        game.cancel()
        is_gone.cancel()
        writer.close()

    async def play(self, number, url, key, reward_url):
        """Play and post the reward. Says why it failed, or "none"."""
        variable = f"KEY_{next(self.keys)}"
        client = TrainClientConfig(
            base_url=url,
            api_key_var=variable,
            renderer_model_name=str(folder / "tokenizer"),
            renderer={"name": "qwen3", "thinking_retention": "all"},  # Sampled tokens stay what they were.
        )
        os.environ[variable] = key
        try:
            context = ModelContext(model="policy", client=client)
            episode = await self.environment.run_episode(self.tasks[number], context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            return "\n".join(f"{error.type}: {error.message}" for error in failures) or "the episode is not ok"
        (trace,) = episode.traces
        body = {"reward": trace.reward, "correct": trace.reward == 1, "parts": {"turns": trace.num_turns}}
        answer = await CLIENT.post(reward_url, json=body, headers={"Authorization": f"Bearer {key}"})
        return "none" if answer.is_success else answer.text


async def main(command):
    players = Players()
    with tempfile.TemporaryDirectory() as private:
        path = os.path.join(private, "players")
        async with players.environment.serving(), await asyncio.start_unix_server(players.serve, path):
            process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "VERIFIERS_PLAYERS": path})
            return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[2:])))
