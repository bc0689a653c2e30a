"""Fine-tuning on conversations computes what transformers does; evaluations end it and choose what is kept."""

import itertools
import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from transformers import Qwen2Config

from dapo_mega.checkpoints.folders import step_of
from dapo_mega.config import SftConfig, load_config
from dapo_mega.config.base import may_change_at_resume
from dapo_mega.data import load_demonstrations, load_tokenizer
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.adapters import Adapter
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.training import sft
from dapo_mega.training.fine_tuner import FineTuner
from dapo_mega.training.sft import run_sft
from tests.distributed.tiny import make_deepseek_v3_model, make_moe_model, save_random

from .runs import REPOSITORY, finish, prepare, start

pytestmark = pytest.mark.integration

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
NUMBERS = ("12", "7", "305", "44", "9", "81", "2", "66", "530", "18", "3", "27")


def conversation(i):
    said = (NUMBERS[i], NUMBERS[i - 1], NUMBERS[i - 2], NUMBERS[i - 3])
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


def row_of(said):
    """As a conversation, its begin, prompt and completion, prompt and another response, and with a tool."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    return {"messages": said, "begin": said[:2], "prompt": said[:1], "response": said[1:], "other": "1", "tools": tools}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The configuration file of fine-tuning on ten conversations, of which evaluations see six, and two others."""
    folder = tmp_path_factory.mktemp("conversations")
    prepare(folder)
    tokenizer = load_tokenizer(str(folder / "model"))
    tokenizer.chat_template = TEMPLATE.replace("m.role[0]", "{'user': '+', 'assistant': '='}[m.role]")
    tokenizer.chat_template = tokenizer.chat_template.replace("%}a{%", "%}={%")
    tokenizer.split_special_tokens = False
    tokenizer.save_pretrained(folder / "model")
    for name, rows in {"a": range(3), "b": range(3, 10), "held_out": range(4, 12)}.items():
        text = "".join(json.dumps(row_of(conversation(i))) + "\n" for i in rows)
        (folder / f"{name}.jsonl").write_text(text)

    def dataset(name):
        columns = {"messages": "messages"} if name == "b" else {}
        return {"path": str(folder / f"{name}.jsonl"), "template": "as_is", "chat_template": True, "columns": columns}

    mixture = {"a": {**dataset("a"), "weight": 1}, "b": {**dataset("b"), "weight": 3}}
    values = {
        "output_dir": "replaced",
        "num_steps": 8,
        "batch_samples": 5,
        "tokens_per_microbatch": 48,
        "threads_per_process": 1,
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {"max_tokens": 40, "mixture": mixture, "evaluation": dataset("held_out")},
        "evaluation": {"every": 2, "at_start": True},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        "checkpoint": {"every": 3, "keep_last": 1},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(values))
    return folder / "sft.yaml"


def run(config, output, *overrides):
    run_sft(load_config(SftConfig, config, [f"output_dir={output}", *overrides]))
    return read_metrics(output / "metrics.jsonl")


