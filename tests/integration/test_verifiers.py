"""The recipe `verifiers` with the real package, in an environment of its own: its games become trajectories.

DAPO_MEGA_VERIFIERS names the python of an environment with `verifiers[ta]`, made as the recipe's page says."""

import asyncio
import json
import os
import signal
import subprocess

import psutil
import pytest

from dapo_mega.commands import prepare
from dapo_mega.config import RunConfig, load_config
from dapo_mega.environments.base import Progress, TrajectoryFailure
from dapo_mega.metrics import read_metrics
from dapo_mega.training.run import run_training

from ..unit.environments.programs import assert_exact, programs, prompt_of, request_of, scripted
from .runs import REPOSITORY

pytestmark = pytest.mark.integration

RECIPE = REPOSITORY / "configs" / "recipes" / "verifiers"
PROMPT = prompt_of()


@pytest.fixture(scope="module")
def python():
    if "DAPO_MEGA_VERIFIERS" not in os.environ:
        pytest.skip("set DAPO_MEGA_VERIFIERS to the python that configs/recipes/verifiers/README.md installs")
    return os.path.abspath(os.environ["DAPO_MEGA_VERIFIERS"])


@pytest.fixture(scope="module")
def folder(python, tmp_path_factory):
    """What the recipe prepares."""
    folder = tmp_path_factory.mktemp("verifiers")
    subprocess.run([python, RECIPE / "prepare.py", folder], check=True, timeout=300, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def players(python, folder):
    """The recipe's players, who play as long as the command that they run reads."""
    command = [python, RECIPE / "players.py", folder, "sh", "-c", "echo $VERIFIERS_PLAYERS; read _"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process, pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("VERIFIERS_PLAYERS", process.stdout.readline().strip())
            yield
        finally:
            process.communicate("\n", timeout=60)
    assert process.returncode == 0


@pytest.fixture
def games(players):
    """`games(max_new_tokens, **keys)` makes programs of the recipe, each a game; also their request."""
    made = []

    def make(max_new_tokens=4000, **keys):
        keys = {"max_turns": 32, "max_turn_tokens": 1, "max_failed_share": 1, "retries": 0, **keys}
        made.append(programs("python -S play.py", RECIPE, is_chat=False, **keys))
        return made[-1], request_of(PROMPT, max_new_tokens)

    yield make
    for each in made:
        each.close()


def guesses(folder, letters, spelled=""):
    """These letters, each the token that the recipe's tokenizer has for its guess; before them, one of several tokens,
    which its text is not encoded as."""
    vocabulary = [
        token for token, _ in json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    ]
    guessed = [[vocabulary.index(f"[{letter}]")] for letter in letters]
    return [[*map(vocabulary.index, spelled)], *guessed] if spelled else guessed


def play(environment, request, generate):
    return asyncio.run(asyncio.wait_for(environment.run(PROMPT, request, generate, Progress()), 300))


def test_a_game_is_one_trajectory_of_the_tokens_that_were_sampled(games, folder):
    said = guesses(folder, "AEE", spelled="[E]")  # Said again it is no move, and the second time the end.
    generate, asked = scripted(*said)
    found = play(*games(max_turn_tokens=3), generate)
    assert_exact(found, PROMPT, asked)
    assert (len(found.pieces), len(found.turns), found.stop) == (1, 4, "done")
    assert found.token_ids[found.sampled].tolist() == [token for turn in said for token in turn]
    parts = found.turns[-1].parts
    assert (parts["turns"], parts["correct"]) == (4, 0)
    assert 0 <= parts["reward"] < 1


def test_a_game_that_outgrows_the_run_is_no_failure(games, folder):
    generate, asked = scripted(*guesses(folder, "ETAOIN"))
    found = play(*games(81), generate)
    assert_exact(found, PROMPT, asked)
    assert found.stop in ("context", "tokens")  # Where a turn ends at the limit itself.
    assert 0 < len(found.turns) < 6


def test_a_player_that_is_killed_in_its_game_is_no_reward(games, folder):
    say, asked = scripted(*guesses(folder, "EA") * 2)
    killed = []

    async def generate(request):
        response = await say(request)
        if len(asked) % 2 == 0:
            for process in psutil.Process().children(recursive=True):
                if process.cmdline()[2:3] == ["play.py"]:
                    killed.append(process.pid)
                    os.kill(process.pid, signal.SIGKILL)
        return response

    environment, request = games(retries=1)
    with pytest.raises(TrajectoryFailure, match="SIGKILL") as failure:
        play(environment, request, generate)
    assert (len(asked), len(killed)) == (4, 2)
    assert failure.value.trajectory.stop == "failed"
    assert not any("reward" in turn.parts for turn in failure.value.trajectory.turns)
    metrics = environment.pop_metrics()
    assert (metrics["environment/trajectories_failed"], metrics["environment/retries"]) == (1, 1)


def test_a_run_trains_on_its_games(players, folder):
    prepare.main(["init-model", "--output", str(folder / "model"), "--tokenizer", str(folder / "tokenizer"),
                  "--hidden-size", "64", "--layers", "2", "--max-positions", "8192"])  # fmt: skip
    changes = {
        "output_dir": folder / "run",
        "num_steps": 2,
        "model.path": folder / "model",
        "data.train.path": folder / "train.jsonl",
        "data.evaluation": "null",
        "evaluation.at_start": "false",
        "evaluation.at_end": "false",
        "batch.groups_per_step": 1,
        "batch.group_size": 3,
    }
    run_training(load_config(RunConfig, RECIPE / "run.yaml", [f"{key}={value}" for key, value in changes.items()]))
    records = list(read_metrics(folder / "run" / "metrics.jsonl"))
    assert len(records) == 2
    for record in records:
        assert record["environment/trajectories_finished"] == 3
        # As many tokens as verifiers had turns, of one each, and engine and trainer agree on them.
        assert record["rollout/response_length_mean"] == pytest.approx(record["environment/part_turns"])
        assert record["rollout/logprob_abs_diff_max"] < 1e-4
