"""A checkpoint holds the critic beside the policy: both go on bit for bit, and each is converted by itself."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import TensorStorageMetadata

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.commands import convert
from dapo_mega.config import AlgorithmConfig, LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig
from dapo_mega.conversion.convert import open_checkpoint, reshard, to_hf, to_megatron
from dapo_mega.conversion.inspection import describe
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.repairs import background_writing
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.megatron.value_loss import ValueBatch, ValueLoss
from dapo_mega.megatron.value_model import ValueModel
from dapo_mega.models.megatron_format.pickles import read_metadata
from tests.distributed.tiny import make_llama_model, make_model, make_samples, make_value_model
from tests.numerics.closeness import assert_alike

from .test_store import CHANGES, in_effect

TP2 = {"tensor": 2, "sequence": True}
SHARD_BYTES = 40_000
RUN = {"output_dir": "o", "num_steps": 10, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The policy's folder, and that of a critic of another family and size."""
    folder = tmp_path_factory.mktemp("models")
    critic = make_llama_model(folder / "critic", num_hidden_layers=2)
    return make_model(folder / "policy", tied=True), make_value_model(critic)


def make_both(models, processes, dtype="fp32", lora=None):
    schedule = {"updates_per_step": 1, "num_steps": 10, "lora": lora}
    policy = MegatronPolicy(*settings(models[0], dtype), processes, temperature=1.0, **schedule)
    return policy, ValueModel(*settings(models[1], dtype), processes, **schedule)


def settings(path, dtype):
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=3)
    return ModelConfig(path=str(path), dtype=dtype), ParallelConfig(), optimizer


def update(models, seed):
    policy, critic = models
    batch = pack(flatten(make_samples(8, seed)), max_response_tokens=64)
    values = critic.score([batch])[0]
    returns = torch.sin(torch.arange(len(values)).float())
    return {
        **policy.update([TokenBatch(batch, policy.score([batch])[0].logprobs)], PolicyGradient(AlgorithmConfig())),
        **critic.update([ValueBatch(batch, values, returns)], ValueLoss(0.2)),
    }


def save(store, models, step):
    policy, critic = models
    store.save(policy, LoopState(step, {}, {}), step, critic)


@pytest.fixture(scope="module")
def checkpoint(models, processes, tmp_path_factory):
    """A checkpoint after one step, and the exports of both models at it."""
    folder = tmp_path_factory.mktemp("run")
    both = make_both(models, processes)
    update(both, 0)
    store = CheckpointStore(folder / "checkpoints", keep_last=1)
    save(store, both, 1)
    save_hf_checkpoint(both[0], folder / "policy")
    save_hf_checkpoint(both[1], folder / "critic")
    return store.latest(), folder / "policy", folder / "critic"


def assert_same_files(found, expected):
    names = {file.name for file in expected.iterdir()}
    assert {file.name for file in found.iterdir()} - {"conversion.json"} == names
    for name in names - {"model.safetensors"}:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    tensors, wanted = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())


LORA = LoraConfig(rank=4, dropout=0.1)


@pytest.mark.parametrize(("dtype", "lora"), [("fp32", None), ("bf16", None), ("fp32", LORA)])
def test_a_restored_policy_and_critic_continue_bit_for_bit(models, processes, tmp_path, dtype, lora, monkeypatch):
    released, write = threading.Event(), background_writing._write
    monkeypatch.setattr(background_writing, "_write", lambda *given: (released.wait(60), write(*given)))
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, asynchronous=True)
    first = make_both(models, processes, dtype, lora)
    for seed in (1, 2):
        update(first, seed)
    save(store, first, 2)
    expected = [update(first, seed) for seed in (3, 4, 5)]
    released.set()
    store.finish(first[0])
    second = make_both(models, processes, dtype, lora)
    loaded = store.load(second[0], store.latest(), second[1])
    assert (loaded.step, loaded.values) == (2, {})
    assert [update(second, seed) for seed in (3, 4, 5)] == expected


def test_a_critic_with_adapters_is_saved_as_adapters_and_head_and_exported_whole(models, processes, tmp_path):
    both = make_both(models, processes, lora=LORA)
    for seed in (1, 2):
        update(both, seed)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, both, 2)
    stored = read_metadata(store.latest()).state_dict_metadata
    names = {name for name, item in stored.items() if isinstance(item, TensorStorageMetadata) and "critic." in name}
    assert {name for name in names if ".lora." not in name and ".state." not in name} == {"critic.output_layer.weight"}
    assert all(".lora." in name or "output_layer.weight" in name for name in names)
    assert len(names) > 4
    save_hf_checkpoint(both[1], tmp_path / "critic")
    merged = ValueModel(*settings(tmp_path / "critic", "fp32"), processes, updates_per_step=1, num_steps=10)
    batch = pack(flatten(make_samples(8)), max_response_tokens=64)
    values, start = both[1].score([batch])[0], make_both(models, processes)[1].score([batch])[0]
    assert_alike(merged.score([batch])[0], values)
    assert float((values - start).abs().max()) > 1e-3


