"""A checkpoint holds the whole policy, and Megatron never reaches CUDA on the way."""

import json
import pickle
import sys
import threading

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import load_plain_tensors
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file
from torch.distributed.checkpoint import BytesStorageMetadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.config import AlgorithmConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, to_hf, to_megatron
from dapo_mega.conversion.verification import different_tensors
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.core.repairs import background_writing
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.models.hf_checkpoint import HfCheckpoint, same_bits
from dapo_mega.models.megatron_format.pickles import read_common, read_metadata
from tests.distributed.tiny import add_mtp_layers, make_deepseek_v3_model, make_model, make_samples


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


def policy(model, processes, dtype="fp32", *, updates_per_step=1, num_steps=10, **changes):
    return MegatronPolicy(
        ModelConfig(path=str(model), dtype=dtype),
        ParallelConfig(),
        OptimizerConfig(**{"learning_rate": 1e-2, "warmup_steps": 3, **changes}),
        processes,
        temperature=1.0,
        updates_per_step=updates_per_step,
        num_steps=num_steps,
    )


def update(subject, seed):
    batch = pack(flatten(make_samples(8, seed)), max_response_tokens=64)
    return subject.update([TokenBatch(batch, subject.score([batch])[0].logprobs)], PolicyGradient(AlgorithmConfig()))


def state(step):
    return LoopState(step, {"collector": {"position": 7}}, {"buffer/token_ids": np.arange(5, dtype=np.int32)})


@pytest.fixture
def writer_released(monkeypatch):
    """No file of a checkpoint is written before this event is set: what it shared with the policy would show."""
    released = threading.Event()
    write = background_writing._write

    def write_late(*arguments):
        assert released.wait(60)
        write(*arguments)

    monkeypatch.setattr(background_writing, "_write", write_late)
    yield released
    released.set()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_restored_policy_continues_bit_for_bit(model, processes, tmp_path, dtype, writer_released):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, asynchronous=True)
    first = policy(model, processes, dtype)
    update(first, 1)
    update(first, 2)
    store.save(first, state(2), 2)
    expected = [update(first, seed) for seed in (3, 4, 5)]
    store.finish(first, wait=False)
    assert store.latest() is None
    writer_released.set()
    store.finish(first)
    second = policy(model, processes, dtype)
    tracker = get_cuda_rng_tracker()
    kept = tracker.get_states()
    tracker.set_states({name: torch.zeros_like(state) for name, state in kept.items()})
    loaded = store.load(second, store.latest())
    assert kept
    assert all(torch.equal(tracker.get_states()[name], state) for name, state in kept.items())
    assert [update(second, seed) for seed in (3, 4, 5)] == expected
    assert (loaded.step, loaded.values["collector"]) == (2, {"position": 7})
    assert loaded.arrays["buffer/token_ids"].tolist() == [0, 1, 2, 3, 4]


