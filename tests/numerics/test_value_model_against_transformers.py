"""The value model computes what transformers' token classifier with one label computes, and is exported as one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from dapo_mega.algorithms.value_loss import value_loss
from dapo_mega.batching import microbatch
from dapo_mega.batching.samples import flatten
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.errors import InputError
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.megatron.value_loss import ValueBatch, ValueLoss
from dapo_mega.megatron.value_model import ValueModel
from dapo_mega.models.families import families
from tests.distributed.tiny import FAMILIES, FAMILY_MODELS, make_model, make_samples, make_value_model, prompt_length

# Where a policy's tied output layer would be a value model has its head.
KINDS = (*FAMILIES, "qwen2, tied")
CLASSIFIERS = [
    name
    for name in KINDS
    for kind in (name.split(",")[0],)
    if (families().get(kind) or families()[f"{kind}_text"]).has_token_classifier
]


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Value models of all families."""
    folder = tmp_path_factory.mktemp("families")
    return {name: make_value_model(FAMILY_MODELS[name](folder / str(i))) for i, name in enumerate(KINDS)}


def make_critic(path, processes, dtype="fp32"):
    return ValueModel(
        ModelConfig(path=str(path), dtype=dtype),
        ParallelConfig(),
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0, epsilon=1.0, clip_grad=0.0),
        processes,
        updates_per_step=1,
        num_steps=4,
    )


def pack(samples):
    return microbatch.pack(flatten(samples), max_response_tokens=64)


def load_classifier(path):
    model, report = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def load_without_head(path):
    model, report = AutoModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert (report["missing_keys"], report["unexpected_keys"]) == (set(), {"score.weight"})
    return model.eval()


def transformers_values(model, samples, head=None):
    """Values before each response token, sequence by sequence, without packing; by `head` if the model has none."""
    parts = []
    for sample in samples:
        output = model(sample.token_ids.long()[None])
        values = (output.logits if head is None else output.last_hidden_state @ head.T)[0, :, 0]
        parts.append(values[prompt_length(sample) - 1 : len(sample.token_ids) - 1])
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_those_of_a_token_classifier(checkpoints, processes, kind):
    samples = make_samples(12)
    critic = make_critic(checkpoints[kind], processes)
    packed = critic.score([pack(samples)])[0]
    single = torch.cat(critic.score([pack([sample]) for sample in samples]))
    with torch.no_grad():
        if kind in CLASSIFIERS:
            expected = transformers_values(load_classifier(checkpoints[kind]), samples)
        else:  # Transformers has no classifier of the family.
            head = load_file(checkpoints[kind] / "model.safetensors")["score.weight"].float()
            expected = transformers_values(load_without_head(checkpoints[kind]), samples, head)
    assert float(expected.std()) > 0.1
    # Of gated delta layers transformers' values are up to 4e-5 from float64, and these 2e-5.
    tolerance = 1e-4 if kind == "qwen3_next" else 2e-5
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(single, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("kind", ["qwen2, tied", "llama", "qwen3_moe"])
def test_one_update_equals_that_of_a_token_classifier(tmp_path, checkpoints, processes, kind):
    samples = make_samples(12, all_in_loss=True)
    critic = make_critic(checkpoints[kind], processes)
    batch = pack(samples)
    old_values = critic.score([batch])[0] + torch.linspace(-0.4, 0.4, int(batch.targets.response_mask.sum()))
    returns = torch.sin(torch.arange(len(old_values)).float())
    metrics = critic.update([ValueBatch(batch, old_values, returns)], ValueLoss(clip=0.2))
    model = load_classifier(checkpoints[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0)
    loss = value_loss(transformers_values(model, samples), old_values, returns, 0.2).loss.mean()
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    optimizer.step()
    assert metrics["critic/value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert 0.1 < metrics["critic/clip_share"] < 0.9
    model.save_pretrained(tmp_path / "expected")
    updated = dict(pair for bucket in critic.weights(1 << 20) for pair in bucket)
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert updated.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(
            updated[name], parameter, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_value_model_is_bit_equal_when_it_is_loaded_again(tmp_path, checkpoints, processes, kind):
    critic = make_critic(checkpoints[kind], processes)
    save_hf_checkpoint(critic, tmp_path / "export")
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoints[kind], tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    if kind in CLASSIFIERS:
        load_classifier(tmp_path / "export")
    else:
        load_without_head(tmp_path / "export")
    batch = pack(make_samples(5))
    assert torch.equal(make_critic(tmp_path / "export", processes).score([batch])[0], critic.score([batch])[0])


@pytest.mark.parametrize("tied", [False, True])
def test_a_policy_becomes_a_value_model_with_a_head_of_zeros(tmp_path, processes, tied):
    path = make_model(tmp_path / "policy", tied=tied)
    critic = make_critic(path, processes)
    batch = pack(make_samples(7))
    values = critic.score([batch])[0]
    assert values.dtype is torch.float32
    assert values.shape == (int(batch.targets.response_mask.sum()),)
    assert not values.any()
    returns = torch.ones_like(values)
    for _ in range(2):
        metrics = critic.update([ValueBatch(batch, values, returns)], ValueLoss())
    save_hf_checkpoint(critic, tmp_path / "export")
    stored, exported = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "export"))
    assert exported.keys() == (stored.keys() - {"lm_head.weight"}) | {"score.weight"}
    assert exported["score.weight"].shape == (1, 48)
    assert not torch.equal(exported["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert 0 < metrics["critic/value_mean"] < 1
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    with torch.no_grad():
        expected = transformers_values(load_classifier(tmp_path / "export"), make_samples(7))
    torch.testing.assert_close(critic.score([batch])[0], expected, rtol=1e-5, atol=1e-5)


def test_a_bias_is_kept_where_the_checkpoint_has_one(tmp_path, processes):
    path = make_value_model(make_model(tmp_path / "model", tied=True))
    plain = make_critic(path, processes)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "score.bias": torch.tensor([0.75])}, path / "model.safetensors", metadata={"format": "pt"})
    biased = make_critic(path, processes)
    batch = pack(make_samples(5))
    torch.testing.assert_close(biased.score([batch])[0], plain.score([batch])[0] + 0.75)
    save_hf_checkpoint(biased, tmp_path / "export")
    assert load_classifier(tmp_path / "export").score.bias.item() == 0.75


def test_values_in_bf16_are_not_rounded_to_it(tmp_path, processes):
    critic = make_critic(make_value_model(make_model(tmp_path / "model", tied=True)), processes, "bf16")
    values = critic.score([pack(make_samples(5))])[0]
    assert values.dtype is torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_a_head_for_several_labels_is_refused(tmp_path, processes):
    path = make_value_model(make_model(tmp_path / "model", tied=True))
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "score.weight": torch.ones(2, 48)}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"score\.weight \(2, 48\) instead of \(1, 48\)"):
        make_critic(path, processes)


def test_families_name_the_token_classifiers_that_transformers_has():
    named = {name for name, family in families().items() if family.has_token_classifier}
    assert named == families().keys() & dict(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES).keys()
