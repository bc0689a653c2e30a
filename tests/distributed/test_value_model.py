"""No parallel layout changes what a critic learns, and its checkpoints go from any layout to any other."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.config import ComputeConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, reshard
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes
from dapo_mega.megatron.value_loss import ValueBatch, ValueLoss
from dapo_mega.megatron.value_model import ValueModel

from .launching import run_distributed
from .tables import marked, run_now
from .test_parallel_parity import only
from .three_updates import all_processes_sum, learnt, relative_error
from .tiny import make_model, make_moe_model, make_samples, make_value_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_UPDATES = 3
TP2 = {"tensor": 2, "sequence": True}
VPP = {"pipeline": 2, "virtual_pipeline": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
AUXILIARY = {"moe": {"aux_loss_coefficient": 0.05, "z_loss_coefficient": 0.01}}

# number of processes -> {name: case}, as in test_parallel_parity.py
DENSE = {
    1: {"one": {}, "recompute_full": {"compute": {"recompute": "full"}}, "bf16_one": {"dtype": "bf16"}},
    2: {
        "tp2": {"parallel": {"tensor": 2}},
        "tp2_sp": {"parallel": TP2},
        "pp2": {"parallel": {"pipeline": 2}},
        "vpp2x2": {"parallel": VPP, "save_after": 1},
        "cp2": {"parallel": {"context": 2}},
        "dp2": {},
        "dp2_overlap": {"compute": OVERLAP},
        "tp2_from_vpp2x2": {"parallel": TP2, "resume": "vpp2x2", "save_after": 2},
        "cp2_from_tp2": {"parallel": {"context": 2}, "resume": "tp2_from_vpp2x2"},
        "bf16_tp2": {"parallel": TP2, "dtype": "bf16"},
    },
    8: {
        "tp2_pp2_dp2": {"parallel": {**TP2, "pipeline": 2}},
        "tp2_vpp2x2_cp2_overlap": {"parallel": {**TP2, **VPP, "context": 2}, "compute": OVERLAP},
    },
}
# Adapters and the head learn.
LORA = {
    1: {"one": {}},
    2: {
        "pp2": {"parallel": {"pipeline": 2}, "save_after": 1},
        "tp2_from_pp2": {"parallel": TP2, "resume": "pp2"},
    },
}
EXPERTS = {
    1: {"one": {}},
    2: {
        "dp2": {},
        "ep2": {"parallel": {"expert": 2}, "save_after": 1},
        "tp2_ep2_from_ep2": {"parallel": {**TP2, "expert": 2}, "resume": "ep2"},
        "auxiliary_dp2": {"compute": AUXILIARY},
        "auxiliary_ep2": {"parallel": {"expert": 2}, "compute": AUXILIARY},
    },
}

# What the gate has in a combination.
WHOLE_TABLE = {"tp2", "tp2_sp", "pp2", "cp2", "dp2_overlap", "tp2_pp2_dp2", "tp2_vpp2x2_cp2_overlap"}


def run_cases(cases, model, checkpoints):
    return {name: three_updates(name, case, model, checkpoints) for name, case in cases.items()}


def three_updates(name, case, model, checkpoints):
    """What the case left behind on rank 0. A case that writes or reads a checkpoint has a policy beside the critic."""
    parallel = ParallelConfig(**case.get("parallel", {}))
    processes = start_processes(parallel, 0)
    settings = (
        ModelConfig(path=str(model), dtype=case.get("dtype", "fp32")),
        parallel,
        # See three_updates.py: with this epsilon the weights show the gradients and not only their signs.
        OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.01, epsilon=1.0, clip_grad=1.0),
        processes,
    )
    schedule = {
        "updates_per_step": 1,
        "num_steps": NUM_UPDATES,
        "compute": ComputeConfig(**case.get("compute", {})),
        "lora": LoraConfig(**case["lora"]) if "lora" in case else None,
    }
    critic = ValueModel(*settings, **schedule)
    result = {"before": full_weights(critic), "metrics": [], "scores": None, "counts": []}
    policy = None
    if "save_after" in case or "resume" in case:
        policy_settings = (settings[0].model_copy(update={"path": f"{model}_policy"}), *settings[1:])
        policy = MegatronPolicy(*policy_settings, **schedule, temperature=1.0)
    done = 0
    if "resume" in case:
        store = CheckpointStore(checkpoints / case["resume"], keep_last=1)
        done = store.load(policy, store.latest(), critic).step
    for update in range(done, NUM_UPDATES):
        (micro_batches,) = critic.pack(
            flatten(make_samples(11, seed=update)), token_budget=150, aggregation="token_mean", max_response_tokens=40
        ).mini_batches
        values = critic.score(micro_batches)
        if update == done:
            own = sum(float(v.double().sum()) for v in values) if processes.is_last_stage else 0.0
            result["scores"] = all_processes_sum(critic, [own, sum(float(v.double().square().sum()) for v in values)])
        result["counts"].append(len(micro_batches))
        batches = [with_returns(batch) if processes.is_last_stage else ValueBatch(batch) for batch in micro_batches]
        result["metrics"].append(critic.update(batches, ValueLoss(clip=0.3)))
        if policy:
            policy.update([TokenBatch(batch) for batch in micro_batches], SupervisedLoss())
        if case.get("save_after") == update + 1:
            state = LoopState(update + 1, {}, {})
            store = CheckpointStore(checkpoints / name, keep_last=1)
            store.save(policy, state, state.step, critic)
    result["after"] = full_weights(critic)
    result["policy"] = full_weights(policy) if policy else {}
    result["drift"] = drift_of_copies(critic)
    parallel_state.destroy_model_parallel()
    return result if processes.rank == 0 else None


def with_returns(batch):
    """Old values and returns that depend on the token only, with clipping on both sides."""
    pattern = batch.rollout_logprobs
    return ValueBatch(batch, 0.5 * torch.cos(5 * pattern), torch.sin(pattern) + 0.3)


def full_weights(model):
    return {name: tensor.clone() for bucket in model.weights(1 << 14) for name, tensor in bucket}


def drift_of_copies(critic):
    """How far the value heads of the last stage's processes are apart."""
    copies = [parameter for chunk in critic.chunks for name, parameter in chunk.named_parameters() if "output" in name]
    own = copies[0].detach().double() if copies else None
    size = critic.arch.hidden_size
    bounds = torch.stack([own[0] if copies else torch.full((size,), -1e9).double()] * 2)
    bounds[1] = -own[0] if copies else -1e9
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    return float((bounds[0] + bounds[1]).abs().max())