def test_changed_settings_of_the_critics_optimizer_take_effect_at_a_resume(models, processes, tmp_path):
    """As the run's configuration gives them to the critic; what each does is shown of a policy, in test_store.py."""
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    first = make_both(models, processes)
    for seed in (1, 2):
        update(first, seed)
    save(store, first, 2)
    own = {key: value for key, (value, _) in CHANGES.items() if key in ("learning_rate", "warmup_steps")}
    shared = {key: value for key, (value, _) in CHANGES.items() if key not in own}
    config = RunConfig.model_validate({**RUN, "optimizer": shared, "critic": own})
    model, layout, _ = settings(models[1], "fp32")
    critic = ValueModel(model, layout, config.critic_optimizer, processes, updates_per_step=1, num_steps=10)
    policy = make_both(models, processes)[0]
    store.load(policy, store.latest(), critic)
    assert update((policy, critic), 3)["critic/learning_rate"] == pytest.approx(1e-3 * 3 / 6)
    assert in_effect(critic) == {key: value for key, (value, _) in CHANGES.items()}


def test_a_checkpoint_without_critic_is_refused_where_one_is_needed(models, processes, tmp_path):
    policy, critic = make_both(models, processes)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    store.save(policy, LoopState(1, {}, {}), 1)
    assert store.load(policy, store.latest()).step == 1
    with pytest.raises(InputError, match=r"step_00000001 holds no critic.*algorithm\.advantage"):
        store.load(policy, store.latest(), critic)


def test_a_critic_of_other_sizes_is_refused(models, processes, checkpoint):
    policy, critic = make_both((models[0], models[0]), processes)
    store = CheckpointStore(checkpoint[0].parent, keep_last=1)
    with pytest.raises(InputError, match="cannot be loaded into this model"):
        store.load(policy, checkpoint[0], critic)


def test_both_models_start_from_the_folder_of_a_checkpoint(processes, checkpoint, tmp_path):
    """Also where the run has no critic: then it is passed over."""
    folder, *exports = checkpoint
    both = make_both((folder, folder), processes)
    for model, name, export in zip(both, ("policy", "critic"), exports, strict=True):
        save_hf_checkpoint(model, tmp_path / name)
        assert_same_files(tmp_path / name, export)
    store = CheckpointStore(folder.parent, keep_last=1)
    store.load(both[0], folder)
    save_hf_checkpoint(both[0], tmp_path / "loaded")
    assert_same_files(tmp_path / "loaded", exports[0])


def test_a_checkpoint_becomes_the_exports_of_both_models(checkpoint, tmp_path):
    folder, policy, critic = checkpoint
    convert.main(["megatron-to-hf", str(folder), str(tmp_path / "policy")])
    convert.main(["megatron-to-hf", str(folder), str(tmp_path / "critic"), "--critic"])
    assert_same_files(tmp_path / "policy", policy)
    assert_same_files(tmp_path / "critic", critic)


def test_a_value_model_goes_to_megatrons_format_and_back(processes, checkpoint, tmp_path):
    export = checkpoint[2]
    to_megatron(open_checkpoint(export), tmp_path / "megatron", ParallelConfig(**TP2), SHARD_BYTES)
    to_hf(open_checkpoint(tmp_path / "megatron"), tmp_path / "back", 1 << 30)
    assert_same_files(tmp_path / "back", export)
    critic = ValueModel(*settings(tmp_path / "megatron", "fp32"), processes, updates_per_step=1, num_steps=1)
    save_hf_checkpoint(critic, tmp_path / "loaded")
    expected = load_file(export / "model.safetensors")
    assert all(torch.equal(t, expected[n]) for n, t in load_file(tmp_path / "loaded" / "model.safetensors").items())


def test_a_resharded_checkpoint_continues_bit_for_bit_with_its_critic(models, processes, checkpoint, tmp_path):
    target = tmp_path / "checkpoints" / "step_00000001"
    target.parent.mkdir()
    reshard(open_checkpoint(checkpoint[0]), target, ParallelConfig(**TP2, pipeline=2), SHARD_BYTES)
    results = []
    for folder in (checkpoint[0], target):
        both = make_both(models, processes)
        store = CheckpointStore(folder.parent, keep_last=1)
        assert store.latest() == folder
        store.load(both[0], folder, both[1])
        results.append([update(both, seed) for seed in (3, 4)])
    assert results[0] == results[1]


def test_a_checkpoint_is_described_with_its_critic(checkpoint, capsys):
    assert any("--critic describes it" in line for line in describe(open_checkpoint(checkpoint[0]), False))
    convert.main(["inspect", str(checkpoint[0]), "--critic", "--tensors"])
    text = capsys.readouterr().out
    assert "a value head" in text
    assert "score.weight  [1, 48]" in text
    convert.main(["verify", str(checkpoint[0]), str(checkpoint[2]), "--critic"])
    with pytest.raises(InputError, match="holds no value model beside a policy"):
        open_checkpoint(checkpoint[1], is_critic=True)


def test_the_critics_configuration_stays_out_of_the_policys_exports(checkpoint):
    folder, policy, critic = checkpoint
    assert not (policy / "critic_config.json").exists()
    config = json.loads((folder / "critic_config.json").read_text())
    assert config == json.loads((critic / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