def move_common_values(folder):
    """To where another version of Megatron has them: a file of their own until 0.18, since 0.19 a `.distcp` file."""
    common, file = read_common(folder), folder / "common.pt"
    if not file.exists():
        torch.save(common, file)
        return
    file.unlink()
    metadata, key = read_metadata(folder), "common_state/shard_0_1"
    torch.save([common], folder / "__9_0.distcp")
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    size = (folder / "__9_0.distcp").stat().st_size
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo("__9_0.distcp", 0, size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_checkpoint_of_another_version_of_megatron_continues_bit_for_bit(model, processes, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    first, second = policy(model, processes), policy(model, processes)
    update(first, 1)
    store.save(first, state(1), 1)
    folder = store.latest()
    move_common_values(folder)
    store.load(second, folder)
    assert [update(second, seed) for seed in (2, 3)] == [update(first, seed) for seed in (2, 3)]


# The optimizer's keys -> changed values, with the learning rate of the next update, the third, if it changes.
CHANGES = {
    "learning_rate": (1e-3, 1e-3),
    "warmup_steps": (6, 1e-2 * 3 / 6),
    "schedule": ("linear", None),  # Its warm-up ends with this update.
    "weight_decay": (0.5, None),
    "beta1": (0.5, None),
    "beta2": (0.9, None),
    "epsilon": (1e-2, None),
    "clip_grad": (1e-3, None),
}


def in_effect(subject):
    """The optimizer's keys -> values with which the next update will be made."""
    groups, schedule = subject.optimizer.param_groups, subject.scheduler
    ((betas, epsilon),) = {(tuple(group["betas"]), group["eps"]) for group in groups}
    (clip_grad,) = {part.config.clip_grad for part in subject.optimizer.chained_optimizers}
    return {
        "learning_rate": schedule.max_lr,
        "warmup_steps": schedule.lr_warmup_steps,
        "schedule": schedule.lr_decay_style,
        "weight_decay": max(group["weight_decay"] for group in groups),
        "beta1": betas[0],
        "beta2": betas[1],
        "epsilon": epsilon,
        "clip_grad": clip_grad,
    }


def test_a_changed_setting_of_the_optimizer_takes_effect_at_a_resume(model, processes, tmp_path):
    """Each alone, after two of three updates of warm-up; what a checkpoint brings back is state, never a setting."""
    elsewhere = {"max_skipped_updates"}  # distributed/test_skipped_updates.py
    assert set(CHANGES) | elsewhere == set(OptimizerConfig.model_fields), "say here what a new key changes"
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    subject = policy(model, processes)
    for seed in (1, 2):
        update(subject, seed)
    store.save(subject, state(2), 2)

    def continued(num_updates=2, **changes):
        again = policy(model, processes, **changes)
        fresh = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in again.optimizer.param_groups]
        store.load(again, store.latest())
        groups = [
            {k: v for k, v in g.items() if k not in ("params", "lr", "step")} for g in again.optimizer.param_groups
        ]
        assert groups == fresh
        rates = [update(again, 3 + i)["policy/learning_rate"] for i in range(num_updates)]
        return rates, {name: tensor.clone() for bucket in again.weights(1 << 20) for name, tensor in bucket}

    rates, weights = continued()
    assert rates == pytest.approx([1e-2, 1e-2])
    for key, (value, rate) in CHANGES.items():
        changed_rates, changed = continued(**{key: value})
        assert any(not torch.equal(changed[name], weights[name]) for name in weights), key
        assert changed_rates[0] == pytest.approx(rate or 1e-2), key
    # Two updates a step instead of one: two steps are four of the six updates of warm-up.
    assert continued(1, updates_per_step=2)[0] == pytest.approx([1e-2 * 5 / 6])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_every_update_of_a_falling_schedule_trains(model, processes, schedule):
    """From the whole rate on: that of one step is the whole one, of four it would be 0 in the fifth."""
    shares = {"linear": [1, 0.75, 0.5, 0.25], "cosine": [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]}[schedule]
    for num_steps, warmup, expected in ((1, 0, [1]), (4, 0, shares), (5, 2, [0.5, *shares])):
        subject = policy(model, processes, schedule=schedule, warmup_steps=warmup, num_steps=num_steps)
        rates = [update(subject, i)["policy/learning_rate"] for i in range(num_steps)]
        assert rates == pytest.approx([1e-2 * share for share in expected])


def test_tensors_outside_of_megatrons_buffers_are_copied_too(model, processes, tmp_path, writer_released):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, asynchronous=True)
    subject = policy(model, processes)
    norm = unwrapped(subject.chunks[0]).decoder.final_layernorm.weight
    norm.data = norm.data.clone()
    saved = norm.detach().clone()
    store.save(subject, state(1), 1)
    norm.data.add_(1.0)
    writer_released.set()
    store.finish(subject)
    # Loading would take the weights from the optimizer's copy.
    stored = load_plain_tensors(str(store.latest()))
    assert torch.equal(stored["decoder.final_layernorm.weight"], saved)


def test_a_save_waits_for_the_one_before(model, processes, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=3, asynchronous=True)
    subject = policy(model, processes)
    for step in (1, 2):
        store.save(subject, state(step), step)
    assert store.latest().name == "step_00000001"
    assert [path.name for path in store.root.glob(".*")] == [".step_00000002.partial"]
    store.finish(subject)
    assert store.latest().name == "step_00000002"
    assert not list(store.root.glob(".*"))