def run_table(table, model, folder):
    results = {}
    for world_size, cases in table.items():
        results |= run_distributed(run_cases, world_size, cases, model, folder / "checkpoints", timeout_s=600)[0]
    return results


@pytest.fixture(scope="module")
def dense(tmp_path_factory, pytestconfig):
    folder = tmp_path_factory.mktemp("dense")
    make_model(folder / "model_policy", tied=True, seed=1)
    table = run_now(DENSE, WHOLE_TABLE, pytestconfig)
    return run_table(table, make_value_model(make_model(folder / "model", tied=True)), folder)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    make_model(folder / "model_policy", tied=True, seed=1)
    table = {
        size: {name: {**case, "lora": {"rank": 4, "alpha": 8.0}} for name, case in cases.items()}
        for size, cases in LORA.items()
    }
    return run_table(table, make_value_model(make_model(folder / "model", tied=True)), folder)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    make_moe_model(folder / "model_policy", seed=1)
    model = make_value_model(make_moe_model(folder / "model"))
    results = run_table(EXPERTS, model, folder)
    # Without spread experts there is one optimizer, with them two: only resharding goes from the one to the other.
    (step,) = (folder / "checkpoints" / "ep2").glob("step_*")
    target = folder / "checkpoints" / "together" / step.name
    target.parent.mkdir()
    reshard(open_checkpoint(step), target, ParallelConfig(), 1 << 20)
    return {**results, **run_table({2: {"dp2_from_resharded": {"resume": "together"}}}, model, folder)}


