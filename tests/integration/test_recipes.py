"""The recipes for code of one's own, with the commands of their pages: valid, tried on their data, and run."""

import json
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

from dapo_mega.commands import prepare
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.metrics import read_metrics
from dapo_mega.planning.dry_run import print_dry_run
from dapo_mega.training.run import run_training

from .runs import REPOSITORY

pytestmark = pytest.mark.integration

TRIED = {
    "own_reward": ["function (weight 1): 0"],
    "composite": [
        "answer (weight 1): 1, correct=True",
        "repetition (weight 0.5)",
        "length_dapo (weight 0.5)",
        "digits",
    ],
    "multiple_choice": ["function (weight 1): 1, correct=True, chose=1"],
}


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """`commands(recipe)` runs what the page of a recipe shows before its training."""
    for folder in ("configs", "launch", "tools", "dapo_mega"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(recipe):
        page = (REPOSITORY / "configs" / "recipes" / recipe / "README.md").read_text()
        for line in re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["dapo-mega", "prepare"]:
                prepare.main(words[2:])
            elif words[:1] == ["python"]:
                monkeypatch.setattr("sys.argv", words[1:])
                runpy.run_path(words[1], run_name="__main__")

    return run


@pytest.mark.parametrize("recipe", TRIED)
def test_a_recipes_reward_scores_its_first_row(recipe, commands, capsys):
    commands(recipe)
    print_dry_run(load_config(RunConfig, Path("configs") / "recipes" / recipe / "run.yaml"))
    printed = capsys.readouterr().out
    tried = re.findall(r"made-up response to the first prompt: (.*)", printed)
    assert [line.startswith(expected) for line, expected in zip(tried, TRIED[recipe], strict=True)] == [True] * len(
        tried
    )
    assert "note: the reward was not tried" not in printed


def test_a_run_learns_from_a_function_that_judges_nothing(commands):
    commands("own_reward")
    file = Path("configs") / "recipes" / "own_reward" / "run.yaml"
    run_training(load_config(RunConfig, file, ["num_steps=6", "checkpoint={every: 0, save_hf_at_end: false}"]))
    first, *_, last = read_metrics(Path("runs") / "recipes" / "own_reward" / "metrics.jsonl")
    assert last["evaluation/reward_mean"] > 3 * first["evaluation/reward_mean"]
    assert last["reward/part_function"] == pytest.approx(last["rollout/reward_mean"])
    assert last["reward/num_failed"] == 0
    assert {name for name in last if "accuracy_mean" in name or "_at_" in name} == set()


OWN = {
    "own_loss": "algorithm.policy_loss",
    "own_advantage": "algorithm.advantage",
    "own_filter": "algorithm.dynamic_sampling_on",
    "own_order": "data.sampling.order",
}
COMPARED = ("policy/", "rollout/reward", "rollout/logprob", "buffer/", "reward/")


def records_of(folder):
    return [
        {name: value for name, value in record.items() if name.startswith(COMPARED)}
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def test_a_run_with_code_of_its_own_resumes_exactly_and_with_other_code_only_when_told(commands, tmp_path):
    commands("own_loss")
    recipes = Path("copy") / "recipes"  # As deep as the recipes, whose paths are relative.
    shutil.copytree(REPOSITORY / "configs" / "recipes", recipes)
    model, data = (Path("runs", "recipes", name).resolve() for name in ("model", "data/train.parquet"))
    changes = [f"model.path={model}", f"data.train.path={data}"]
    for recipe, key in OWN.items():  # Each by itself is valid; then all of them together.
        config = load_config(RunConfig, recipes / recipe / "run.yaml", changes[:2])
        assert [*config.own_code] == [key]
        print_dry_run(config)
        changes.append(f"{key}={json.dumps(config.own_code[key].model_dump(mode='json'))}")

    def run(folder, num_steps, **options):
        own = [f"output_dir={tmp_path / folder}", f"num_steps={num_steps}"]
        config = load_config(RunConfig, recipes / "own_order" / "run.yaml", [*changes, *own])
        assert sorted(config.own_code) == sorted(OWN.values())
        run_training(config, **options)
        return records_of(tmp_path / folder)

    whole = run("whole", 4)
    assert all(0 <= record["policy/own_far_share"] <= 1 for record in whole)
    assert any(record["policy/own_far_share"] for record in whole)
    run("parts", 2)
    assert run("parts", 4) == whole
    for recipe, right, wrong, key in (
        ("own_order", "range(len(prompts))", "range(1, len(prompts))", "data.sampling.order"),
        ("own_filter", ">= least", "", "algorithm.dynamic_sampling_on"),
    ):
        (code,) = (recipes / recipe).glob("my_*.py")
        (recipes / recipe / "wrong.py").write_text(code.read_text().replace(right, wrong))
        text = (recipes / recipe / "run.yaml").read_text().replace(code.name, "wrong.py")
        (recipes / recipe / "wrong.yaml").write_text(text)
        with pytest.raises(InputError, match=rf"^{key}.*wrong\.py:\w+: it returned"):
            print_dry_run(load_config(RunConfig, recipes / recipe / "wrong.yaml", changes[:2]))
    code = recipes / "own_loss" / "my_loss.py"
    code.write_text(code.read_text().replace("> 0.2", "> 0.1"))
    with pytest.raises(InputError, match=r"code under algorithm\.policy_loss was another: its file has changed"):
        run("parts", 5)
    run("parts", 5, accept_changes=True)
    run("parts", 6)


def test_a_run_in_turns_learns_from_its_environment_and_resumes_exactly(commands, tmp_path):
    commands("own_environment")
    file = Path("configs") / "recipes" / "own_environment" / "run.yaml"

    def run(folder, num_steps):
        changes = ["checkpoint={every: 4, save_hf_at_end: false}", f"output_dir={tmp_path / folder}"]
        run_training(load_config(RunConfig, file, [*changes, f"num_steps={num_steps}", "evaluation.at_start=false"]))
        return records_of(tmp_path / folder)

    whole = run("whole", 8)
    # Engine and trainer compute the same on every turn: the rows are those that were asked.
    assert max(record["rollout/logprob_abs_diff_max"] for record in whole) < 1e-4
    assert whole[-1]["rollout/reward_mean"] > whole[0]["rollout/reward_mean"] + 0.15
    assert whole[-1]["reward/part_digits"] > whole[0]["reward/part_digits"] + 0.2
    run("parts", 4)
    assert run("parts", 8)[:8] == whole
    evaluation = read_metrics(tmp_path / "whole" / "metrics.jsonl")[-1]
    assert evaluation["evaluation/reward_mean"] > -0.4
    assert evaluation["evaluation/response_length_mean"] > 1.1
