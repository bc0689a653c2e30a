"""What only a CUDA device can show: Transformer Engine layers against the local ones, and the engine beside them."""

import pytest
import torch

from dapo_mega.batching.microbatch import pack
from dapo_mega.batching.plan import PackingLayout
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.config import AlgorithmConfig, ParallelConfig
from dapo_mega.distributed import accelerator
from tests.distributed.tiny import make_llama_model, make_mistral_model, make_samples
from tests.gpu.device_policy import DEVICE_SIZES, device_policy

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(Qwen2Config(**DEVICE_SIZES)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processes():
    from dapo_mega.megatron.processes import start_processes, stop_processes

    yield start_processes(ParallelConfig(), 0)
    stop_processes()


def packed_for(subject):
    return pack(
        flatten(make_samples(16, all_in_loss=True)),
        PackingLayout(multiple_of=subject.token_multiple),
        max_response_tokens=64,
    )


def score_and_update(subject):
    """Scores of a batch before an update, the update's metrics, and scores after it."""
    from dapo_mega.megatron.objectives import PolicyGradient, TokenBatch

    batch = packed_for(subject)
    before = subject.score([batch])[0].logprobs
    metrics = subject.update([TokenBatch(batch, before)], PolicyGradient(AlgorithmConfig()))
    return before, metrics, subject.score([batch])[0].logprobs


@pytest.fixture(scope="module")
def local(model_path, processes):
    return score_and_update(device_policy(model_path, processes, "local"))


def assert_agrees(result, local, mean_difference, grad_norm):
    before, metrics, after = result
    assert (before - local[0]).abs().mean() < mean_difference
    assert (after - local[2]).abs().mean() < mean_difference
    assert metrics["policy/grad_norm"] == pytest.approx(local[1]["policy/grad_norm"], rel=grad_norm)


def test_transformer_engine_layers_agree_with_the_local_ones(model_path, processes, local):
    pytest.importorskip("transformer_engine")
    assert_agrees(score_and_update(device_policy(model_path, processes, "transformer_engine")), local, 0.02, 0.05)


@pytest.mark.parametrize("scaling", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("params", [False, True])
def test_fp8_agrees_with_bf16_within_its_precision(model_path, processes, local, scaling, params):
    """E4M3 keeps 3 bits of mantissa: 6 % a rounding, averaged over the 256 terms of a product."""
    pytest.importorskip("transformer_engine")
    if accelerator.capability() < (9, 0):
        pytest.skip("FP8 needs Hopper or newer")
    subject = device_policy(
        model_path, processes, "transformer_engine", fp8={"scaling": scaling, "params": params, "amax_history": 16}
    )
    assert_agrees(score_and_update(subject), local, 0.1, 0.25)


@pytest.mark.parametrize("params", [False, True])
def test_delayed_scaling_has_scales_before_the_first_update(tmp_path, processes, params):
    """With a scale of 1 weights as small as these would be rounded to 0 or a few values."""
    pytest.importorskip("transformer_engine")
    if accelerator.capability() < (9, 0):
        pytest.skip("FP8 needs Hopper or newer")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**DEVICE_SIZES, initializer_range=0.001))
    torch.nn.init.normal_(model.lm_head.weight, std=3.0 / 16)  # Logits of standard deviation 3.
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    fp8 = {"scaling": "delayed", "amax_history": 16, "params": params}
    of_local = score_and_update(device_policy(tmp_path, processes, "local"))[0]
    subject = device_policy(tmp_path, processes, "transformer_engine", fp8=fp8)
    subject.score([packed_for(subject)])
    scales = input_scales(subject)
    of_delayed = score_and_update(subject)[0]
    # 0.01 with scales; 0.12 without, on the emulated device.
    assert (of_delayed - of_local).abs().mean() < 0.03
    # The same tokens show the same largest values again, to within a step of bf16: they came out of layers that had
    # scales themselves.
    assert scales
    for name, scale in input_scales(subject).items():
        assert scale == pytest.approx(scales[name], rel=2**-8), name


def input_scales(subject):
    """Of each product whose scales follow the passes before."""
    return {
        name: float(module.fp8_meta["scaling_fwd"].scale[0])
        for name, module in subject.chunks[0].named_modules()
        if "scaling_fwd" in getattr(module, "fp8_meta", {})
    }


@pytest.mark.parametrize(
    "compute",
    [
        {"recompute": "full"},
        {"recompute": "selective", "recompute_modules": ["layernorm", "mlp"]},
        {"optimizer_offload": 1.0},
        {"fused_output_layer": False},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ],
    ids=lambda compute: next(iter(compute)),
)
def test_saving_memory_changes_nothing(model_path, processes, local, compute):
    assert_agrees(score_and_update(device_policy(model_path, processes, "local", **compute)), local, 0.01, 0.01)


def test_grouped_experts_of_transformer_engine_agree_with_the_local_ones(tmp_path, processes):
    pytest.importorskip("transformer_engine")
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**DEVICE_SIZES, **experts, head_dim=64)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    names = ("local", "transformer_engine")
    local, te = (score_and_update(device_policy(tmp_path, processes, name)) for name in names)
    assert_agrees(te, local, 0.03, 0.1)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (make_llama_model, {"attention_bias": True, "mlp_bias": True}),
        (make_mistral_model, {"head_dim": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}),
    ],
    ids=["biases and llama3 rope", "window and yarn"],
)
def test_the_switches_of_dense_families_agree_with_the_local_ones(tmp_path, processes, make, changes):
    pytest.importorskip("transformer_engine")
    make(tmp_path, vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, **changes)
    names = ("local", "transformer_engine")
    exact, exact_te = (score_and_update(device_policy(tmp_path, processes, name, dtype="fp32")) for name in names)
    # A device multiplies float32 in TF32 there, which has 3 bits more than bf16.
    assert_agrees(exact_te, exact, 0.02, 0.05)
    # In bf16 two right programs differ by as much as each differs from float32.
    local, te = (score_and_update(device_policy(tmp_path, processes, name)) for name in names)
    errors = [(result[0] - exact[0]).abs().mean() for result in (local, te)]
    assert errors[1] < 1.5 * errors[0]


def test_the_embedded_engine_on_the_gpu_agrees_with_the_policy(model_path, processes):
    from dapo_mega.engines.embedded.engine import EmbeddedEngine
    from dapo_mega.types import GenerationRequest, SamplingParams

    subject = device_policy(model_path, processes, "auto")
    engine = EmbeddedEngine(model_path, torch.bfloat16, device=processes.device)
    engine.load_weights(subject.weights(1 << 20), 0)
    prompt = make_samples(1)[0].token_ids[:5].numpy()
    sampling = SamplingParams(max_new_tokens=32)
    answers = engine.generate([GenerationRequest(i, prompt, i, sampling) for i in range(8)])
    samples = flatten([single_turn(prompt, a.token_ids, a.logprobs) for a in answers])
    batch = pack(samples, PackingLayout(multiple_of=16), max_response_tokens=32)
    scored = subject.score([batch])[0].logprobs.cpu()
    sampled = batch.targets.rollout_logprobs[batch.targets.response_mask]
    assert (scored - sampled).abs().mean() < 0.05