def test_a_failed_background_write_is_reported_and_leaves_no_trace(model, processes, tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, asynchronous=True)
    subject = policy(model, processes)
    store.save(subject, state(1), 1)
    store.finish(subject)

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem_async, "_write_item", refuse)
    store.save(subject, state(2), 2)
    with pytest.raises(InputError, match=r"cannot write the checkpoint step_00000002.*No space left"):
        store.finish(subject)
    monkeypatch.undo()
    assert sorted(path.name for path in store.root.iterdir()) == ["latest", "step_00000001"]
    store.save(subject, state(3), 3)
    store.finish(subject)
    assert store.latest().name == "step_00000003"


def test_a_checkpoint_of_another_model_is_refused(model, processes, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    store.save(policy(model, processes), state(1), 1)
    other = make_model(tmp_path / "other", tied=True)
    config = json.loads((other / "config.json").read_text())
    assert config["num_hidden_layers"] == 4
    smaller = make_model(tmp_path / "smaller", tied=True, num_layers=2)
    bigger = make_model(tmp_path / "bigger", tied=True, num_layers=6)
    with pytest.raises(InputError, match="cannot be loaded into this model"):
        store.load(policy(bigger, processes), store.latest())
    with pytest.raises(InputError, match="cannot be loaded into this model"):
        store.load(policy(smaller, processes), store.latest())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU is presented to Megatron only without CUDA")
def test_every_megatron_module_sees_the_cpu_and_nobody_else_does(model, processes, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    subject = policy(model, processes)
    update(subject, 0)
    store.save(subject, state(1), 1)
    real = [
        name
        for name, module in sys.modules.items()
        if name.startswith("megatron.core") and vars(module).get("torch") is torch
    ]
    # Modules that Megatron loads for other parts of itself may keep the real torch; those on our way may not.
    others = tuple(f"megatron.core.{part}" for part in ("inference", "export", "models.mimo"))
    assert not [name for name in real if not name.startswith(others)]
    import megatron.core.optimizer.clip_grads as clip_grads

    assert clip_grads.torch.zeros(1, device="cuda").device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_becomes_the_export_of_its_step_by_itself(model, processes, tmp_path, dtype):
    subject = policy(model, processes, dtype)
    update(subject, 0)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(subject, state(1), 1)
    save_hf_checkpoint(subject, tmp_path / "exported")
    to_hf(open_checkpoint(store.latest()), tmp_path / "converted", 2**30)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "converted" / name).read_bytes()
    exported, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "converted"))
    assert exported.keys() == converted.keys()
    assert all(torch.equal(tensor, converted[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("form", ["Hugging Face", "Megatron"])
def test_exports_keep_layers_of_multi_token_prediction_as_they_were(processes, tmp_path, form):
    model = make_deepseek_v3_model(tmp_path / "model")
    added = add_mtp_layers(model)
    if form == "Megatron":
        to_megatron(open_checkpoint(model), tmp_path / "megatron", ParallelConfig(), 2**30)
    subject = policy(tmp_path / "megatron" if form == "Megatron" else model, processes, "bf16")
    update(subject, 0)
    save_hf_checkpoint(subject, tmp_path / "exported")
    exported, before = HfCheckpoint(tmp_path / "exported"), HfCheckpoint(model)
    assert exported.names() == before.names()
    assert all(same_bits(exported.tensor(name), tensor) for name, tensor in added.items())
    name = "model.layers.3.self_attn.o_proj.weight"
    assert not torch.equal(exported.tensor(name), before.tensor(name).bfloat16())
    # A run's checkpoint does not hold them: its conversion is given the model.
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(subject, state(1), 1)
    to_hf(open_checkpoint(store.latest(), model), tmp_path / "converted", 2**30)
    assert different_tensors(open_checkpoint(tmp_path / "exported"), open_checkpoint(tmp_path / "converted")) == []
    assert not added.keys() & set(open_checkpoint(store.latest()).names)
