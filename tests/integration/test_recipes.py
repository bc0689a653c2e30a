"""The recipes for own rewards, with the commands of their pages: valid, tried on their data, and one is run."""

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


def test_a_run_with_code_of_its_own_resumes_exactly_and_with_other_code_only_when_told(commands, tmp_path):
    commands("own_code")
    recipe = Path("copy") / "recipes" / "own_code"  # As deep as the recipe, whose paths are relative.
    shutil.copytree(REPOSITORY / "configs" / "recipes", recipe.parent)
    model, data = (Path("runs", "recipes", name).resolve() for name in ("model", "data/train.parquet"))

    def run(folder, num_steps, **options):
        changes = [f"output_dir={tmp_path / folder}", f"model.path={model}", f"data.train.path={data}"]
        config = load_config(RunConfig, recipe / "run.yaml", [*changes, f"num_steps={num_steps}"])
        run_training(config, **options)
        return [
            {name: value for name, value in record.items() if name.startswith(("policy/", "rollout/reward", "buffer/"))}
            for record in read_metrics(tmp_path / folder / "metrics.jsonl")
        ]

    whole = run("whole", 4)
    assert all(0 <= record["policy/own_far_share"] <= 1 for record in whole)
    assert any(record["policy/own_far_share"] for record in whole)
    run("parts", 2)
    assert run("parts", 4) == whole
    code = recipe / "my_code.py"
    print_dry_run(load_config(RunConfig, recipe / "run.yaml"))
    for right, wrong, key in (
        ("range(len(prompts))", "range(1, len(prompts))", "data.sampling.order"),
        (">= least", "", "algorithm.dynamic_sampling_on"),
    ):
        text = code.read_text()
        (recipe / "wrong.py").write_text(text.replace(right, wrong))
        (recipe / "wrong.yaml").write_text((recipe / "run.yaml").read_text().replace("my_code.py", "wrong.py"))
        with pytest.raises(InputError, match=rf"^{key}.*wrong\.py:\w+: it returned"):
            print_dry_run(load_config(RunConfig, recipe / "wrong.yaml"))
    code.write_text(code.read_text().replace("> 0.2", "> 0.1"))
    with pytest.raises(InputError, match=r"code under algorithm\.advantage, .* was another: its file has changed"):
        run("parts", 5)
    run("parts", 5, accept_changes=True)
    run("parts", 6)
