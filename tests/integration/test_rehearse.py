"""`dapo-mega rehearse` of every shipped file for GPUs, with as many layers as the pipeline has chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from safetensors.torch import load_file, save_file

from dapo_mega.commands import rehearse
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.rehearsal import report, run
from dapo_mega.rehearsal.run import rehearse_run, rehearsed_part
from dapo_mega.training.trainer import Trainer
from tests.distributed.tiny import make_model

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(file for file in CONFIGS.glob("*.yaml") if "architecture:" in file.read_text())


def shallow(file: Path, folder: Path, overrides: Sequence[str] = (), **changes: object) -> RunConfig:
    """The run with a model of as few layers as its pipeline takes, which needs no more than a config.json."""
    config = load_config(RunConfig, file, ["model.path=elsewhere"])
    sizes = json.loads(Path(str(config.model.architecture)).read_text())
    depth = max(2, config.parallel.num_chunks)
    (folder / "sizes.json").write_text(
        json.dumps({**sizes, "num_hidden_layers": depth, "max_window_layers": depth, **changes})
    )
    return load_config(
        RunConfig, file, ["model.path=elsewhere", f"model.architecture={folder / 'sizes.json'}", *overrides]
    )


def short_part(config: RunConfig, world_size: int) -> RunConfig:
    """What is rehearsed, with one micro-batch for each stage: the fewest, which do not show the peak of memory."""
    part = rehearsed_part(config, world_size)
    fewest = part.batch.tokens_per_microbatch // (config.data.max_prompt_tokens + config.rollout.max_response_tokens)
    batch = part.batch.model_copy(update={"group_size": config.parallel.pipeline * fewest})
    return part.model_copy(update={"batch": batch})


# In the gate, as the other file of 128 GPUs has this layout with half of the stages.
SMALLER = {
    "qwen2.5-32b-dapo-128gpu-colocated": ["parallel={pipeline: 1, virtual_pipeline: 1, context: 4, world_size: 64}"]
}
# Replicas alone, which the one for two nodes has beside tensor parallelism.
IN_WHOLE_TABLE = {"gsm8k-qwen2.5-0.5b-8gpu": pytest.mark.whole_table}
ADAPTERS = ["lora={rank: 32}", "parallel.world_size=2"]
CUT_EXPERTS = ["parallel={tensor: 2, sequence: true, expert: 2, expert_tensor: 2, world_size: 4}"]
CRITIC = ["algorithm.advantage=gae", "algorithm.kl.coefficient=0.1", "algorithm.kl.placement=reward"]
LATENT = {
    **{"model_type": "deepseek_v3", "n_routed_experts": 8, "moe_intermediate_size": 512, "first_k_dense_replace": 1},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 192},
    **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_key_value_heads": 28},
}


@pytest.mark.parametrize(
    ("file", "overrides", "sizes"),
    [
        *(pytest.param(file, [], {}, id=file.stem, marks=IN_WHOLE_TABLE.get(file.stem, ())) for file in FILES),
        pytest.param(CONFIGS / "math-qwen2.5-7b-2nodes.yaml", ADAPTERS, {}, id="adapters"),
        pytest.param(CONFIGS / "gsm8k-qwen2.5-0.5b-1gpu.yaml", CRITIC, {}, id="critic and reference"),
        pytest.param(
            CONFIGS / "math-qwen2.5-7b-2nodes.yaml",
            [*CUT_EXPERTS, "compute.recompute=selective", "compute.recompute_modules=[core_attn,mlp,moe]"],
            LATENT,
            id="latent attention",
        ),
    ],
)
def test_a_run_meets_and_is_what_was_planned(file, overrides, sizes, tmp_path, monkeypatch, pytestconfig):
    smaller = []
    if not pytestconfig.getoption("whole_table", False):
        monkeypatch.setattr(run, "rehearsed_part", short_part)
        smaller = SMALLER.get(file.stem, [])
    config = shallow(file, tmp_path, [*overrides, *smaller], **sizes)
    world_size = config.parallel.world_size or 1
    rehearsal = rehearse_run(config, world_size, 75 * 2**30)
    assert rehearsal.disagreements() == []
    for rank, played in rehearsal.played.items():
        stage = rehearsal.roles.place(rank)[3]
        assert played.always == pytest.approx(report.planned_always(rehearsal, stage), rel=0.001)
        for phase, flops in report.planned_flops(rehearsal, rank).items():
            assert played.flops[phase] == pytest.approx(flops, rel=0.005 if overrides else 0.0001)
    for name, (found, planned) in report.traffic(rehearsal).items():
        assert found == pytest.approx(planned, rel=0.01), name
    # Whole samples of the given budget fit, and far more.
    tokens = report._most_tokens(rehearsal)
    assert tokens % rehearsal.workload.longest == 0
    assert tokens > config.batch.tokens_per_microbatch
    with_half = replace(rehearsal, available_bytes=rehearsal.available_bytes / 2)
    assert 0 < report._most_tokens(with_half) < tokens


def test_what_does_not_divide_or_fit_is_said_in_one_line(tmp_path, capsys):
    file = CONFIGS / "gsm8k-qwen2.5-0.5b-1gpu.yaml"
    config = shallow(file, tmp_path)
    spaced = tmp_path / "a run.yaml"
    spaced.write_text(file.read_text())
    given = [str(spaced), "model.path=elsewhere", f"model.architecture={config.model.architecture}"]
    with pytest.raises(InputError, match="num_attention_heads=14"):
        rehearse.main([*given, "parallel.tensor=4", "parallel.world_size=4"])
    capsys.readouterr()
    rehearse.main([*given, "parallel={pipeline: 2, world_size: 2}", "--gpu-memory-gib", "4.5"])
    printed = capsys.readouterr().out
    assert re.search(r"DOES NOT FIT: [0-9.]+ of [0-9.]+ GiB of a GPU on rank 1 \(stage 1\), ", printed)
    assert "largest batch.tokens_per_microbatch that fits by the plan: 0" in printed


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_what_is_wrong_with_a_checkpoint_is_found(change, tmp_path):
    """By the names and shapes of its files, without reading a tensor."""
    model, name = make_model(tmp_path / "model", tied=False), "model.layers.1.mlp.up_proj.weight"
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name][:-2].clone()
    if change == "missing":
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    lengths = ["data.max_prompt_tokens=16", "rollout.max_response_tokens=48", "reward.overlong_cache_tokens=8"]
    given = [f"model.path={model}", *lengths, "batch.tokens_per_microbatch=64", "parallel.world_size=1"]
    config = load_config(RunConfig, CONFIGS / "gsm8k-qwen2.5-0.5b-1gpu.yaml", given)
    with pytest.raises(InputError, match=name):
        rehearse_run(config, 1, 75 * 2**30)


def test_replicas_of_other_numbers_of_micro_batches_are_found(tmp_path, monkeypatch):
    """Rank 1 leaves out the last one of the second update, as a fault in its share of the batch would."""
    config = shallow(CONFIGS / "gsm8k-qwen2.5-0.5b-8gpu.yaml", tmp_path, ["parallel.world_size=2"])
    take = Trainer._take

    def takes_less(trainer, planned):
        take(trainer, planned)
        if trainer.processes.rank == 1:
            first, second = trainer._batch.mini_batches
            trainer._batch = replace(trainer._batch, mini_batches=[first, second[:-1]])

    monkeypatch.setattr(Trainer, "_take", takes_less)
    (text,) = rehearse_run(config, 2, 75 * 2**30).disagreements()
    assert re.search(r"\[2, 2\] micro-batches on rank 0 .*, and \[2, 1\] on rank 1", text)


def test_a_skipped_gradient_bucket_is_found(tmp_path, monkeypatch):
    settings = ["parallel.world_size=2", "compute.overlap_grad_reduce=false", "compute.overlap_param_gather=false"]
    config = shallow(CONFIGS / "gsm8k-qwen2.5-0.5b-8gpu.yaml", tmp_path, settings)
    start, skipped = _ParamAndGradBucketGroup.start_grad_sync, []

    def start_all_but_one(group, **settings):
        if dist.get_rank() == 1 and not skipped:
            skipped.append(group)
        else:
            start(group, **settings)

    monkeypatch.setattr(_ParamAndGradBucketGroup, "start_grad_sync", start_all_but_one)
    text = rehearse_run(config, 2, 75 * 2**30).disagreements()[0]
    assert all(part in text for part in ("data parallel group", "rank 0", "calls reduce_scatter", "rank 1", "update"))
