"""A rehearsed rank does what a real one does: the same communications, and the same memory."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dapo_mega.config import RunConfig, load_config
from dapo_mega.megatron.processes import start_processes
from dapo_mega.models import load_architecture
from dapo_mega.rehearsal.rank import TrainerAlone, play_step, synthetic_samples
from dapo_mega.rehearsal.run import longest_workload, rehearse_run, rehearsed_part

from .launching import REPOSITORY, run_distributed
from .tiny import (
    add_trainable_mtp_layer,
    has_delta,
    make_deepseek_v2_model,
    make_deepseek_v3_model,
    make_model,
    make_moe_model,
    make_qwen3_5_model,
    make_qwen3_model,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ONE = {"tensor": 1, "pipeline": 1, "virtual_pipeline": 1, "context": 1, "sequence": False}
TP2 = {"tensor": 2, "sequence": True}
# What remains of four processes is data parallel.
LAYOUTS = {
    "dp4": {},
    "tp4_two_processes_to_a_key_head": {"tensor": 4, "sequence": True},
    "tp2_vpp2x2": {**TP2, "pipeline": 2, "virtual_pipeline": 2},
    "cp2_pp2": {"context": 2, "pipeline": 2},
}
# The table above has each of these in a combination.
SINGLE = {
    "tp2": {"tensor": 2},
    "tp2_cp2": {**TP2, "context": 2},
    "tp2_sequence": TP2,
    "pp2": {"pipeline": 2},
    "vpp2x2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
    "pp4": {"pipeline": 4},
}
OVERLAPS = {"compute.overlap_grad_reduce": True, "compute.overlap_param_gather": True}
CASES = {
    **{name: {"parallel": parallel} for name, parallel in LAYOUTS.items()},
    "tp2_ep2_etp2": {"parallel": {**TP2, "expert": 2, "expert_tensor": 2}, "has_experts": True},
    "tp2_pp2_lora_sent": {"parallel": {**TP2, "pipeline": 2}, "lora": {"rank": 4, "send": "adapters"}},
    "tp2_pp2_mtp": {
        "parallel": {**TP2, "pipeline": 2, "expert_tensor": 2},
        "kind": "mtp",
        "model.train_mtp": True,
    },
    **({"tp2_delta": {"parallel": TP2, "kind": "delta"}} if has_delta() else {}),
    "tp2_pp2_distilled_with_kl": {
        "parallel": {**TP2, "pipeline": 2},
        "without_overlap": True,
        "distillation.top_k": 3,
        "distillation.reward_weight": 1.0,
        "algorithm.kl.coefficient": 0.1,
        "algorithm.kl.placement": "reward",
    },
}
# The rest of the parity table's kinds, and its largest world.
WHOLE_TABLE = {
    **{name: {"parallel": parallel} for name, parallel in SINGLE.items()},
    "pp4_without_overlap": {"parallel": {"pipeline": 4}, "without_overlap": True},
    "tp2_ep4": {"parallel": {**TP2, "expert": 4}, "has_experts": True},
    "ep2": {"parallel": {"expert": 2}, "has_experts": True},
    "ep2_lora": {"parallel": {"expert": 2}, "lora": {"rank": 4}, "has_experts": True},
    "pp2_ep2": {"parallel": {"pipeline": 2, "expert": 2}, "has_experts": True},
    "pp2_embedding_alone": {"parallel": {"pipeline": 2, "pipeline_layout": [0, 4]}},
    "vpp2x2_ends_alone": {"parallel": {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": [0, 3, 1, 0]}},
    "tp2_recomputed": {"parallel": TP2, "compute.recompute": "full"},
    "tp2_unfused": {"parallel": TP2, "compute.fused_output_layer": False},
    "tp2_selective": {
        "parallel": TP2,
        "compute.recompute": "selective",
        "compute.recompute_modules": ["core_attn", "layernorm", "mlp"],
    },
    "ep2_auxiliary": {
        "parallel": {"expert": 2},
        "compute.moe": {"aux_loss_coefficient": 0.05, "z_loss_coefficient": 0.01},
        "has_experts": True,
    },
    "vpp2x2_ep2": {"parallel": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, "has_experts": True},
    "tp4_ep4": {"parallel": {"tensor": 4, "sequence": True, "expert": 4}, "has_experts": True},
    "cp2_latent": {"parallel": {"context": 2}, "kind": "latent"},
    "tp2_ep2_latent": {"parallel": {**TP2, "expert": 2}, "kind": "latent"},
}
OF_EIGHT = {
    "tp2_pp2_dp2": {"parallel": {**TP2, "pipeline": 2}},
    "tp2_vpp2x2_dp2_recomputed": {
        "parallel": {**TP2, "pipeline": 2, "virtual_pipeline": 2},
        "compute.recompute": "full",
    },
    "tp2_pp4_uneven": {"parallel": {**TP2, "pipeline": 4, "pipeline_layout": [0, 2, 1, 1]}},
    "tp2_pp2_cp2": {"parallel": {**TP2, "pipeline": 2, "context": 2}},
    "tp4_cp2": {"parallel": {"tensor": 4, "sequence": True, "context": 2}},
}
NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
    "alltoall_base_": "all_to_all",
}
"""What torch's operations are called in an `Event`."""


