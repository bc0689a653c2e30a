"""Every model family in every layout: checkpoints come back bit by bit, log-probs and gradients do not depend on it."""

from dataclasses import dataclass, field

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes

from .launching import run_distributed
from .tables import run_now
from .tiny import FAMILIES, FAMILY_MODELS, make_samples, with_routes

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("qwen2_moe", "qwen3_moe", "deepseek", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe")
MIXTURES = tuple(name for name in FAMILY_MODELS if name.startswith(KINDS))
GPT_OSS = tuple(name for name in FAMILY_MODELS if name.startswith("gpt_oss"))
DENSE = tuple(name for name in FAMILY_MODELS if name not in MIXTURES)
ALL = DENSE + MIXTURES
# What the families' own code has no part in, test_parallel_parity.py shows of one dense model.
DELTA = tuple(name for name in ("qwen3_next", "qwen3_5") if name in FAMILY_MODELS)
LEARNERS = ("qwen2, tied", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmo3", "gemma3_text", *DELTA)
REPLAYED = "qwen3_next"
"""Its tokens go to experts that are given, between its gated delta layers."""
TP2 = {"tensor": 2, "sequence": True}


def some_of(models, others, but=()):
    return tuple(name for name in models if name in others and name not in but)


@dataclass(frozen=True)
class Case:
    """One layout of `num_processes` and the models that are tried in it."""

    num_processes: int
    parallel: dict[str, int | bool] = field(default_factory=dict)
    models: tuple[str, ...] = ALL
    dtype: str = "fp32"


# The layouts with 4 processes show that of every model; those with 2, which part of it fails, of some.
LAYOUTS = {
    "one": Case(1),
    "one_bf16": Case(1, models=FAMILIES, dtype="bf16"),
    "tp2": Case(2, {"tensor": 2}, some_of(DENSE, LEARNERS, but=DELTA)),
    "tp2_sp": Case(2, TP2, some_of(DENSE, FAMILIES)),
    "tp2_experts_cut": Case(2, {**TP2, "expert_tensor": 2}, some_of(MIXTURES, ALL, but=GPT_OSS)),
    "tp2_ep2": Case(2, {**TP2, "expert": 2}, GPT_OSS),
    "pp2": Case(2, {"pipeline": 2}, LEARNERS),
    "cp2": Case(
        2,
        {"context": 2},
        ("qwen3", "llama, all biases, tied", "mistral", "phi3", "gpt_oss", "olmo3", "gemma3_text", *DELTA),
    ),
    "ep2": Case(2, {"expert": 2}, some_of(MIXTURES, LEARNERS)),
    "tp2_pp2": Case(4, {**TP2, "pipeline": 2}, DENSE),
    "tp2_pp2_bf16": Case(4, {**TP2, "pipeline": 2}, some_of(DENSE, LEARNERS), "bf16"),
    "tp2_pp2_ep2": Case(4, {**TP2, "pipeline": 2, "expert": 2}, MIXTURES),
    "tp2_pp2_ep2_bf16": Case(4, {**TP2, "pipeline": 2, "expert": 2}, some_of(MIXTURES, LEARNERS), "bf16"),
}
# Those with 4 processes have the first three together; bf16 is shown by one process, and by test_parallel_parity.py.
WHOLE_TABLE = {"tp2_sp", "pp2", "ep2", "tp2_pp2_bf16", "tp2_pp2_ep2_bf16"}
PAIRS = [(layout, model) for layout, case in LAYOUTS.items() for model in case.models]
IN_FLOAT32 = [(layout, model) for layout, model in PAIRS if LAYOUTS[layout].dtype == "fp32" and layout != "one"]
LEARNING = [(layout, model) for layout, model in IN_FLOAT32 if model in LEARNERS]


def in_gate_or_not(pairs):
    return [pytest.param(*pair, marks=pytest.mark.whole_table if pair[0] in WHOLE_TABLE else ()) for pair in pairs]


def load_score_and_learn(layouts, checkpoints):
    """layout -> model -> what this process got, with the keys

    - `weights` (leader): the full tensors by name; `updated`: the same after a supervised step, of those that learn;
      `grad_norm`: the norm of that step's gradient;
    - `logprobs` (the last stage's first tensor-parallel process): of all response tokens that this process holds.
    """
    results = {}
    for name, case in layouts.items():
        parallel = ParallelConfig(**case.parallel)
        processes = start_processes(parallel, 0)
        results[name] = {model: try_model(checkpoints[model], model, case, processes) for model in case.models}
        parallel_state.destroy_model_parallel()
    return results


def try_model(checkpoint, model, case, processes):
    policy = MegatronPolicy(
        ModelConfig(path=str(checkpoint), dtype=case.dtype),
        ParallelConfig(**case.parallel),
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0, epsilon=1.0, clip_grad=0.0),
        processes,
        temperature=1.0,
        updates_per_step=1,
        num_steps=2,
    )
    samples = [sample for sample in make_samples(12) if sample.loss_mask.any()]
    if model == REPLAYED:
        experts = policy.arch.experts
        samples = with_routes(samples, policy.arch.num_layers, experts.number, experts.per_token)
    # Every replica gets all samples, so that their mean is the same under data parallelism.
    batch = pack(flatten(samples), policy.packing_layout, max_response_tokens=64)
    share = policy.context_shard(batch)
    result = {}
    weights = full_weights(policy)
    if processes.is_leader:
        result["weights"] = weights
    scores = policy.score([share])[0]
    if processes.counts_outputs and processes.data_rank == 0:
        result["logprobs"] = scores.logprobs
    if case.dtype == "fp32" and model in LEARNERS:
        result["grad_norm"] = policy.update([TokenBatch(share)], SupervisedLoss())["policy/grad_norm"]
        result["updated"] = full_weights(policy)
    return result


def full_weights(policy):
    return {name: tensor.clone() for bucket in policy.weights(1 << 14) for name, tensor in bucket}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / name) for name, make in FAMILY_MODELS.items()}


