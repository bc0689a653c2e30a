"""The recipe with a real language model: its problems, how its facts are graded, and a step of its run."""

import os
import re
import runpy
import subprocess

import pandas as pd
import pytest
from transformers.models.llama import modeling_llama

from dapo_mega.config import RunConfig, load_config
from dapo_mega.metrics import read_metrics
from dapo_mega.training.run import run_training
from tests.distributed.tiny import make_llama_model

from .runs import REPOSITORY

pytestmark = pytest.mark.integration
RECIPE = REPOSITORY / "configs" / "recipes" / "real_model"
MODEL = os.environ.get("DAPO_MEGA_REAL_MODEL", "")


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["problems.py", str(tmp_path), "3"])
    runpy.run_path(str(RECIPE / "problems.py"), run_name="__main__")
    return {name: pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("train", "eval-problems", "eval-facts")}


def test_held_out_problems_share_no_sentence_name_or_thing_with_training(data):
    code = runpy.run_path(str(RECIPE / "problems.py"))
    train, held_out = data["train"].problem, data["eval-problems"].problem
    assert len(set(train)) == 1000
    assert len(set(held_out)) == 96
    for words in ("OTHER_NAMES", "OTHER_THINGS"):
        assert all(re.search(rf"\b({'|'.join(code[words])})\b", problem) for problem in held_out)
        assert not any(re.search(rf"\b({'|'.join(code[words])})\b", problem) for problem in train)
    trained, asked = (
        {re.sub(r"\d+", "#", sentence) for text in texts for sentence in text.split(". ")}
        for texts in (train, held_out)
    )
    assert not trained & asked


def test_answers_are_those_of_the_sentences(data):
    signs = {"boxes": "*", "Each of": "*", "bags": "*", "rows": "*", "Every day": "*"}
    signs |= {"finds": "+", "sells": "+", "basket": "+", "counted": "+"}
    signs |= {"takes": "-", "gave": "-", "lost": "-"}
    for rows in (data["train"], data["eval-problems"]):
        for problem, answer in zip(rows.problem, rows.answer, strict=True):
            [sign] = {sign for word, sign in signs.items() if word in problem}
            first, second = map(int, re.findall(r"\d+", problem))
            assert int(answer) == {"*": first * second, "+": first + second, "-": first - second}[sign], problem
            assert int(answer) > 0


def test_what_is_rounded_alone_differs_less_than_all(tmp_path, monkeypatch, capsys):
    model = make_llama_model(tmp_path / "model", vocab_size=64)
    response = {
        "prompt_index": 0,
        "prompt_ids": [5, 6, 7],
        "token_ids": list(range(8, 60)),
        "engine_logprobs": [0.0] * 52,
    }
    pd.DataFrame([response]).to_parquet(tmp_path / "evaluation.parquet")
    monkeypatch.setattr("sys.argv", ["rounding.py", str(model), str(tmp_path / "evaluation.parquet")])
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    runpy.run_path(str(RECIPE / "rounding.py"), run_name="__main__")
    found = {
        name: float(mean) for name, mean in re.findall(r"^(.+): ([\d.]+) nats", capsys.readouterr().out, re.MULTILINE)
    }
    alone = [mean for name, mean in found.items() if name.startswith("only")]
    assert len(alone) == 7
    assert all(0 < mean < found["all"] for mean in alone)
    assert found["all"] == pytest.approx(found["transformers in bf16"], rel=0.5)


def test_a_fact_is_right_that_the_first_sentence_names():
    score = runpy.run_path(str(RECIPE / "facts.py"))["score"]
    cases = [
        ("The capital of France is Paris.", "Paris", True),
        ("\nparis!", "Paris", True),
        ("It is Lyon. Or Paris.", "Paris", False),
        ("Parisian", "Paris", False),
        ("", "Paris", False),
        ("The answer is Mexico City, of course.", "Mexico City", True),
    ]
    results = score([{"response": response, "ground_truth": truth} for response, truth, _ in cases])
    assert [result["correct"] for result in results] == [right for *_, right in cases]
    assert [result["score"] for result in results] == [float(right) for *_, right in cases]


def test_a_wrong_argument_is_refused_before_anything_is_made(tmp_path):
    for arguments, said in ((["--seed", "x"], "whole number"), (["--steps", "3"], "unknown argument '--steps'")):
        command = ["bash", "launch/real_model.sh", "--output", str(tmp_path / "out"), *arguments]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ")
        assert said in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not MODEL, reason="set DAPO_MEGA_REAL_MODEL to what tools/make_real_model.py has made")
def test_the_recipe_takes_a_step(data, tmp_path, capsys):
    changes = ["num_steps=1", f"model.path={MODEL}", f"output_dir={tmp_path / 'run'}"]
    changes += [f"data.train.path={tmp_path}/train.parquet"]
    changes += [f"data.evaluation.path={tmp_path}/eval-problems.parquet"]
    changes += ["batch={groups_per_step: 2, group_size: 4, generation_groups: 4, mini_batch_groups: 2}"]
    changes += ["algorithm.dynamic_sampling=false", "data.evaluation.max_rows=4", "evaluation.samples_per_prompt=1"]
    changes += ["rollout.max_response_tokens=24", "reward.overlong_cache_tokens=8", "checkpoint.save_hf_at_end=false"]
    run_training(load_config(RunConfig, RECIPE / "run.yaml", changes))
    _, step, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert step["policy/grad_norm"] > 0
    assert step["mismatch/logprob_abs_diff_mean"] < 0.2  # bf16, by transformers and by Megatron-Core.
    assert "⟦<|im_start|>⟧user" in capsys.readouterr().out
