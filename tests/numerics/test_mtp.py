"""What a layer of multi-token prediction computes, and its gradients, are those of transformers in float64; what is
exported drafts there."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer, MtpModel

from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.errors import InputError
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.models.hf_checkpoint import HfCheckpoint
from tests.distributed.three_updates import relative_error
from tests.distributed.tiny import (
    DELTA_MODELS,
    add_trainable_mtp_layer,
    has_delta,
    make_deepseek_v3_model,
    make_glm4_moe_model,
    make_qwen3_model,
    make_samples,
)

from .test_lora import transformers_names
from .test_policy_against_transformers import pack

MODELS = {"deepseek_v3": make_deepseek_v3_model, "glm4_moe": make_glm4_moe_model}
MODELS |= DELTA_MODELS if has_delta() else {}
IN_MTP = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "post_norm",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "post_norm",
}


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


def make_policy(model, processes):
    return MegatronPolicy(
        ModelConfig(path=str(model), dtype="fp32", train_mtp=True),
        ParallelConfig(),
        OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0, clip_grad=0.0),
        processes,
        temperature=1.0,
        updates_per_step=1,
        num_steps=40,
    )


def in_transformers(folder, dtype):
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    # Where it looks for the layer; it knows the numbers of the published models' layers.
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\."]
    return main


def of_layer(tensors):
    """The tensors of a whole checkpoint that are of the layer, by the names that transformers gives them."""
    named = {}
    for name, tensor in tensors.items():
        begin = next((start for start in ("mtp.layers.0.", "model.layers.4.", "mtp.") if name.startswith(start)), "")
        rest = name.removeprefix(begin)
        if begin and rest not in ("embed_tokens.weight", "shared_head.head.weight"):
            own = IN_MTP.get(rest.removesuffix(".weight"))
            named[f"{own}.weight" if own else f"mtp_block.{rest}"] = tensor
    return transformers_names(named)


def reference(model, main):
    """Transformers' layer; of families that it has none for, made of its decoder layer."""
    if "deepseek" in main.config.model_type or "glm" in main.config.model_type:
        return MtpModel.from_pretrained(main, dtype=torch.float64).layers[0]
    decoder = main.get_decoder().layers[3]
    layer = MtpLayer(main.config, type(decoder), type(decoder.input_layernorm), 3)
    source = HfCheckpoint(model, splits_mtp=True)
    layer.load_state_dict(of_layer({name: source.tensor(name) for name in source.names()}))
    return layer.double()


def guessed_logprobs(main, layer, tokens):
    """Of each token from the third of a sequence [T]."""
    with torch.no_grad():
        hidden = main.get_decoder()(tokens[None]).last_hidden_state[:, :-1]
        embedded = main.get_input_embeddings()(tokens[None, 1:])
        positions = torch.arange(1, len(tokens))[None]
        angles = main.get_decoder().rotary_emb(embedded, positions)
    states = layer(
        embedded, hidden, position_embeddings=angles, attention_mask=None, position_ids=positions, cache=None
    )
    logprobs = torch.nn.functional.linear(states[0, :-1], main.lm_head.weight.detach()).log_softmax(-1)
    return logprobs.gather(-1, tokens[2:, None])[:, 0], logprobs.argmax(-1) == tokens[2:]


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers_in_float64(tmp_path, processes, name):
    model = add_trainable_mtp_layer(MODELS[name](tmp_path / "model"))
    main = in_transformers(model, torch.float64)
    layer = reference(model, main)
    samples = make_samples(6)
    total, right, number, in_loss = 0.0, 0, 0, 0
    for sample in samples:
        guessed, is_right = guessed_logprobs(main, layer, sample.token_ids.long())
        mask = sample.loss_mask[2:]
        total = total - (guessed * mask).sum()
        right, number = right + int((is_right & mask).sum()), number + int(mask.sum())
        in_loss += int(sample.loss_mask.sum())
    (total / in_loss).backward()
    expected = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}

    policy = make_policy(model, processes)
    metrics = policy.update([TokenBatch(pack(samples))], SupervisedLoss())
    assert metrics["policy/mtp_loss"] == pytest.approx(float(total) / number, rel=1e-5)
    assert metrics["policy/mtp_accuracy"] == pytest.approx(right / number)
    for parameter in unwrapped(policy.chunks[0]).mtp.parameters():
        parameter.data = parameter.main_grad.clone()  # What is gathered now are the gradients.
    got = of_layer({n: t.clone() for bucket in policy.selected("whole").weights(1 << 20) for n, t in bucket})
    assert expected.keys() == {name for name in got if "e_score_correction_bias" not in name}
    for name, gradient in expected.items():
        assert relative_error({name: got[name]}, {name: gradient}) < 2e-5, name


