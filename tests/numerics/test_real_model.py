"""A real language model (SmolLM2): converted, scored and sampled as by transformers, and exported bit by bit."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_mega.batching import microbatch
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.config import ComputeConfig, ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.types import GenerationRequest, SamplingParams

MODEL = os.environ.get("DAPO_MEGA_REAL_MODEL", "")
pytestmark = pytest.mark.skipif(not MODEL, reason="set DAPO_MEGA_REAL_MODEL to what tools/make_real_model.py has made")
NEW_TOKENS = 24
NEAR_TIE = 1e-3  # Between the two likeliest tokens, in nats: which of them is first is a matter of rounding.


@pytest.fixture(scope="module")
def processes():
    yield start_processes(ParallelConfig(), 0)
    stop_processes()


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asked = [f"What is {a} times {b}?" for a in range(2, 7) for b in range(2, 7)]
    asked += [f"Tell me about the {thing}." for thing in ("sea", "moon", "wind", "city", "past")]
    asked += ["Où est la gare ?", "什么是光？", "Was ist x² + 1? \\frac{1}{2}", "مرحبا", "🙂🙂"]
    asked += [f"Write a line that begins with {letter}." for letter in "ABCDEFGHIJKLMNO"]
    assert len(asked) == 50
    chats = [[{"role": "user", "content": text}] for text in asked]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


def make_policy(processes, dtype):
    model = ModelConfig(path=MODEL, dtype=dtype)
    optimizer = OptimizerConfig(learning_rate=1e-5, warmup_steps=0)
    sizes = {"temperature": 1.0, "updates_per_step": 1, "num_steps": 1}
    return MegatronPolicy(model, ParallelConfig(), optimizer, processes, compute=ComputeConfig(), **sizes)


def test_an_export_is_the_model_bit_by_bit(processes, tmp_path):
    save_hf_checkpoint(make_policy(processes, "bf16"), tmp_path / "exported")
    original = load_file(f"{MODEL}/model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template


def test_greedy_answers_are_those_of_transformers_which_the_policy_scores_alike(processes, reference, prompts):
    engine = EmbeddedEngine(MODEL)
    engine.load_weights([list(reference.state_dict().items())], version=0)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, stop_token_ids=())
    requests = [GenerationRequest(i, np.array(ids, np.int32), i, sampling) for i, ids in enumerate(prompts)]
    answers = [torch.from_numpy(response.token_ids).long() for response in engine.generate(requests)]
    samples = [single_turn(torch.tensor(ids), answer.tolist()) for ids, answer in zip(prompts, answers, strict=True)]
    scored = make_policy(processes, "fp32").score([microbatch.pack(flatten(samples), max_response_tokens=NEW_TOKENS)])
    largest = 0.0
    for number, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        with torch.inference_mode():
            logits = reference(torch.tensor([*ids, *answer.tolist()])[None]).logits[0, len(ids) - 1 : -1]
        two, likeliest = logits.topk(2)
        for place, is_tie in enumerate((two[:, 0] - two[:, 1] < NEAR_TIE).tolist()):
            assert answer[place] in (likeliest[place] if is_tie else likeliest[place, :1]), (number, place)
        expected = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        ours = scored[0].logprobs[number * NEW_TOKENS : (number + 1) * NEW_TOKENS]
        largest = max(largest, (ours - expected).abs().max().item())
    print(f"largest difference of log-probs: {largest:.1e}")
    assert largest < 1e-4
