"""A real language model (SmolLM2): converted, scored and sampled as by transformers, and exported bit by bit."""

import os
from dataclasses import replace

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
from tests.integration.sglang_servers import call, serving_engines, sglang_python

MODEL = os.environ.get("DAPO_MEGA_REAL_MODEL", "")
pytestmark = pytest.mark.skipif(not MODEL, reason="set DAPO_MEGA_REAL_MODEL to what tools/make_real_model.py has made")
NEW_TOKENS = 16
NUM_STOPPED = 12
"""Prompts that are answered again with texts that end a response, which half of the answers have."""
NUM_SCORED = 20
"""Answers that the policy scores."""
# Between the likeliest tokens, in nats: which of them is first is a matter of rounding.
NEAR_TIE = {"fp32": 1e-3, "bf16": 0.5}
REFERENCES: dict = {}
"""Of what was asked before: the log-probs of an answer's tokens, and by how much the likeliest are above."""


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


def checked_logprobs(reference, prompts, answers, dtype="fp32"):
    """transformers' log-probs of the answers' tokens, each of which was seen to be its likeliest."""
    logprobs, gaps = [], []
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NEW_TOKENS
        if (dtype, *ids, *answer) not in REFERENCES:  # Two engines answer most prompts alike.
            with torch.inference_mode():
                logits = reference(torch.tensor([*ids, *answer])[None]).logits[0, len(ids) - 1 : -1].float()
            found = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
            REFERENCES[dtype, *ids, *answer] = found, logits.log_softmax(-1).amax(-1) - found
        found, gap = REFERENCES[dtype, *ids, *answer]
        logprobs.append(found)
        gaps.append(gap)
    others = torch.cat(gaps)[torch.cat(gaps) > 0]
    print(f"{len(others)} of {len(torch.cat(gaps))} tokens are not the likeliest: {others.sort().values.tolist()} nats")
    assert torch.cat(gaps).max() < NEAR_TIE[dtype]
    return torch.cat(logprobs)


def cut(tokenizer, answer, stops):
    """The answer up to the token with which it has one of these texts."""
    ends = (n for n in range(1, len(answer)) if any(stop in tokenizer.decode(answer[:n]) for stop in stops))
    return answer[: next(ends, len(answer))]


def texts_within(tokenizer, answers):
    """Texts that begin and end within the answers' tokens or between them, most of them of several."""
    return tuple(tokenizer.decode(answer)[start : start + 9] for start, answer in enumerate(answers[:NUM_STOPPED:2], 9))


def test_greedy_answers_are_those_of_transformers_which_the_policy_scores_alike(processes, reference, prompts):
    engine = EmbeddedEngine(MODEL, max_batch_rows=20)
    engine.load_weights([list(reference.state_dict().items())], version=0)
    tokenizer, sampling = AutoTokenizer.from_pretrained(MODEL), SamplingParams(0.0, max_new_tokens=NEW_TOKENS)
    requests = [GenerationRequest(i, np.array(ids, np.int32), i, sampling) for i, ids in enumerate(prompts)]
    answers = [response.token_ids.tolist() for response in engine.generate(requests)]
    stops = texts_within(tokenizer, answers)
    stopped = engine.generate([replace(r, sampling=replace(sampling, stop=stops)) for r in requests[:NUM_STOPPED]])
    assert [r.token_ids.tolist() for r in stopped] == [
        cut(tokenizer, answer, stops) for answer in answers[:NUM_STOPPED]
    ]
    assert sum(r.finish_reason == "stop" for r in stopped) >= NUM_STOPPED // 2
    pairs = list(zip(prompts, answers, strict=True))[:NUM_SCORED]
    samples = [single_turn(torch.tensor(ids), answer) for ids, answer in pairs]
    scored = make_policy(processes, "fp32").score([microbatch.pack(flatten(samples), max_response_tokens=NEW_TOKENS)])
    expected = checked_logprobs(reference, prompts, answers)
    largest = (scored[0].logprobs - expected[: len(scored[0].logprobs)]).abs().max().item()
    print(f"largest difference of log-probs: {largest:.1e}")
    assert largest < 1e-4


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.whole_table)])
def test_a_sglang_engine_answers_greedily_as_transformers(reference, prompts, tmp_path, dtype):
    sglang_python()  # Skips without one.
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with serving_engines(MODEL, tmp_path, 1, "--dtype", dtype, "--with-text") as launcher:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        answers = call(launcher.urls[0], "/generate", body)[1]
        tokens = [answer["output_ids"] for answer in answers]
        stops = texts_within(tokenizer, tokens)
        body |= {"input_ids": prompts[:NUM_STOPPED], "sampling_params": {**sampling, "stop": list(stops)}}
        stopped = call(launcher.urls[0], "/generate", body)[1]
    if dtype == "bf16":
        reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    expected = checked_logprobs(reference, prompts, tokens, dtype)
    if dtype == "fp32":  # Other rows in a batch of bf16 are other roundings.
        assert [answer["output_ids"] for answer in stopped] == [
            cut(tokenizer, ids, stops) for ids in tokens[:NUM_STOPPED]
        ]
    assert [len(a["meta_info"]["output_token_logprobs"]) for a in stopped] == [len(a["output_ids"]) for a in stopped]
    assert sum(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in stopped) >= NUM_STOPPED // 2
    found = [triple[0] for answer in answers for triple in answer["meta_info"]["output_token_logprobs"]]
    largest = (torch.tensor(found) - expected).abs().max().item()
    print(f"largest difference of log-probs: {largest:.1e}")
    assert largest < NEAR_TIE[dtype]
