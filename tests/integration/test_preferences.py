"""Direct preference optimisation: its loss and gradient are the paper's, in every layout, and it resumes exactly."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from dapo_mega.config import SftConfig
from dapo_mega.data import load_pairs, load_tokenizer
from dapo_mega.data.tokenizer import end_of_turn
from dapo_mega.errors import InputError
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.training.sft import run_sft
from tests.distributed.tiny import make_moe_model

from .runs import REPOSITORY, finish, prepare, start

pytestmark = pytest.mark.integration
BETA, SMOOTHING = 0.7, 0.1
SFT = REPOSITORY / "launch" / "train_sft.py"
PAIRS = [(f"{i} + {i % 7} =", str(i + i % 7) + "," * (i % 3), ";" * (1 + i % 4) + str(i)) for i in range(24)]


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    prepare(folder)
    prompts, chosen, rejected = zip(*PAIRS, strict=True)
    columns = {"prompt": prompts, "response": chosen, "worse": rejected, "worst": [f"{text};;" for text in rejected]}
    pq.write_table(pa.table({name: list(texts) for name, texts in columns.items()}), folder / "p.parquet")
    dataset = {"path": str(folder / "p.parquet"), "template": "as_is", "columns": {"rejected": "worse"}}
    return {
        "output_dir": str(folder / "run"),
        "num_steps": 3,
        "batch_samples": 8,
        "tokens_per_microbatch": 64,
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {"max_tokens": 40, "train": dataset, "evaluation": dataset},
        "dpo": {"beta": BETA, "label_smoothing": SMOOTHING},
        "optimizer": {"learning_rate": 0.003, "warmup_steps": 0, "schedule": "constant"},
        "checkpoint": {"every": 1},
        "evaluation": {"every": 3, "at_start": True},
        "threads_per_process": 1,
    }


def tuned(values, name, **changes):
    changed = {**values, **changes, "output_dir": f"{values['output_dir']} {name}"}
    run_sft(SftConfig.model_validate(changed), accept_changes=True)
    return changed["output_dir"]


def records(folder):
    return {record["step"]: record for record in read_metrics(Path(folder) / "metrics.jsonl")}


@pytest.fixture(scope="module")
def run(values):
    """Two steps, and then a third."""
    tuned(values, "in parts", num_steps=2)
    return tuned(values, "in parts")


def summed_logprobs(model, tokenizer, prompt, response, end):
    prompt_ids = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([*prompt_ids, *tokenizer(response, add_special_tokens=False)["input_ids"], end])
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[len(prompt_ids) - 1 :].sum()


def oracle(values, folder):
    """Loss, gradient norm and metrics of all pairs in float64, with the weights of step 2."""
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        for path in (f"{folder}/hf_step_00000002", values["model"]["path"])
    ]
    tokenizer = load_tokenizer(values["model"]["path"])
    end = end_of_turn(tokenizer, chat_template=False)
    ratios = []
    for prompt, *responses in PAIRS:
        of_pair = []
        for response in responses:
            policy, reference = (summed_logprobs(model, tokenizer, prompt, response, end) for model in models)
            of_pair.append(policy - reference.detach())
        ratios.append(torch.stack(of_pair))
    margins = BETA * (torch.stack(ratios) @ torch.tensor([1.0, -1.0], dtype=torch.float64))
    loss = (-(1 - SMOOTHING) * logsigmoid(margins) - SMOOTHING * logsigmoid(-margins)).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in models[0].parameters() if p.grad is not None]).norm()
    rewards = BETA * torch.stack(ratios).mean(0)
    return {
        "policy/loss": loss,
        "policy/grad_norm": norm,
        "preference/margin": margins.mean(),
        "preference/accuracy": (margins > 0).double().mean(),
        "preference/chosen_reward": rewards[0],
        "preference/rejected_reward": rewards[1],
    }


def test_loss_and_gradient_are_those_of_float64(values):
    """All pairs are in each step, so their order does not matter; before the third one the policy is no reference."""
    folder = tuned(values, "whole", batch_samples=24, num_steps=2, checkpoint={"every": 1, "hf_every": 2})
    tuned(values, "whole", batch_samples=24, num_steps=3)
    first, _, third = (records(folder)[step] for step in (1, 2, 3))
    for name, expected in oracle(values, folder).items():
        assert third[name] == pytest.approx(float(expected), rel=1e-5, abs=1e-7), name
    assert third["preference/margin"] > 0.1
    assert first["policy/loss"] == pytest.approx(0.6931472, rel=1e-6)


def test_a_resumed_run_goes_on_exactly_and_prefers_held_out_pairs_more(values, run):
    whole, parts = records(tuned(values, "at once")), records(run)
    for name in ("policy/loss", "policy/grad_norm", "evaluation/loss", "evaluation/preference_margin"):
        assert parts[3][name] == whole[3][name], name
    assert whole[0]["evaluation/loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert whole[3]["evaluation/loss"] < 0.65
    assert whole[3]["evaluation/preference_accuracy"] > 0.6


def test_each_changed_key_takes_effect_at_a_resume_or_is_refused(values):
    """beta and label_smoothing of a resumed run, and the column `rejected` of its held-out pairs."""
    first = tuned(values, "before", num_steps=2)
    third = records(tuned(values, "before"))[3]

    def resumed(**changes):
        folder = f"{values['output_dir']} after"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder, ignore=shutil.ignore_patterns("step_00000003", "hf"))
        (Path(folder) / "last_checkpoint").unlink()
        return records(tuned(values, "after", **changes))[3]

    assert resumed()["policy/loss"] == third["policy/loss"]
    for changed in ({"beta": 0.2}, {"label_smoothing": 0.3}):
        assert resumed(dpo={**values["dpo"], **changed})["policy/loss"] != third["policy/loss"], changed
    worst = {**values["data"]["train"], "columns": {"rejected": "worst"}}
    other = resumed(data={**values["data"], "evaluation": worst})
    assert other["policy/loss"] == third["policy/loss"]
    assert other["evaluation/loss"] != third["evaluation/loss"]
    with pytest.raises(InputError, match="made with other demonstrations"):
        resumed(data={**values["data"], "train": worst})
    stop_processes()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("parallel={pipeline: 2}", marks=pytest.mark.whole_table),
        *("parallel={tensor: 2}", "parallel={tensor: 1, context: 2}", "parallel={world_size: 2}"),
    ],
)
def test_two_processes_learn_the_same(values, run, tmp_path, layout):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values))
    finish(start(file, 2, tmp_path / "run", layout, script=SFT), tmp_path / "run")
    mine, expected = records(tmp_path / "run"), records(run)
    for step in (1, 2, 3):
        for name in ("policy/loss", "policy/grad_norm", "preference/margin"):
            assert mine[step][name] == pytest.approx(expected[step][name], rel=1e-5, abs=1e-8), (step, name)


@pytest.mark.whole_table
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("layout", ["expert: 2", "expert: 2, tensor: 2, sequence: true", "pipeline: 2", "context: 2"])
def test_mixtures_and_their_adapters_learn_the_same_on_two_processes_and_after_a_resume(values, tmp_path, layout, rank):
    model = Path(values["model"]["path"])
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    experts = make_moe_model(tmp_path / "experts", num_layers=2, vocab_size=vocab_size)
    for file in model.glob("*token*"):
        shutil.copyfile(file, experts / file.name)
    changes = {"model": {**values["model"], "path": str(experts)}, "lora": {"rank": rank} if rank else None}
    expected = records(tuned(values, f"{layout} {rank}", **changes))
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**values, **changes}))
    for folder, steps in (("run", 3), ("parts", 2), ("parts", 3)):
        given = (f"parallel={{{layout}}}", f"num_steps={steps}")
        finish(start(file, 2, tmp_path / folder, *given, script=SFT), tmp_path / folder)
    mine, parts = records(tmp_path / "run"), records(tmp_path / "parts")
    for name in ("policy/loss", "policy/grad_norm", "preference/margin"):
        assert parts[3][name] == mine[3][name], name
        for step in (1, 2, 3):
            assert mine[step][name] == pytest.approx(expected[step][name], rel=5e-5, abs=1e-8), (step, name)


def test_adapters_learn_against_the_weights_without_them(values):
    found = records(tuned(values, "adapters", lora={"rank": 4}))
    assert found[1]["policy/loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert found[3]["policy/loss"] < found[1]["policy/loss"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dpo": None}, r"data\.train\.columns\.rejected is for the section dpo"),
        ({"data": {"long_rows": "drop"}}, "data.long_rows=drop would leave pairs with one response"),
        ({"columns": {}}, r"dpo compares data\.train\.columns\.response with columns\.rejected"),
    ],
)
def test_what_is_no_pair_is_refused(values, change, said):
    changed = {**values, **{key: value for key, value in change.items() if key == "dpo"}}
    changed["data"] = {**values["data"], **change.get("data", {})}
    if "columns" in change:
        changed["data"]["train"] = {**values["data"]["train"], "columns": {}}
    with pytest.raises(ValueError, match=said):
        SftConfig.model_validate(changed)


def test_equal_responses_are_refused(values, tmp_path):
    config = SftConfig.model_validate(values)
    pq.write_table(pa.table({"prompt": ["1"], "response": ["2"], "worse": ["2"]}), tmp_path / "p.parquet")
    dataset = config.data.by_key["data.train"].model_copy(update={"path": str(tmp_path / "p.parquet")})
    with pytest.raises(InputError, match=r"row 0 of .* has the same response as chosen and rejected"):
        load_pairs(dataset, load_tokenizer(config.model.path), 40, "all", "data.train")
