"""The recipes for code of one's own, with the commands of their pages: valid, tried on their data, and run."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen2Config

from dapo_mega.commands import prepare
from dapo_mega.config import RunConfig, load_config
from dapo_mega.data.tokenizer import build_character_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.metrics import read_metrics
from dapo_mega.planning.dry_run import print_dry_run
from dapo_mega.training.run import run_training
from tests.distributed.tiny import save_random

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
COMPARED = ("policy/", "rollout/reward", "rollout/accuracy", "rollout/logprob", "buffer/", "reward/")


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


def test_a_run_in_turns_learns_to_read_what_it_observes_and_resumes_exactly(commands, tmp_path):
    """Of three numbers in two turns no policy finds more than two without reading: 67 %. One that has learnt to read
    finds all, and no more than these where its observations are hidden."""
    commands("own_environment")
    file = Path("configs") / "recipes" / "own_environment" / "run.yaml"
    few = build_character_tokenizer("0123456789+-=\n")
    few.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_random(Qwen2Config(vocab_size=len(few), num_key_value_heads=2, **sizes, tie_word_embeddings=False,
                            bos_token_id=2, eos_token_id=1, pad_token_id=0), tmp_path / "model")  # fmt: skip

    def run(folder, num_steps, *more, blind="false"):
        changes = [f"model.path={tmp_path / 'model'}", f"output_dir={tmp_path / folder}", f"num_steps={num_steps}"]
        changes += [f"environment.settings={{largest: 2, blind: {blind}}}", "environment.max_turns=2"]
        changes += ["evaluation={at_start: false, at_end: false}"]
        changes += ["optimizer={learning_rate: 5.0e-3, warmup_steps: 0}", "algorithm.dynamic_sampling=false"]
        run_training(
            load_config(RunConfig, file, [*changes, "batch.generation_groups=16", "checkpoint.every=4", *more])
        )
        return records_of(tmp_path / folder)

    whole = run("whole", 32)
    # Engine and trainer compute the same on every turn: the rows are those that were asked.
    assert max(record["rollout/logprob_abs_diff_max"] for record in whole) < 1e-4
    assert np.mean([record["rollout/accuracy_mean"] for record in whole[-4:]]) > 0.9
    trained = [f"model.path={tmp_path / 'whole' / 'hf'}", "batch.groups_per_step=64", "batch.generation_groups=64"]
    (hidden,) = run("hidden", 1, *trained, blind="true")
    assert hidden["rollout/accuracy_mean"] < 0.8
    run("parts", 4)
    assert run("parts", 8) == whole[:8]


SEQUENCES = {"r1": 8, "long_to_short": 7, "base_rl_distilled": 3}
"""Name -> number of stages that are evaluated, the base model's included."""


def sequence(*arguments, limit_s=60):
    command = ["bash", str(REPOSITORY / "launch" / "sequences.sh"), *map(str, arguments)]
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)


def test_a_wrong_argument_of_a_sequence_is_refused_before_anything_is_made(tmp_path):
    for arguments, said in (
        ((), "unknown sequence ''"),
        (("r2",), "unknown sequence 'r2'"),
        (("r1", "--k", 3), "'--k'"),
    ):
        result = sequence(*arguments, *(("--output", tmp_path / "out") if arguments else ()))
        assert result.returncode == 2
        assert said in result.stderr
        assert f"usage: sequences.sh {'|'.join(SEQUENCES)}" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.whole_table  # Its commands have tests of their own.
@pytest.mark.timeout(3600)
def test_all_stages_of_the_sequences_run_and_teach_something(tmp_path):
    for name, num_stages in SEQUENCES.items():
        result = sequence(name, "--output", tmp_path / "out", "--short", limit_s=1800)
        assert result.returncode == 0, result.stderr[-3000:]
        header, _, *rows = (tmp_path / "out" / f"{name}.md").read_text().splitlines()
        assert header == "| stage | accuracy on held-out problems | tokens of an answer |"
        assert len(rows) == num_stages, rows
        first, *later = (float(row.split("|")[2]) for row in rows)
        assert 0.1 < first < 0.7, rows
        assert max(later) > first + 0.1, rows