@pytest.fixture(scope="module")
def results(checkpoints, pytestconfig):
    """layout -> model -> results by rank."""
    by_layout, table = {}, {}
    for name, case in LAYOUTS.items():
        table.setdefault(case.num_processes, {})[name] = case
    for num_processes, layouts in run_now(table, WHOLE_TABLE, pytestconfig).items():
        by_rank = run_distributed(load_score_and_learn, num_processes, layouts, checkpoints, timeout_s=600)
        for name, case in layouts.items():
            by_layout[name] = {model: [results[name][model] for results in by_rank] for model in case.models}
    return by_layout


def assert_same_tensors(given, expected, **tolerances):
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, **tolerances, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("layout", "model"), in_gate_or_not(PAIRS))
def test_a_checkpoint_comes_back_bit_by_bit(results, checkpoints, layout, model):
    on_disk = load_file(checkpoints[model] / "model.safetensors")
    dtype = DTYPES[LAYOUTS[layout].dtype]
    # Routers keep their biases in float32 whatever the policy's dtype.
    expected = {k: v if k.endswith("e_score_correction_bias") else v.to(dtype) for k, v in on_disk.items()}
    assert_same_tensors(results[layout][model][0]["weights"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("layout", "model"), in_gate_or_not(IN_FLOAT32))
def test_logprobs_do_not_depend_on_the_layout(results, layout, model):
    (alone,) = results["one"][model]
    given = torch.cat([result["logprobs"] for result in results[layout][model] if "logprobs" in result])
    expected = alone["logprobs"]
    if "context" in LAYOUTS[layout].parallel:
        # Each process has pieces of all sequences.
        given, expected = given.sort().values, expected.sort().values
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layout", "model"), in_gate_or_not(LEARNING))
def test_a_supervised_step_does_not_depend_on_the_layout(results, layout, model):
    alone, given = results["one"][model][0], results[layout][model][0]
    assert_same_tensors(given["updated"], alone["updated"], rtol=1e-5, atol=1e-6)
    assert given["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    assert any(not torch.equal(alone["updated"][name], alone["weights"][name]) for name in alone["weights"])
