"""Nothing of training mixes tensors of host and GPU: whole runs on tensors that carry the name of a device."""

import contextlib
import copy
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed import distributed_c10d
from torch.nn import functional

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.config import PRESETS, ParallelConfig, RunConfig, SftConfig
from dapo_mega.data.tokenizer import build_character_tokenizer
from dapo_mega.engines.sglang.weight_protocol import unpack_changes
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.sglang_plugin.receiving import make_patch
from dapo_mega.training import loop as trainer
from dapo_mega.training.sft import run_sft
from dapo_mega.training.trainer import Trainer
from dapo_mega.weight_sync.encodings import DeltaEncoding
from dapo_mega.weight_sync.fp8 import quantised_bucket
from tests import te_cpu
from tests.distributed.launching import run_distributed
from tests.distributed.tables import marked
from tests.distributed.tiny import make_samples, save_random
from tests.gpu.device_policy import DEVICE_SIZES, device_policy
from tests.integration.fleet_runs import fleet_values, merge, training_run_of
from tests.integration.sglang_servers import tiny_model
from tests.te_cpu import devices
from tests.te_cpu.devices import CPU, CUDA
from tests.te_cpu.emulated.test_layouts import EXPERTS, LATENT


def on(device, *shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype, device=device)


def indices(device, *shape):
    return torch.zeros(shape, dtype=torch.int64, device=device)


def saved(tensor, **options):
    file = io.BytesIO()
    torch.save({"a": tensor}, file)
    file.seek(0)
    return torch.load(file, **options)["a"]


def gradient_of(function, device):
    source = on(device, 3).requires_grad_()
    function(source).sum().backward()
    return source.grad