def of_transformers(model, dataset):
    """Mean cross-entropy over the tokens in the loss, as TRL's SFTTrainer has it with assistant_only_loss, and the
    share of them that are the likeliest."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    losses, right = [], []
    for row in load_demonstrations(dataset, load_tokenizer(str(model)), 99).sequences:
        ids = torch.tensor([*row.prompt_token_ids.tolist(), *row.response_token_ids.tolist()])
        labels = ids.clone()
        labels[: len(row.prompt_token_ids)] = -100
        labels[len(row.prompt_token_ids) :][~torch.from_numpy(row.in_loss)] = -100
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, :-1]
        labels = labels[1:]
        is_in = labels != -100
        losses.append(torch.nn.functional.cross_entropy(logits[is_in], labels[is_in], reduction="none"))
        right.append(logits[is_in].argmax(-1) == labels[is_in])
    return torch.cat(losses).mean().item(), torch.cat(right).float().mean().item()


LAYOUTS = {
    "data 2": [],
    "tensor 2": ["parallel.tensor=2", "parallel.sequence=true"],
    "pipeline 2": ["parallel.pipeline=2"],
    "context 2": ["parallel.context=2"],
}


def test_loss_and_accuracy_are_those_of_transformers_in_every_layout(config, tmp_path):
    settings = load_config(SftConfig, config)
    loss, accuracy = of_transformers(settings.model.path, settings.data.evaluation)
    trained, _ = of_transformers(settings.model.path, settings.data.mixture["b"])
    values = yaml.safe_load(config.read_text())
    train = values["data"].pop("mixture")["b"]
    values["data"]["train"] = {key: value for key, value in train.items() if key != "weight"}
    whole = config.with_name("whole.yaml")
    whole.write_text(yaml.safe_dump({**values, "num_steps": 1, "batch_samples": 7}))
    for name, layout in LAYOUTS.items():
        output = tmp_path / name.replace(" ", "_")
        finish(start(whole, 2, output, *layout, script=REPOSITORY / "launch" / "train_sft.py"), output)
        before, after = read_metrics(output / "metrics.jsonl")
        assert before["evaluation/loss"] == pytest.approx(loss, abs=1e-6), name
        assert before["evaluation/perplexity"] == pytest.approx(math.exp(loss), rel=1e-6), name
        assert before["evaluation/token_accuracy"] == pytest.approx(accuracy, abs=1e-7), name
        assert after["policy/loss"] == pytest.approx(trained, abs=1e-6), name
        exported, _ = of_transformers(output / "hf", settings.data.evaluation)
        assert after["evaluation/loss"] == pytest.approx(exported, abs=2e-6), name


MARKED = (
    "{% if tools %}<|s|>tools\n{{ tools | tojson }}<|e|>\n{% endif %}"
    "{% for m in messages %}<|s|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function | tojson }}){% endfor %}<|e|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|e|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
# Kind of rows -> the columns that TRL reads, and ours.
KINDS = {
    "conversation": ({"messages": "messages"}, {"messages": "messages"}),
    "prompt and completion": (
        {"prompt": "prompt", "completion": "completion"},
        {"prompt": "prompt", "response": "completion"},
    ),
    "last turn": ({"prompt": "before", "completion": "last"}, {"messages": "messages"}),
    "tools": ({"messages": "with_calls", "tools": "tools"}, {"messages": "with_calls", "tools": "tools"}),
    "text": ({"prompt": "asked", "completion": "said"}, {"prompt": "asked", "response": "said"}),
}


def marked_row(i):
    """A row of all kinds; every role, and text that is not ASCII."""
    said = [{"role": "user", "content": f"{i} + {i}?"}, {"role": "assistant", "content": f"{2 * i}."}]
    said = [{"role": "system", "content": "Add."}, *said, {"role": "user", "content": "É?"}]
    said.append({"role": "assistant", "content": "yes, " * i + "sure"})
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": i}}}
    asking = {"role": "assistant", "content": "", "tool_calls": [call]}
    with_calls = [*said[:2], asking, {"role": "tool", "content": str(2 * i)}, {**said[2], "tool_calls": []}]
    split = {"prompt": said[:2], "completion": said[2:], "before": said[:-1], "last": said[-1:]}
    return {"messages": said, "with_calls": with_calls, "tools": tools, "asked": f"{i}+{i}=", "said": "so", **split}


@pytest.mark.whole_table  # A minute, in which TRL is installed.
def test_losses_are_those_that_trl_has_on_the_same_rows(peer, tmp_path):
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|s|>", "<|e|>"], "eos_token": "<|e|>"})
    tokenizer.chat_template, tokenizer.split_special_tokens = MARKED, False
    tokenizer.save_pretrained(model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    save_random(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **ids), model, scale=0.02)
    rows.write_text("".join(json.dumps(marked_row(i)) + "\n" for i in range(1, 6)))
    kinds = json.dumps({name: of_trl for name, (of_trl, _) in KINDS.items()})
    program = REPOSITORY / "tests" / "integration" / "losses_of_trl.py"
    result = subprocess.run([peer, program, model, rows, kinds], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    expected = json.loads(result.stdout.splitlines()[-1])
    found = {}
    for name, (_, columns) in KINDS.items():
        dataset = {"path": str(rows), "template": "as_is", "chat_template": name != "text", "columns": columns}
        values = {
            "output_dir": str(tmp_path / name),
            "num_steps": 1,
            "batch_samples": 5,
            "threads_per_process": 1,
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": dataset, "evaluation": dataset, "loss_on": "last" if name == "last turn" else "all"},
            "evaluation": {"every": 1, "at_start": True},
        }
        run_sft(SftConfig.model_validate(values))
        before, first = read_metrics(tmp_path / name / "metrics.jsonl")
        assert first["policy/loss"] == pytest.approx(before["evaluation/loss"], abs=1e-6)
        found[name] = before["evaluation/loss"]
    assert found == pytest.approx(expected, abs=1e-6)
    assert len({round(loss, 4) for loss in found.values()}) == len(KINDS) - 1, found  # Two are of the same turns.


def test_epochs_count_demonstrations_and_weights_mix_them(config, tmp_path):
    records = run(config, tmp_path, "num_steps=0", "epochs=4")
    assert [record["step"] for record in records] == list(range(9)), "4 x 10 demonstrations in batches of 5"
    # A quarter of 40 turns is of the three of a, the rest of the seven of b.
    assert (records[-1]["sampling/epochs_a"], records[-1]["sampling/epochs_b"]) == (10 // 3, 30 // 7)


def test_evaluations_end_a_run_and_the_best_checkpoint_stays(config, tmp_path, capsys):
    overrides = ["evaluation.stop_after=2", "evaluation.keep_best=true", "num_steps=99", "optimizer.learning_rate=3e-2"]
    records = run(config, tmp_path, *overrides)
    losses = {record["step"]: record["evaluation/loss"] for record in records if "evaluation/loss" in record}
    best = min(losses, key=lambda step: losses[step])
    last = records[-1]["step"]
    assert 0 < best < last < 99
    assert list(losses)[-3:] == [best, best + 2, best + 4]
    kept = sorted(step_of(path) for path in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == [best, last], "with checkpoint.keep_last=1"
    capsys.readouterr()
    run(config, tmp_path, *overrides)
    assert f"already holds a model fine-tuned for {last} steps" in capsys.readouterr().out
    # Whoever has more patience goes on.
    overrides[0] = "evaluation.stop_after=3"
    more = run(config, tmp_path, *overrides)
    assert more[: len(records)] == records
    assert more[-1]["step"] >= last + 2


REFUSED = {
    "data.loss_on": ("last", "made with other demonstrations"),
    "data.max_tokens": (9, "over the limit of 9"),
    "data.mixture.b.columns.messages": ("begin", "made with other demonstrations"),
    "data.mixture.a.columns.response": ("other", "made with other demonstrations"),
    "data.mixture.b.columns.tools": ("tools", "data.mixture.b: .*does not show tools"),
    "data.evaluation.columns.tools": ("tools", "data.evaluation: .*does not show tools"),
}
CHANGES = {
    "epochs": 3,
    "data.mixture.weight": 9,
    "evaluation.every": 1,
    "evaluation.keep_best": True,
    "data.evaluation.columns.response": "other",
    "data.evaluation.columns.messages": "begin",
}


def test_each_changed_key_takes_effect_at_a_resume_or_is_refused(config, tmp_path, capsys):
    begun, one = tmp_path / "begun", ["num_steps=0", "epochs=0.5", "evaluation.at_start=false"]
    run(config, begun, *one, "evaluation.every=1")
    for key, (value, message) in REFUSED.items():
        overrides = [*one, "num_steps=3", "epochs=1.5", f"{key}={value}"]
        with pytest.raises(InputError, match=message):
            run_sft(load_config(SftConfig, config, [f"output_dir={begun}", *overrides]), accept_changes=True)
        stop_processes()
        assert not may_change_at_resume(SftConfig, key)
    cut = [f"output_dir={begun}", *one, "epochs=1.5", "data.max_tokens=9", "data.long_rows=cut"]
    with pytest.raises(InputError, match="made with other demonstrations"):
        run_sft(load_config(SftConfig, config, cut), accept_changes=True)
    stop_processes()
    assert "are cut" in capsys.readouterr().out
    found = {}
    held_out = ("data.evaluation.columns.response", "data.evaluation.columns.messages")
    for name in ("", "evaluation.keep_best", "data.mixture.weight", *held_out):
        output = tmp_path / f"changed_{name}"
        shutil.copytree(begun, output)
        changed = [f"{name.replace('.mixture.', '.mixture.a.')}={CHANGES[name]}"] if name else []
        overrides = [f"output_dir={output}", *one, "epochs=3", "evaluation.every=1", "checkpoint.every=0", *changed]
        overrides.append("optimizer.learning_rate=3")
        run_sft(load_config(SftConfig, config, overrides), accept_changes=True)
        records = read_metrics(output / "metrics.jsonl")
        losses = {record["step"]: record["evaluation/loss"] for record in records}
        assert list(losses) == [1, 2, 3, 4, 5, 6], "3 x 10 demonstrations in batches of 5"
        kept = sorted(step_of(path) for path in (output / "checkpoints").glob("step_*"))
        found[name] = losses, kept, records[-1]["sampling/epochs_a"]
    losses, kept, epochs = found[""]
    assert found["data.mixture.weight"][2] > epochs
    best = min(losses, key=lambda step: losses[step])
    assert best < 6
    assert (kept, found["evaluation.keep_best"][1]) == ([6], sorted({best, 6}))
    for name in held_out:
        assert found[name][0][1] == losses[1]
        assert found[name][0][2] != losses[2], name


CHANGED_DATASET = {
    "path": "copied",
    "split": "other",
    "columns.prompt": "other",
    "max_rows": 3,
    "template": "={problem}",
    "chat_template": True,
    "template_arguments": {"ending": "7"},
}


def test_each_key_of_a_dataset_changes_what_is_learnt_or_held_out(config, tmp_path):
    """A resume is refused where what is learnt has another hash, and evaluates what is held out now."""
    for folder, split, shift in (("rows", "train", 0), ("rows", "other", 1), ("copied", "train", 2)):
        (tmp_path / folder).mkdir(exist_ok=True)
        rows = [{"prompt": NUMBERS[i], "other": NUMBERS[i - 1], "response": "5"} for i in range(shift, shift + 5)]
        (tmp_path / folder / f"{split}-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = yaml.safe_load(config.read_text())
    shutil.copytree(given["model"]["path"], tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    tokenizer.chat_template += "{{ ending }}"
    tokenizer.save_pretrained(tmp_path / "model")
    plain = {"path": str(tmp_path / "rows"), "template": "as_is"}

    def hashes(dataset, **changed):
        data = {"max_tokens": 40, "mixture": {"a": dataset}, "evaluation": dataset, **changed}
        model = {"path": str(tmp_path / "model")}
        loaded = sft._load(SftConfig.model_validate({**given, "model": model, "data": data}))
        return sft._fingerprint(loaded.training), sft._fingerprint(loaded.held_out)

    for key, value in CHANGED_DATASET.items():
        dataset = {**plain, "chat_template": key == "template_arguments"}
        changed = {**dataset, key: str(tmp_path / value) if key == "path" else value}
        changed |= {"columns": {"prompt": changed.pop("columns.prompt")}} if key == "columns.prompt" else {}
        learnt, held_out = hashes(dataset)
        for train in (hashes(dataset, mixture={"a": changed}), hashes(dataset, mixture={}, train=changed)):
            assert (train[0] != learnt, train[1] == held_out) == (True, True), key
        evaluation = hashes(dataset, evaluation=changed)
        assert (evaluation[0] == learnt, evaluation[1] != held_out) == (True, True), key


# Settings of the saved run -> key -> its value after the resume, and where the model or its process shows it.
MODEL_CHANGES = {
    (): {
        "model.dtype": ("bf16", "bf16"),
        "compute.recompute": ("full", "recompute_granularity"),
        "compute.fused_output_layer": (False, "is_fused"),
        "compute.overlap_grad_reduce": (True, "overlap_grad_reduce"),
        "compute.deterministic": (True, "is_deterministic"),
        "threads_per_process": (2, "threads"),
        "model.path": ("{folder}/copy", "path"),
        "parallel.world_size": (2, "parallel.world_size"),
    },
    ("compute.overlap_grad_reduce=true",): {"compute.overlap_param_gather": (True, "overlap_param_gather")},
    ("compute.recompute=full",): {"compute.recompute_layers": (2, "recompute_num_layers")},
    ("compute.recompute=selective",): {"compute.recompute_modules": ("[mlp]", "recompute_modules")},
    ("lora={rank: 2, alpha: 4, targets: [q_proj]}",): {
        "lora.alpha": (8, "adapters"),
        "lora.dropout": (0.5, "adapters"),
        "lora.rank": (3, "shape mismatch"),
        "lora.targets": ("[v_proj]", "leaves out"),
    },
    ("model.path={folder}/experts",): {
        "compute.moe.aux_loss_coefficient": (0.1, "moe_aux_loss_coeff"),
        "compute.moe.z_loss_coefficient": (0.1, "moe_z_loss_coeff"),
    },
    ("model.path={folder}/biased",): {"compute.moe.router_bias_update_rate": (0.1, "moe_router_bias_update_rate")},
}


class Loaded(Exception):
    """Ends a run that goes on, with what it then has in use."""


@pytest.fixture
def models(config, tmp_path):
    """The folder of the model's copy, and of two mixtures of experts with its tokenizer."""
    given = Path(yaml.safe_load(config.read_text())["model"]["path"])
    vocab_size = json.loads((given / "config.json").read_text())["vocab_size"]
    shutil.copytree(given, tmp_path / "copy")
    make_moe_model(tmp_path / "experts", num_layers=2, vocab_size=vocab_size)
    make_deepseek_v3_model(tmp_path / "biased", vocab_size=vocab_size)
    for name, file in itertools.product(("experts", "biased"), [*given.glob("*token*"), *given.glob("chat*")]):
        shutil.copyfile(file, tmp_path / name / file.name)
    return tmp_path


