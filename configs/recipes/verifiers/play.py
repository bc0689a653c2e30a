"""Plays one task of a taskset of verifiers with the policy. It is started once for each trajectory."""

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

import nltk

folder = Path(sys.argv[1]).resolve()
nltk.data.path.append(str(folder / "nltk_data"))  # Where NLTK's own words are not there.

from verifiers.v1.clients import ModelContext, TrainClientConfig  # noqa: E402
from verifiers.v1.tasksets.textarena import TextArenaEnvConfig  # noqa: E402
from verifiers.v1.utils.loaders import load_environment  # noqa: E402


def environment():
    player = {"harness": {"id": "in_process"}, "runtime": {"type": "subprocess"}}
    return load_environment(TextArenaEnvConfig(taskset={"id": "textarena", "game": "Hangman-v0"}, player=player))


async def play(number):
    played = environment()
    (task,) = played.taskset.skip(number).take(1)
    client = TrainClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key_var="OPENAI_API_KEY",
        renderer_model_name=str(folder / "tokenizer"),
        renderer={"name": "qwen3", "thinking_retention": "all"},  # Sampled tokens stay what they were.
    )
    async with played.serving():
        return await played.run_episode(task, ModelContext(model="policy", client=client))


if __name__ == "__main__":
    episode = asyncio.run(play(int(json.loads(os.environ["DAPO_MEGA_TASK"])["ground_truth"])))
    if not episode.ok:
        failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit("\n".join(f"{error.type}: {error.message}" for error in failures))
    (trace,) = episode.traces
    body = {"reward": trace.reward, "correct": trace.reward == 1, "parts": {"turns": trace.num_turns}}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["DAPO_MEGA_REWARD_URL"]
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).close()