class Halved(torch.autograd.Function):
    """Asks in its backward pass where it is."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full(gradient.shape, 0.5, device=gradient.device)


class HalvedOnTheHost(Halved):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.full(gradient.shape, 0.5)


def stepped(make, device):
    weight = torch.nn.Parameter(on(device, 3))
    weight.grad = on(device, 3)
    optimizer = make([weight])
    optimizer.step()
    return next(value for value in optimizer.state[weight].values() if value.dim())


def parameter_to(device):
    return torch.nn.Linear(2, 2).to(device).weight


# What CUDA takes: name -> (function, where its result is).
TAKEN = {
    "host scalar, pointwise": (lambda: on(CUDA, 3) + on(CPU), CUDA),
    "host scalar first": (lambda: on(CPU) * on(CUDA, 3), CUDA),
    "scalars of both": (lambda: on(CPU) / on(CUDA), CUDA),
    "host scalar in place": (lambda: on(CUDA, 3).mul_(on(CPU)), CUDA),
    "host scalar, maximum": (lambda: torch.maximum(on(CUDA, 3), on(CPU)), CUDA),
    "host scalar, where": (lambda: torch.where(on(CUDA, 3) > 0, on(CPU), on(CUDA, 3)), CUDA),
    "host scalar, masked_fill": (lambda: on(CUDA, 3).masked_fill(on(CUDA, 3) > 0, on(CPU)), CUDA),
    "host scalar, assigned": (lambda: on(CUDA, 3).index_put_((indices(CUDA, 2),), on(CPU)), CUDA),
    "host index": (lambda: on(CUDA, 3)[indices(CPU, 2)], CUDA),
    "host mask": (lambda: on(CUDA, 3)[on(CPU, 3) > 0], CUDA),
    "host index, assigned": (lambda: on(CUDA, 3).index_put_((indices(CPU, 2),), on(CUDA, 2)), CUDA),
    "copy to the host": (lambda: on(CPU, 3).copy_(on(CUDA, 3)), CPU),
    "copy to the GPU": (lambda: on(CUDA, 3).copy_(on(CPU, 3)), CUDA),
    "slice assigned from the host": (lambda: on(CUDA, 3).fill_(0)[:2].copy_(on(CPU, 2)), CUDA),
    "to, by name": (lambda: on(CPU, 3).to("cuda"), CUDA),
    "to, with type": (lambda: on(CUDA, 3).to(CPU, torch.float64), CPU),
    "to, type only": (lambda: on(CUDA, 3).to(torch.bfloat16), CUDA),
    "to, as another": (lambda: on(CPU, 3).to(on(CUDA, 1)), CUDA),
    "cuda": (lambda: on(CPU, 3).cuda(), CUDA),
    "cpu": (lambda: on(CUDA, 3).cpu(), CPU),
    "module": (lambda: parameter_to("cuda"), CUDA),
    "data of another device": (lambda: setattr(w := parameter_to("cpu"), "data", on(CUDA, 2, 2)) or w, CUDA),
    "like": (lambda: torch.zeros_like(on(CUDA, 3)), CUDA),
    "like, elsewhere": (lambda: torch.empty_like(on(CUDA, 3), device="cpu"), CPU),
    "new": (lambda: on(CUDA, 3).new_zeros(2), CUDA),
    "new tensor": (lambda: on(CUDA, 3).new_tensor([1.0]), CUDA),
    "made without a device": (lambda: torch.zeros(3), CPU),
    "tensor of a list": (lambda: torch.tensor([1.0], device="cuda:0"), CUDA),
    "tensor of the GPU's scalars": (lambda: torch.tensor([on(CUDA).item(), 1.0]), CPU),
    "as_tensor": (lambda: torch.as_tensor(on(CUDA, 3)), CUDA),
    "as_tensor of numpy": (lambda: torch.as_tensor(np.ones(3), device="cuda"), CUDA),
    "from_numpy": (lambda: torch.from_numpy(np.ones(3)), CPU),
    "numpy of a copy": (lambda: torch.from_numpy(on(CUDA, 3).cpu().numpy()), CPU),
    "list": (lambda: torch.tensor(on(CUDA, 3).tolist()), CPU),
    "view": (lambda: on(CUDA, 4).view(2, 2).t()[0], CUDA),
    "channels last": (lambda: on(CUDA, 1, 2, 2, 2).to(memory_format=torch.channels_last), CUDA),
    "deep copy": (lambda: copy.deepcopy(on(CUDA, 3)), CUDA),
    "one_hot": (lambda: functional.one_hot(indices(CUDA, 2), 3), CUDA),
    "nonzero": (lambda: on(CUDA, 3).nonzero(), CUDA),
    "bincount": (lambda: torch.bincount(indices(CUDA, 2)), CUDA),
    "sums of whole numbers": (lambda: indices(CUDA, 3).cumsum(0), CUDA),
    "saved": (lambda: saved(on(CUDA, 3)), CUDA),
    "saved, to the host": (lambda: saved(on(CUDA, 3), map_location="cpu"), CPU),
    "saved from the host to the GPU": (lambda: saved(on(CPU, 3), map_location="cuda"), CUDA),
    "pinned": (lambda: on(CPU, 3).pin_memory(), CPU),
    "generator": (lambda: torch.randn(3, device="cuda", generator=torch.Generator("cuda")), CUDA),
    "gradient": (lambda: gradient_of(lambda t: t.max() + t[:2].prod() + t.gather(0, indices(CUDA, 1)), CUDA), CUDA),
    "gradient through a move": (lambda: gradient_of(lambda t: t.cpu().square(), CUDA), CUDA),
    "gradient to the host": (lambda: gradient_of(lambda t: t.cuda().square(), CPU), CPU),
    "own gradient": (lambda: gradient_of(Halved.apply, CUDA), CUDA),
    "Adam": (lambda: stepped(torch.optim.AdamW, CUDA), CUDA),
}  # fmt: skip
REFUSED = {
    "sum": lambda: on(CUDA, 3) + on(CPU, 3),
    "host vector of one": lambda: on(CUDA, 3) + on(CPU, 1),
    "GPU's scalar beside a host vector": lambda: on(CPU, 3) * on(CUDA),
    "in place into a host scalar": lambda: on(CPU).add_(on(CUDA)),
    "in place, host": lambda: on(CPU, 3).add_(on(CUDA, 3)),
    "out": lambda: torch.add(on(CUDA, 3), on(CUDA, 3), out=on(CPU, 3)),
    "stacked scalars": lambda: torch.stack([on(CUDA), on(CPU)]),
    "cat": lambda: torch.cat([on(CUDA, 3), on(CPU, 1)]),
    "product": lambda: on(CUDA, 3, 3) @ on(CPU, 3, 3),
    "linear": lambda: functional.linear(on(CUDA, 3), on(CPU, 3, 3)),
    "embedding": lambda: functional.embedding(indices(CPU, 2), on(CUDA, 3, 3)),
    "cross entropy": lambda: functional.cross_entropy(on(CUDA, 2, 3), indices(CPU, 2)),
    "where, condition": lambda: torch.where(on(CPU, 3) > 0, on(CUDA, 3), on(CUDA, 3)),
    "masked_fill, mask": lambda: on(CUDA, 3).masked_fill(on(CPU, 3) > 0, 0.0),
    "masked_select": lambda: on(CUDA, 3).masked_select(on(CPU, 3) > 0),
    "gather": lambda: on(CUDA, 3).gather(0, indices(CPU, 1)),
    "index_select": lambda: on(CUDA, 3).index_select(0, indices(CPU, 1)),
    "take_along_dim": lambda: on(CUDA, 3).take_along_dim(indices(CPU, 1), 0),
    "scatter": lambda: on(CUDA, 3).scatter_(0, indices(CPU, 1), 2.0),
    "scatter_add": lambda: on(CUDA, 3).scatter_add_(0, indices(CUDA, 1), on(CPU, 1)),
    "index_add": lambda: on(CUDA, 3).index_add_(0, indices(CPU, 1), on(CUDA, 1)),
    "index_copy": lambda: on(CPU, 3).index_copy_(0, indices(CPU, 1), on(CUDA, 1)),
    "GPU's index of a host tensor": lambda: on(CPU, 3)[indices(CUDA, 2)],
    "GPU's mask of a host tensor": lambda: on(CPU, 3)[on(CUDA, 3) > 0],
    "assigned host vector": lambda: on(CUDA, 3).index_put_((indices(CUDA, 2),), on(CPU, 2)),
    "searchsorted": lambda: torch.searchsorted(on(CUDA, 3), on(CPU, 2)),
    "bucketize": lambda: torch.bucketize(on(CUDA, 3), on(CPU, 2)),
    "repeat_interleave": lambda: on(CUDA, 3).repeat_interleave(indices(CPU, 3)),
    "equal": lambda: torch.equal(on(CUDA, 3), on(CPU, 3)),
    "allclose": lambda: torch.allclose(on(CUDA, 3), on(CPU, 3)),
    "foreach": lambda: torch._foreach_add([on(CUDA, 3)], [on(CPU, 3)]),
    "numpy": lambda: on(CUDA, 3).numpy(),
    "array": lambda: np.asarray(on(CUDA, 3)),
    "pinned": lambda: on(CUDA, 3).pin_memory(),
    "host generator": lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
    "host generator, in place": lambda: on(CUDA, 3).normal_(generator=torch.Generator()),
    "GPU's generator": lambda: torch.randn(3, generator=torch.Generator("cuda")),
    "after a move": lambda: on(CUDA, 3).cpu() + on(CUDA, 3),
    "views": lambda: on(CUDA, 4).view(2, 2)[0] - on(CPU, 4)[:2],
    "own gradient": lambda: gradient_of(HalvedOnTheHost.apply, CUDA),
    "assigned gradient": lambda: setattr(on(CUDA, 3), "grad", on(CPU, 3)),
}


def outcome(function):
    """Where the result is, or the error."""
    try:
        return function().device
    except (devices.MixedDevicesError, TypeError) as error:
        return str(error)


def test_devices_mix_as_those_of_cuda_do():
    with devices.pretending():
        wrong = {n: got for n, (function, expected) in TAKEN.items() if (got := outcome(function)) != expected}
        wrong |= {
            f"{n}, refused": got
            for n, function in REFUSED.items()
            if isinstance(got := outcome(function), torch.device)
        }
    assert not wrong
    assert on(CPU, 2).device == CPU


def refusals_of(communication):
    """Which of the backends refuse tensors of GPU and host."""
    groups = {"nccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    outcomes = {}
    for backend, group in groups.items():
        for device in (CUDA, CPU):
            got = outcome(lambda group=group, device=device: communication(group, on(device, 2)) or on(device, 2))
            outcomes[backend, device.type] = isinstance(got, str)
    return {place for place, is_refused in outcomes.items() if is_refused}


def test_collectives_take_what_their_backend_does():
    def gather(group, tensor):
        dist.all_gather([torch.empty_like(tensor)], tensor, group=group)

    with devices.pretending():
        start_processes(ParallelConfig(), 0)
        try:
            assert refusals_of(lambda group, tensor: dist.all_reduce(tensor, group=group) and None) == {("nccl", "cpu")}
            assert refusals_of(gather) == {("nccl", "cpu"), ("gloo", "cuda")}
            objects = [None]
            dist.all_gather_object(objects, {"a": 1})  # torch brings them where the group's tensors are.
            assert objects == [{"a": 1}]
        finally:
            stop_processes()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 200, "hidden_size": 128, "intermediate_size": 256}
    made = {"dense": tiny_model(folder / "dense", **sizes)}
    special = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    for name, kind, more in (("experts", "Qwen3MoeConfig", EXPERTS), ("latent", "DeepseekV3Config", LATENT)):
        config = getattr(transformers, kind)(**{**DEVICE_SIZES, **more, **special})
        made[name] = save_random(config, folder / name, scale=0.03)
        build_character_tokenizer(map(chr, range(32, 127))).save_pretrained(folder / name)
    return made


CORRECTED = {
    "importance_cap": 2.0,
    "sequence_mask": (0.5, 2.0),
    "token_mask": (0.1, 10.0),
    "entropy_coefficient": 1e-3,
    "entropy_target": 0.5,
    "kl": {"coefficient": 0.1, "estimator": "k3"},
}
FP8 = {
    f"{scaling}{' parameters' * params}": {"compute": {"fp8": {"scaling": scaling, "params": params}}}
    for scaling, params in (("delayed", False), ("tensorwise", True), ("blockwise", True))
}
# Besides the two below, and those of which nothing runs on the device that does not for another.
OTHERS = set(PRESETS) - {"dapo", "ppo", "dr_grpo", "rloo", "reinforce_pp_baseline", "remax"}
LOCAL = {"model": {"layer_implementation": "local"}}
RUNS = {
    **{preset: {**LOCAL, "num_steps": 1, "algorithm": {"preset": preset}} for preset in sorted(OTHERS)},
    "dapo": {"algorithm": CORRECTED, "checkpoint": {"every": 1}, "tracking": {"histograms_every": 1}},
    "corrected by response": {**LOCAL, "algorithm": {**CORRECTED, "importance_level": "sequence"}},
    "not fused": {**LOCAL, "num_steps": 1, "compute": {"fused_output_layer": False}},
    "ppo": {"algorithm": {"preset": "ppo", "kl": {"coefficient": 0.1, "placement": "reward"}}},
    "deterministic": {**LOCAL, "compute": {"deterministic": True}, "rollout": {"top_p": 0.9, "top_k": 50}},
    "recomputed": {**LOCAL, "compute": {"recompute": "full", "overlap_grad_reduce": True}},
    "offloaded": {"compute": {"optimizer_offload": 1.0}},
    "experts": {"num_steps": 1, "model": {"path": "experts"}, "compute": {"moe": {"aux_loss_coefficient": 0.01}}},
    "latent": {"num_steps": 1, "model": {"path": "latent"}},
    "deterministic experts": {"num_steps": 1, "model": {"path": "experts"}, "compute": {"deterministic": True}},
    **FP8,
}  # fmt: skip


def recorded(training_run):
    return [r for r in read_metrics(Path(training_run.config.output_dir) / "metrics.jsonl") if r["step"] > 0]


def run(folder, models, case, place=None):
    """The records of two steps, on tensors of a GPU by name; on the first process."""
    engine = SimpleNamespace(model=models["dense"], launcher=SimpleNamespace(urls=[]))
    values = fleet_values(
        folder, engine, num_steps=2, data={"max_prompt_tokens": 24}, batch={"tokens_per_microbatch": 128}
    )
    values["rollout"] = {"max_response_tokens": 12, "mismatch_warning": 10.0}
    values["model"]["dtype"] = "bf16"
    for section, given in case.items():
        values[section] = merge(values.get(section, {}), given) if isinstance(given, dict) else given
    values["model"]["path"] = str(models.get(values["model"]["path"], values["model"]["path"]))
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(devices.pretending())
            if place:
                dist.init_process_group("nccl", store=place[0], rank=place[1], world_size=2)
            config = RunConfig.model_validate(values)
            made = Trainer(config, start_processes(config.parallel, config.seed))
            if made.processes.rank:
                stack.callback(stop_processes)
                made.obey()
                assert all(devices.on_gpu(p) for chunk in made.policy.chunks for p in chunk.parameters())
                return None
            training_run = stack.enter_context(training_run_of(values, made))
            stack.enter_context(made.commanding())
            assert all(devices.on_gpu(p) for chunk in made.policy.chunks for p in chunk.parameters())
            if newest := made.store.latest():
                trainer.restore(training_run, made.load(newest))
            trainer.train(training_run)
            made.finish_saving()
            return recorded(training_run)
    finally:
        torch.use_deterministic_algorithms(False)
        te_cpu.forget_models()


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
GAE = {"preset": "ppo", "kl": {"coefficient": 0.1, "placement": "reward"}}
LAYOUTS = {
    "tensor, sequence": {"parallel": {"tensor": 2, "sequence": True}, "algorithm": CORRECTED},
    "context": {"parallel": {"context": 2}, "algorithm": {**GAE, "sequence_mask": (0.5, 2.0)}},
    "context, by response": {**LOCAL, "parallel": {"context": 2}, "algorithm": {"preset": "gspo"}},
    "pipeline": {"parallel": {"pipeline": 2}, "checkpoint": {"every": 1}, "algorithm": {"preset": "kl_cov"}},
    "data": {"compute": {**OVERLAP, "fp8": {"scaling": "blockwise", "params": True}}},
    "experts": {"model": {"path": "experts"}, "parallel": {"expert": 2}},
}


def run_layouts(folder, models, layouts):
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    stop_processes()  # Of gloo; those that follow believe that theirs are NCCL's.
    results = {}
    for name, case in layouts.items():
        results[name] = run(folder / name, models, {**case, "num_steps": 1}, (dist.PrefixStore(name, store), rank))
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=2)
    return results


def test_no_process_of_a_layout_mixes_devices(tmp_path, models, pytestconfig):
    only_in_the_whole_table = () if pytestconfig.getoption("whole_table") else ("context, by response",)
    layouts = {name: case for name, case in LAYOUTS.items() if name not in only_in_the_whole_table}
    for name in layouts:
        (tmp_path / name).mkdir()
    for name, (record,) in run_distributed(run_layouts, 2, tmp_path, models, layouts, timeout_s=300)[0].items():
        assert record["policy/grad_norm"] > 0, name


# The gate has each operation once: other losses differ in a formula, and these in what others have, too; "ppo" and
# "delayed" are in the resumed run, "kl_cov" in a layout.
IN_GATE = {"dapo", "deterministic", "deterministic experts", "blockwise parameters"}


@pytest.mark.parametrize("name", marked(RUNS, RUNS.keys() - IN_GATE))
def test_no_step_of_training_mixes_devices(tmp_path, models, name):
    records = run(tmp_path, models, RUNS[name])
    assert [record["step"] for record in records] == list(range(1, RUNS[name].get("num_steps", 2) + 1))
    assert all(record["policy/grad_norm"] > 0 for record in records)
    assert records[-1]["rollout/logprob_abs_diff_mean"] < (0.5 if name in FP8 else 0.05)


def test_a_resumed_run_mixes_no_devices(tmp_path, models):
    """Loading brings the policy, its critic, their optimizers and FP8 scales back to the GPU."""
    case = {"algorithm": {"preset": "ppo"}, "checkpoint": {"every": 1}, **FP8["delayed"]}
    (first,) = run(tmp_path, models, {**case, "num_steps": 1})
    kept, second = run(tmp_path, models, case)
    assert kept == first, "its step was done again"
    assert all(second[f"{model}/grad_norm"] > 0 for model in ("policy", "critic"))


# compute.optimizer_offload before and after a resume, and the number of updates before it.
OFFLOADING = [
    (1.0, 0.3, 2),
    *(
        pytest.param(*case, marks=pytest.mark.whole_table)
        for case in ((0.5, 0.5, 2), (0.0, 0.5, 2), (1.0, 1.0, 0), (0.5, 0.0, 2))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "num_updates"), OFFLOADING)
def test_a_changed_share_of_offloading_takes_effect_at_a_resume(tmp_path, models, before, after, num_updates):
    """Loading changes no bit of the optimizer's state. The next updates are the same, but for roundings in which the
    host's Adam and the GPU's differ; from the second on these may turn bits of bf16."""

    def made(share):
        return device_policy(models["dense"], processes, learning_rate=1e-2, optimizer_offload=share)

    def updated(policy, seed):
        batch = pack(flatten(make_samples(4, seed, all_in_loss=True)), max_response_tokens=64)
        policy.update([TokenBatch(batch)], SupervisedLoss())
        weights = [tensor.float().flatten() for bucket in policy.weights(1 << 30) for _, tensor in bucket]
        return adam_state(policy), torch.cat(weights)

    with devices.pretending():
        processes = start_processes(ParallelConfig(), 0)
        try:
            whole, store = made(before), CheckpointStore(tmp_path, keep_last=1)
            for seed in range(num_updates):
                updated(whole, seed)
            store.save(whole, LoopState(1, {}, {}), 1)
            resumed = made(after)
            store.load(resumed, store.latest())
            saved, loaded = adam_state(whole), adam_state(resumed)
            (first, weights), (second, later) = (updated(whole, seed) for seed in (8, 9))
            (my_first, my_weights), (my_second, my_later) = (updated(resumed, seed) for seed in (8, 9))
        finally:
            stop_processes()
    assert torch.equal(loaded.values, saved.values)
    for share, state in ((before, saved), (after, loaded)):
        assert share <= state.share_on_host <= (share and share + 0.35), "it is the least that whole tensors can make"
    assert loaded.steps == saved.steps == {num_updates}
    assert my_second.steps == second.steps == {num_updates + 2}
    if before == after:
        assert torch.equal(my_second.values, second.values)
        assert torch.equal(my_later, later)
    assert torch.allclose(my_first.values, first.values, rtol=1e-5, atol=1e-6)
    assert torch.allclose(my_weights, weights, rtol=2**-7, atol=1e-6)


def adam_state(policy):
    """The optimizer's float32 weights and moments in one row, its counts of steps, and which share of the moments is on
    the host."""
    (part,) = policy.optimizer.chained_optimizers
    inner = part.optimizer
    weights = [weight for group in inner.param_groups for weight in group["params"]]
    moments = [inner.state[weight][name] for weight in weights for name in ("exp_avg", "exp_avg_sq")]
    on_host = sum(moment.numel() for moment in moments if not devices.on_gpu(moment))
    steps = set()
    for each in getattr(inner, "sub_optimizers", [inner]):
        steps |= {int(place["step"]) for place in (*each.state.values(), *each.param_groups) if "step" in place}
    return SimpleNamespace(
        values=torch.cat([tensor.cpu().flatten() for tensor in (*weights, *moments)]),
        share_on_host=on_host / sum(moment.numel() for moment in moments),
        steps=steps,
    )


def test_supervised_training_mixes_no_devices(tmp_path, models):
    rows = {"prompt": [f"{i}?" for i in range(20)], "response": [str(i) for i in range(20)]}
    pq.write_table(pa.table(rows), tmp_path / "demonstrations.parquet")
    values = {
        "output_dir": str(tmp_path / "run"),
        "batch_samples": 8,
        "model": {"path": str(models["dense"]), "dtype": "bf16"},
        "compute": FP8["blockwise parameters"]["compute"],
        "data": {"max_tokens": 16, "train": {"path": str(tmp_path / "demonstrations.parquet"), "template": "as_is"}},
        "checkpoint": {"every": 1},
    }
    with devices.pretending():
        for num_steps in (1, 2):  # The second run loads what the first has saved.
            run_sft(SftConfig.model_validate({**values, "num_steps": num_steps}), accept_changes=True)
            te_cpu.forget_models()
    losses = [record["policy/loss"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 2
    assert all(loss > 0 for loss in losses)


def test_what_engines_are_sent_is_on_the_gpu(models):
    with devices.pretending():
        policy = device_policy(models["dense"], start_processes(ParallelConfig(), 0), learning_rate=1e-2)
        deltas = DeltaEncoding(torch.bfloat16)
        try:
            for _ in range(2):
                for bucket in policy.weights(1 << 20):
                    specs = deltas.planned(bucket).specs
                    chunks = deltas.encode(bucket)
                    assert all(map(devices.on_gpu, chunks))
                    for spec, change in zip(specs, unpack_changes(chunks[1], specs), strict=True):
                        assert devices.on_gpu(change.values)
                        make_patch(spec, change, [])
                batch = pack(flatten(make_samples(4, all_in_loss=True)), max_response_tokens=64)
                policy.update([TokenBatch(batch)], SupervisedLoss())
            assert 0 < deltas.changed_bytes < deltas.compared_bytes
            quantised = map(quantised_bucket, policy.weights(1 << 20))
            assert all(devices.on_gpu(tensor) for bucket in quantised for _, tensor in bucket)
        finally:
            stop_processes()