class Recording(TorchDispatchMode):
    """The communications of a real process, as those of a rehearsed one are compared with."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            schema = [argument.name for argument in func._schema.arguments]
            given = dict(zip(schema, args, strict=False)) | (kwargs or {})
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(given["process_group"]))
            keys = (
                ("output_tensors",)
                if name == "scatter_"
                else ("input_tensors", "input_tensor", "tensors", "inputs", "tensor", "input")
            )
            tensors = tree_leaves(next(given[key] for key in keys if key in given))
            if name == "alltoall_base_":
                tensors = tensors[0].split(given["input_split_sizes"] or len(tensors[0]) // len(ranks))
            peer = next((given[key] for key in ("root_rank", "dst", "src") if key in given), None)
            peer = None if peer is None else ranks[peer]
            self.events.append((tuple(ranks), NAMES[name], *_given(tensors), peer))
        return func(*args, **(kwargs or {}))


def _given(tensors):
    return tensors[0].dtype, tuple(tensor.numel() for tensor in tensors)


def of_routers(operation, dtype):
    """Whether a router decides the sizes: of what goes to other processes' experts, and of what processes that share
    experts' matrices gather and sum, in gloo's way of it."""
    return operation == "all_to_all" or (operation in ("broadcast", "reduce") and dtype.is_floating_point)


def comparable(events):
    """A response's last token goes where its router sends it, which a rehearsed one does not know: of what routers
    decide only the parts are counted."""
    for ranks, operation, dtype, sizes, peer in events:
        yield ranks, operation, dtype, len(sizes) if of_routers(operation, dtype) else sizes, peer


def sent_to_experts(events):
    return sum(sum(sizes) for _, operation, dtype, sizes, _ in events if of_routers(operation, dtype))


class Counting(TorchDispatchMode):
    """The bytes of all storages that operations make and that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self._sizes, self.live, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._sizes:
                    weakref.finalize(storage, self._release, key)
                self.live += size - self._sizes.get(key, 0)
                self._sizes[key] = size
                self.peak = max(self.peak, self.live)
        return result

    def _release(self, key):
        self.live -= self._sizes.pop(key)


def config_of(case, models, world_size):
    has_experts = case.get("kind", case.get("has_experts", False))
    overrides = {
        "model.path": models[has_experts],
        "output_dir": models[has_experts] + "-run",
        "rollout.routing_replay": has_experts in (True, "latent"),
        "model.dtype": case.get("dtype", "fp32"),
        "data.max_prompt_tokens": 16,
        "rollout.max_response_tokens": 48,
        "reward.overlong_cache_tokens": 8,
        "batch.tokens_per_microbatch": 64,
        "parallel": {"world_size": world_size, **ONE, **case["parallel"]},
        **({"lora": case["lora"]} if "lora" in case else {}),
        **({} if case.get("without_overlap") else OVERLAPS),
        **{key: value for key, value in case.items() if "." in key},
        **({"distillation.teachers.default.path": models[False]} if "distillation.top_k" in case else {}),
    }
    given = [f"{key}={_text(value)}" for key, value in overrides.items()]
    file = REPOSITORY / "configs" / "qwen2.5-32b-dapo-128gpu.yaml"
    return load_config(RunConfig, file, given)


def _text(value):
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def really(cases, models):
    """{name: the communications of this process in a real step}."""
    found = {}
    for name, case in cases.items():
        config = rehearsed_part(config_of(case, models, dist_size()), dist_size())
        trainer = TrainerAlone(config, start_processes(config.parallel, config.seed))
        recording = Recording()
        with recording:
            trainer.build(with_engines=False)
            play_step(trainer, config, samples_of(config), lambda phase: contextlib.nullcontext())
        found[name] = pickle.dumps(recording.events)  # Forks would have a million objects more.
        parallel_state.destroy_model_parallel()
    return found