def in_use(trainer):
    """Settings of the model and of its process."""
    policy = trainer.policy
    modules = [module for chunk in policy.chunks for module in chunk.modules()]
    return {
        **vars(policy.config),
        **vars(policy.chunks[0].ddp_config),
        "is_fused": unwrapped(policy.chunks[-1])._fused,
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "path": policy.path,
        "adapters": {(module._scale, module._dropout) for module in modules if isinstance(module, Adapter)},
    }


def test_each_changed_key_of_the_model_reaches_it_at_a_resume(config, models, monkeypatch):
    load = FineTuner.load

    def loading(trainer, path):
        load(trainer, path)
        raise Loaded(in_use(trainer))

    monkeypatch.setattr(FineTuner, "load", loading)
    short = ["num_steps=1", "evaluation.every=0", "evaluation.at_start=false", "checkpoint.save_hf_at_end=false"]

    def resumed(begun, *overrides):
        """What is in use when the run goes on, or what is said in place of it."""
        shutil.rmtree(models / "resumed", ignore_errors=True)
        shutil.copytree(begun, models / "resumed")
        given = [override.replace("{folder}", str(models)) for override in overrides]
        changed = load_config(SftConfig, config, [f"output_dir={models}/resumed", *given, "num_steps=2"])
        try:
            run_sft(changed, accept_changes=True)
        except Loaded as loaded:
            return loaded.args[0]
        except InputError as error:
            return {"error": str(error)}
        finally:
            stop_processes()
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(False)

    lost = []
    for number, (context, changes) in enumerate(MODEL_CHANGES.items()):
        settings = [*short, *(override.replace("{folder}", str(models)) for override in context)]
        run(config, models / str(number), *settings)
        before = resumed(models / str(number), *settings)
        for key, (value, name) in changes.items():
            after = resumed(models / str(number), *settings, f"{key}={value}")
            if name not in after.get("error", "") and after.get(name, before.get(name)) == before.get(name):
                lost.append((key, after.get("error")))
    assert not lost, lost