def test_what_was_trained_drafts_in_transformers(tmp_path, processes):
    model = add_trainable_mtp_layer(make_glm4_moe_model(tmp_path / "model"))
    samples = make_samples(4, all_in_loss=True)
    policy, batch = make_policy(model, processes), pack(samples)
    before = policy.update([TokenBatch(batch)], SupervisedLoss())
    for _ in range(25):
        metrics = policy.update([TokenBatch(batch)], SupervisedLoss())
    assert metrics["policy/mtp_accuracy"] > 0.9 > 0.2 > before["policy/mtp_accuracy"]
    save_hf_checkpoint(policy, tmp_path / "export")
    stored, started = HfCheckpoint(tmp_path / "export"), HfCheckpoint(model)
    assert stored.names() == started.names()
    for copy, own in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ):
        assert torch.equal(stored.tensor(f"model.layers.4.{copy}"), stored.tensor(own))
        assert not torch.equal(stored.tensor(own), started.tensor(own))
    main = in_transformers(tmp_path / "export", torch.float32)
    tokens = samples[0].token_ids.long()
    plain, drafted = (main.generate(tokens[None, :4], max_new_tokens=12, use_mtp=drafts) for drafts in (False, True))
    assert torch.equal(plain, drafted)
    _, is_right = guessed_logprobs(main, reference(model, main), tokens)
    assert float(is_right[samples[0].loss_mask[2:]].float().mean()) > 0.9


def test_a_gradient_of_it_that_is_not_finite_changes_no_weight(tmp_path, processes):
    policy = make_policy(add_trainable_mtp_layer(make_glm4_moe_model(tmp_path / "model")), processes)
    layers = unwrapped(policy.chunks[0]).mtp
    before = [parameter.clone() for parameter in policy.chunks[0].parameters()]
    layers.register_forward_hook(lambda module, given, output: output * float("nan"))
    with pytest.raises(InputError, match=r"the policy's gradient is not finite: .* gradients \(mtp\.layers\.0\.\w+"):
        policy.update([TokenBatch(pack(make_samples(4)))], SupervisedLoss())
    for parameter, value in zip(policy.chunks[0].parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_engines_get_the_policy_without_it(tmp_path, processes):
    plain = make_glm4_moe_model(tmp_path / "model")
    names = HfCheckpoint(plain).names()
    policy = make_policy(add_trainable_mtp_layer(plain), processes)
    assert {name for bucket in policy.weights(1 << 20) for name, _ in bucket} == names


def with_a_copy_of_another_shape(folder):
    model = add_trainable_mtp_layer(make_glm4_moe_model(folder))
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.4.embed_tokens.weight"] = torch.zeros(3, 3)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (with_a_copy_of_another_shape, r"has the shapes model\.layers\.4\.embed_tokens\.weight \(3, 3\) instead of"),
        (make_qwen3_model, "needs layers of multi-token prediction, which qwen3 has not; set it to false"),
        (make_glm4_moe_model, r"lacks model\.layers\.4\..* and \d+ more; set it to false, or give a model\.path"),
    ],
)
def test_models_without_the_layer_are_refused(tmp_path, processes, make, error):
    model = make(tmp_path / "model")
    with pytest.raises(InputError, match=error):
        make_policy(model, processes)