def really_held(cases, models):
    """{name: the peak bytes of this process in a real step}."""
    found = {}
    for name, case in cases.items():
        config = rehearsed_part(config_of(case, models, dist_size()), dist_size())
        processes = start_processes(config.parallel, config.seed)
        trainer, counting = TrainerAlone(config, processes), Counting()

        @contextlib.contextmanager
        def phase(phase, counting=counting, name=name):
            gc.collect()
            counting.peak = counting.live
            yield
            if phase == "update":
                found[name] = counting.peak

        with counting:
            trainer.build(with_engines=False)
            play_step(trainer, config, samples_of(config), phase)
        del trainer
        parallel_state.destroy_model_parallel()
    return found


def dist_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def samples_of(config):
    if int(os.environ.get("RANK", "0")):
        return None
    arch = load_architecture(Path(config.model.path))[1]
    return synthetic_samples(longest_workload(config, arch, dist_size()))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By whether they have experts."""
    folder = tmp_path_factory.mktemp("models")
    dense, experts = make_model(folder / "dense", tied=False), make_moe_model(folder / "experts")
    found = {False: dense, True: experts, "latent": make_deepseek_v2_model(folder / "latent")}
    found["mtp"] = add_trainable_mtp_layer(make_deepseek_v3_model(folder / "mtp"))
    if has_delta():
        found["delta"] = make_qwen3_5_model(folder / "delta")
    return {kind: str(path) for kind, path in found.items()}


@pytest.fixture(scope="module")
def real(models):
    return run_distributed(really, 4, CASES, models, timeout_s=600)


@pytest.mark.parametrize("name", CASES)
def test_ranks_communicate_as_real_ones_do(name, models, real):
    compare(CASES[name], name, models, real)


@pytest.mark.whole_table
@pytest.mark.parametrize(("size", "cases"), [(4, WHOLE_TABLE), (8, OF_EIGHT)], ids=["four", "eight"])
def test_ranks_of_the_whole_table_communicate_as_real_ones_do(size, cases, models):
    real = run_distributed(really, size, cases, models, timeout_s=600)
    for name, case in cases.items():
        compare(case, name, models, real)


def compare(case, name, models, real):
    """The rehearsal of the case, after each rank's communications were seen to be those of the real process."""
    rehearsal = rehearse_run(config_of(case, models, len(real)), len(real), 80 * 2**30)
    assert rehearsal.disagreements() == []
    for rank, played in rehearsal.played.items():
        events = [
            (event.group.ranks, event.operation, event.dtype, event.sizes, event.peer)
            for event in played.events
            if event.operation != "wait"
        ]
        expected = pickle.loads(real[rank][name])
        mine, theirs = list(comparable(events)), list(comparable(expected))
        assert mine == theirs, first_difference(mine, theirs)
        assert sent_to_experts(events) == pytest.approx(sent_to_experts(expected), rel=0.03)
        assert len(events) > 20
    return rehearsal


def first_difference(mine, theirs):
    pairs = zip([*mine, None], [*theirs, None], strict=False)
    return next(((number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]), None)


LONG = {"data.max_prompt_tokens": 128, "rollout.max_response_tokens": 384, "batch.tokens_per_microbatch": 512}
HELD = {
    "tp2": {"parallel": TP2, **LONG},
    "pp2": {"parallel": {"pipeline": 2}, **LONG},
    "vpp2x2_recomputed": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "compute.recompute": "full", **LONG},
    "cp2": {"parallel": {"context": 2}, **LONG},
}


@pytest.fixture(scope="module")
def wide_models(tmp_path_factory):
    sizes = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 2003, "num_attention_heads": 8}
    folder = tmp_path_factory.mktemp("wide")
    return {False: str(make_qwen3_model(folder, **sizes, head_dim=32, max_position_embeddings=1024))}


@pytest.fixture(scope="module")
def held(wide_models):
    return run_distributed(really_held, 2, HELD, wide_models, timeout_s=600)


@pytest.mark.parametrize("name", HELD)
def test_ranks_hold_what_real_ones_do(name, wide_models, held):
    rehearsal = rehearse_run(config_of(HELD[name], wide_models, 2), 2, 80 * 2**30)
    for rank, played in rehearsal.played.items():
        assert played.peaks["update"].num_bytes == pytest.approx(held[rank][name], rel=0.02)