def assert_learns_the_same(got, expected, bound=1e-5):
    updates = len(got["metrics"])
    for step, (mine, reference) in enumerate(zip(got["metrics"], expected["metrics"][-updates:], strict=True)):
        for name, value in reference.items():
            # Means of values of both signs may be near 0.
            assert mine[name] == pytest.approx(value, rel=bound, abs=bound / 10), (step, name)
    if updates == NUM_UPDATES:
        assert got["scores"] == pytest.approx(expected["scores"], rel=bound)
    assert got["after"].keys() == expected["after"].keys()
    for name, parameter in expected["after"].items():
        assert relative_error({name: got["after"][name]}, {name: parameter}) < bound, name
    mine, theirs = learnt(got), learnt(expected)
    assert relative_error(mine, theirs) < bound
    for name, change in theirs.items():
        # Single tensors whose weights are large beside their change show the weights' rounding.
        assert relative_error({name: mine[name]}, {name: change}) < 1e-3, name
    assert got["drift"] == 0


FP32_DENSE = [name for cases in DENSE.values() for name in cases if name != "one" and "bf16" not in name]


@pytest.mark.parametrize("name", marked(FP32_DENSE, WHOLE_TABLE))
def test_a_critic_learns_the_same_under_every_layout(dense, name):
    assert_learns_the_same(dense[name], dense["one"])


@pytest.mark.parametrize("name", ["pp2", "tp2_from_pp2"])
def test_adapters_and_head_of_a_critic_learn_the_same_under_every_layout(adapted, name):
    got, expected = adapted[name], adapted["one"]
    changed = [name for name, change in learnt(expected).items() if bool(change.any())]
    assert "score.weight" in changed
    assert not [name for name in changed if "norm" in name or "embed" in name]
    assert_learns_the_same(only(got, changed), only(expected, changed))


@pytest.mark.parametrize("name", ["dp2", "ep2", "tp2_ep2_from_ep2", "dp2_from_resharded"])
def test_a_critic_with_experts_learns_the_same_under_every_layout(experts, name):
    assert_learns_the_same(experts[name], experts["one"])


def test_the_policy_beside_a_critic_goes_through_its_checkpoints_too(dense, experts):
    for results, first, *others in (
        (dense, "vpp2x2", "tp2_from_vpp2x2", "cp2_from_tp2"),
        (experts, "ep2", "tp2_ep2_from_ep2", "dp2_from_resharded"),
    ):
        for name in others:
            assert relative_error(results[name]["policy"], results[first]["policy"]) < 1e-5, name


def test_the_auxiliary_losses_of_a_critic_are_those_of_every_layout(experts):
    assert_learns_the_same(experts["auxiliary_ep2"], experts["auxiliary_dp2"])
    for metrics in experts["auxiliary_ep2"]["metrics"]:
        assert metrics["critic/load_balancing_loss"] >= 1.0 - 1e-4  # 1 is perfect balance
        assert metrics["critic/router_z_loss"] > 0


def test_bf16_layouts_of_a_critic_agree_within_its_precision(dense):
    got, expected = dense["bf16_tp2"], dense["bf16_one"]
    for mine, reference in zip(got["metrics"], expected["metrics"], strict=True):
        assert mine["critic/value_loss"] == pytest.approx(reference["critic/value_loss"], rel=0.02)
        assert mine["critic/grad_norm"] == pytest.approx(reference["critic/grad_norm"], rel=0.03)


def test_the_table_is_not_trivial(dense, experts):
    for results in (dense, experts):
        one = results["one"]
        assert one["counts"][0] >= 3, "several micro-batches"
        assert all(0.1 < metrics["critic/clip_share"] < 0.9 for metrics in one["metrics"])
        assert all(metrics["critic/explained_variance"] < 0.9 for metrics in one["metrics"])
        assert len({round(metrics["critic/value_loss"], 4) for metrics in one["metrics"]}) == NUM_UPDATES
        assert all(bool(change.any()) for change in learnt(one).values())
        assert "score.weight" in one["after"]
        assert "lm_head.weight" not in one["after"]
