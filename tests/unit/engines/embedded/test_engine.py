"""The embedded engine against full forwards of the same model without a cache, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dapo_mega.data.tokenizer import build_character_tokenizer
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.engines.embedded.sampling import request_uniforms
from dapo_mega.types import GenerationRequest, NamedTensors, Response, SamplingParams
from tests.distributed.tiny import DELTA_MODELS

VOCAB = 37


def make_model(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """A random model with pronounced preferences, attending eagerly: independent of the engine's attention."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.25,
        "attn_implementation": "eager",
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**{**settings, **changes})).eval()


def make_engine(model: Qwen2ForCausalLM, max_batch_rows: int = 64, version: int = 3) -> EmbeddedEngine:
    config = Qwen2Config(**{**model.config.to_dict(), "attn_implementation": "sdpa"})
    engine = EmbeddedEngine(config, torch.float32, max_batch_rows)
    engine.load_weights([list(model.state_dict().items())], version)
    return engine


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    return make_model()


@pytest.fixture
def engine(model: Qwen2ForCausalLM) -> EmbeddedEngine:
    return make_engine(model)


def make_requests(
    lengths: Sequence[int], group_size: int, sampling: SamplingParams, seed: int = 0
) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    requests = []
    for length in lengths:
        prompt = rng.integers(0, VOCAB, size=length).astype(np.int32)
        for _ in range(group_size):
            number = len(requests)
            requests.append(GenerationRequest(100 + number, prompt.copy(), (9 << 64) | number, sampling))
    return requests


def generate(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> list[Response]:
    responses = [answer for answer in engine.generate(requests) if isinstance(answer, Response)]
    assert [r.request_id for r in responses] == [r.request_id for r in requests]
    return responses


@torch.no_grad()
def reference_logprobs(
    model: Qwen2ForCausalLM, request: GenerationRequest, response: Response, temperature: float
) -> torch.Tensor:
    """[L, V]: log-softmax at every position of the response, by one forward without a cache."""
    ids = np.concatenate([request.prompt_token_ids, response.token_ids[:-1]]).astype(np.int64)
    logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
    return torch.log_softmax(logits[len(request.prompt_token_ids) - 1 :] / temperature, dim=-1)


def assert_matches_reference(
    model: Qwen2ForCausalLM, requests: Sequence[GenerationRequest], responses: Sequence[Response]
) -> None:
    """Log-probs within 1e-5, and every token is the one that its uniform number selects."""
    for request, response in zip(requests, responses, strict=True):
        logprobs = reference_logprobs(model, request, response, request.sampling.temperature)
        tokens = torch.from_numpy(response.token_ids).long()
        expected = logprobs.gather(1, tokens[:, None])[:, 0]
        assert np.abs(response.logprobs - expected.numpy()).max() < 1e-5
        upper = logprobs.double().exp().cumsum(1).gather(1, tokens[:, None])[:, 0].numpy()
        uniforms = request_uniforms(request.seed, len(tokens))
        assert (uniforms < upper + 1e-5).all()
        assert (uniforms > upper - expected.double().exp().numpy() - 1e-5).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_tokens_equal_a_full_forward_for_mixed_prompts(
    model: Qwen2ForCausalLM, engine: EmbeddedEngine, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=24, stop_token_ids=(3, 5))
    requests = make_requests([1, 9, 4, 4, 17, 30, 2], group_size=5, sampling=sampling)
    responses = generate(engine, requests)
    assert len({len(r.token_ids) for r in responses}) > 5, "rows must finish at different times"
    assert_matches_reference(model, requests, responses)
    assert all(r.token_ids.dtype == np.int32 and r.logprobs.dtype == np.float32 for r in responses)


def test_a_cache_that_has_to_grow_keeps_its_contents(model: Qwen2ForCausalLM, engine: EmbeddedEngine) -> None:
    sampling = SamplingParams(max_new_tokens=200, stop_token_ids=(3,))
    requests = make_requests([2, 40], group_size=8, sampling=sampling)
    responses = generate(engine, requests)
    assert max(len(r.token_ids) for r in responses) > 110, "must outgrow the first buffers and random numbers"
    assert_matches_reference(model, requests, responses)


@pytest.mark.parametrize("max_batch_rows", [3, 64])
def test_sliding_window_layers_see_their_window_only(max_batch_rows: int) -> None:
    model = make_model(
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )
    sampling = SamplingParams(max_new_tokens=30, stop_token_ids=(3, 5))
    requests = make_requests([3, 8, 20], group_size=3, sampling=sampling)
    assert_matches_reference(model, requests, generate(make_engine(model, max_batch_rows), requests))


@pytest.mark.parametrize("max_batch_rows", [7, 64])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_states_of_gated_delta_layers_follow_their_rows(tmp_path: Path, kind: str, max_batch_rows: int) -> None:
    folder = DELTA_MODELS[kind](tmp_path / kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    engine = EmbeddedEngine(folder, max_batch_rows=max_batch_rows)
    engine.load_weights([list(load_file(folder / "model.safetensors").items())], 3)
    sampling = SamplingParams(max_new_tokens=24, stop_token_ids=(3, 5, 7, 8))
    requests = make_requests([1, 9, 4, 70, 17, 2], group_size=4, sampling=sampling)
    responses = generate(engine, requests)
    assert len({len(r.token_ids) for r in responses}) > 5, "rows must finish at different times"
    assert_matches_reference(model, requests, responses)


def test_eager_attention_works_as_well(model: Qwen2ForCausalLM) -> None:
    engine = EmbeddedEngine(make_model(seed=8).config)
    engine.load_weights([list(model.state_dict().items())], 0)
    requests = make_requests([3, 8, 20], group_size=2, sampling=SamplingParams(max_new_tokens=10))
    assert_matches_reference(model, requests, generate(engine, requests))


def test_prompts_are_prefilled_in_slices_of_bounded_size(
    model: Qwen2ForCausalLM, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapo_mega.engines.embedded.decoding._PREFILL_TOKENS", 24)
    sizes: list[int] = []
    assert engine._model is not None
    engine._model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    requests = make_requests([3, 8, 20, 30, 4, 5, 8, 8], group_size=2, sampling=SamplingParams(max_new_tokens=6))
    assert_matches_reference(model, requests, generate(engine, requests))
    assert sizes[:5] == [15, 24, 20, 30, 16]


def test_the_output_layer_multiplies_the_rows_of_all_prompts_at_once(engine: EmbeddedEngine) -> None:
    shapes: list[tuple[torch.Size, bool]] = []
    assert engine._model is not None
    engine._model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: shapes.append((given[0].shape, given[0].is_contiguous()))
    )
    generate(engine, make_requests([5, 8, 8], group_size=2, sampling=SamplingParams(max_new_tokens=3)))
    # Of a view torch multiplies each row alone, with a copy of the weight for each.
    assert shapes[0] == (torch.Size([3, 1, 32]), True)
    assert all(is_contiguous for _, is_contiguous in shapes)


@pytest.mark.parametrize("max_batch_rows", [1, 7, 64])
def test_a_response_does_not_depend_on_the_rest_of_the_batch(
    model: Qwen2ForCausalLM, engine: EmbeddedEngine, max_batch_rows: int
) -> None:
    sampling = SamplingParams(max_new_tokens=40, stop_token_ids=(3,))
    requests = make_requests([5, 1, 12, 5, 7, 20], group_size=4, sampling=sampling)
    expected = {request.request_id: generate(engine, [request])[0] for request in requests}
    shuffled = [requests[i] for i in np.random.default_rng(1).permutation(len(requests))]
    for response in generate(make_engine(model, max_batch_rows), shuffled):
        alone = expected[response.request_id]
        assert response.token_ids.tolist() == alone.token_ids.tolist()
        assert np.abs(response.logprobs - alone.logprobs).max() < 1e-5


def test_requests_that_wait_take_the_places_of_finished_rows(model: Qwen2ForCausalLM) -> None:
    num_rows, decoded = 8, []
    engine = make_engine(model, num_rows)
    assert engine._model is not None
    engine._model.register_forward_pre_hook(
        lambda _, __, kwargs: decoded.append(len(kwargs["input_ids"])) if kwargs["input_ids"].shape[1] == 1 else None,
        with_kwargs=True,
    )
    # The longest come first, and each prompt is longer than what the rows before it need.
    limits = [30, *np.random.default_rng(2).integers(1, 12, 39)]
    requests = [
        replace(request, sampling=SamplingParams(max_new_tokens=int(limit)))
        for request, limit in zip(make_requests(range(2, 202, 5), 1, SamplingParams()), limits, strict=True)
    ]
    assert_matches_reference(model, requests, generate(engine, requests))
    assert max(decoded) <= num_rows
    # No step is more than those of full batches and of the longest row.
    assert len(decoded) <= sum(limits) // num_rows + max(limits)


@pytest.mark.parametrize("num_rows", [32, 8])
def test_a_refill_prefills_whole_groups(model: Qwen2ForCausalLM, num_rows: int) -> None:
    prefilled: list[int] = []
    engine = make_engine(model, num_rows)
    assert engine._model is not None
    engine._model.register_forward_pre_hook(
        lambda _, __, kwargs: prefilled.append(len(kwargs["input_ids"])) if kwargs["input_ids"].shape[1] > 1 else None,
        with_kwargs=True,
    )
    sampling = SamplingParams(max_new_tokens=40, stop_token_ids=(3, 5))
    requests = make_requests([*range(2, 32)], 4, sampling)
    assert_matches_reference(model, requests, generate(engine, requests))
    assert prefilled[0] == num_rows // 4
    assert sum(prefilled) == 30
    assert prefilled.count(num_rows // 4) < 4


def test_a_batch_whose_rows_end_together_starts_anew(model: Qwen2ForCausalLM) -> None:
    requests = make_requests([20, 3, 30, 5, 9], 1, SamplingParams(max_new_tokens=6))
    assert_matches_reference(model, requests, generate(make_engine(model, 2), requests))


def test_the_seed_alone_tells_members_of_a_group_apart(engine: EmbeddedEngine) -> None:
    [request] = make_requests([6], 1, SamplingParams(max_new_tokens=16))
    twin = replace(request, request_id=7)
    other = replace(request, request_id=8, seed=request.seed + 1)
    first, second, third = generate(engine, [request, twin, other])
    assert first.token_ids.tolist() == second.token_ids.tolist() != third.token_ids.tolist()


def test_requests_with_different_sampling_share_a_call(model: Qwen2ForCausalLM, engine: EmbeddedEngine) -> None:
    requests = make_requests([6, 3], 4, SamplingParams(max_new_tokens=12))
    choices = [
        SamplingParams(max_new_tokens=12),
        SamplingParams(max_new_tokens=3),
        SamplingParams(max_new_tokens=12, temperature=0.5),
        SamplingParams(max_new_tokens=12, top_k=1),
    ]
    requests = [replace(request, sampling=choices[i % 4]) for i, request in enumerate(requests)]
    responses = generate(engine, requests)
    assert [len(r.token_ids) for r in responses] == [12, 3, 12, 12] * 2
    for i in (3, 7):
        most_probable = reference_logprobs(model, requests[i], responses[i], 1.0).argmax(1)
        assert responses[i].token_ids.tolist() == most_probable.tolist()
    plain = [0, 1, 2, 4, 5, 6]
    assert_matches_reference(model, [requests[i] for i in plain], [responses[i] for i in plain])


def test_rows_decoded_together_end_at_their_own_limits(model: Qwen2ForCausalLM, engine: EmbeddedEngine) -> None:
    limits = (7, 1, 30, 7, 12, 150)
    requests = [
        replace(request, sampling=SamplingParams(max_new_tokens=limit, stop_token_ids=(3,)))
        for request, limit in zip(make_requests([6, 3, 3, 9, 1, 6], 1, SamplingParams()), limits, strict=True)
    ]
    rows: list[int] = []
    assert engine._model is not None
    engine._model.register_forward_pre_hook(
        lambda _, __, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    responses = generate(engine, requests)
    assert_matches_reference(model, requests, responses)
    for response, limit in zip(responses, limits, strict=True):
        stopped = response.token_ids[-1] == 3
        assert len(response.token_ids) <= limit if stopped else len(response.token_ids) == limit
        assert response.finish_reason == ("stop" if stopped else "length")
    assert len(rows) == max(len(response.token_ids) for response in responses)
    assert sum(rows[1:]) == sum(len(response.token_ids) - 1 for response in responses)


def test_bf16_logprobs_are_as_near_to_float32_as_those_of_a_full_forward() -> None:
    """Attention of the cache in bfloat16 must not round its scores: sharp heads would tell engine and trainer apart."""
    model = make_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name:
                parameter.mul_(6)
    narrow = make_model().to(torch.bfloat16)
    narrow.load_state_dict(model.state_dict())
    engine = EmbeddedEngine(Qwen2Config(**{**model.config.to_dict(), "attn_implementation": "sdpa"}), torch.bfloat16)
    engine.load_weights([list(narrow.state_dict().items())], 0)
    narrow.set_attn_implementation("sdpa")
    rounded = make_model()
    rounded.load_state_dict(narrow.state_dict())
    requests = make_requests([1, 9, 20, 30], 8, SamplingParams(max_new_tokens=60))
    ours, full = [], []
    for request, response in zip(requests, generate(engine, requests), strict=True):
        tokens = torch.from_numpy(response.token_ids).long()[:, None]
        exact = reference_logprobs(rounded, request, response, 1.0).gather(1, tokens)[:, 0]
        trained = reference_logprobs(narrow, request, response, 1.0).float().gather(1, tokens)[:, 0]
        ours.append((torch.from_numpy(response.logprobs) - exact).abs())
        full.append((trained - exact).abs())
    assert torch.cat(ours).mean() < 1.1 * torch.cat(full).mean()


def test_ids_that_the_tokenizer_lacks_are_not_sampled(engine: EmbeddedEngine) -> None:
    free = make_requests([6, 3], 8, SamplingParams(max_new_tokens=20))
    largest = max(int(response.token_ids.max()) for response in generate(engine, free))
    padded = [replace(request, sampling=SamplingParams(max_new_tokens=20, num_tokens=largest)) for request in free]
    assert max(int(response.token_ids.max()) for response in generate(engine, padded)) < largest


def test_a_stop_token_ends_a_response_and_belongs_to_it(engine: EmbeddedEngine) -> None:
    stops = (3, 11)
    requests = make_requests([6, 3], 16, SamplingParams(max_new_tokens=20, stop_token_ids=stops))
    free = [replace(r, sampling=SamplingParams(max_new_tokens=20)) for r in requests]
    reasons = set()
    for stopped, full in zip(generate(engine, requests), generate(engine, free), strict=True):
        hits = np.flatnonzero(np.isin(full.token_ids, stops))
        length = int(hits[0]) + 1 if len(hits) else 20
        assert stopped.token_ids.tolist() == full.token_ids[:length].tolist()
        assert stopped.finish_reason == ("stop" if len(hits) else "length")
        assert full.finish_reason == "length"
        assert len(stopped.logprobs) == length
        reasons.add(stopped.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_stop_token_at_the_limit_is_a_stop(engine: EmbeddedEngine) -> None:
    [request] = make_requests([6], 1, SamplingParams(max_new_tokens=5))
    last = int(generate(engine, [request])[0].token_ids[-1])
    [response] = generate(engine, [replace(request, sampling=SamplingParams(max_new_tokens=5, stop_token_ids=(last,)))])
    assert response.finish_reason == "stop"


def test_a_text_of_several_tokens_ends_a_response_and_belongs_to_it(model: Qwen2ForCausalLM, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    tokenizer = build_character_tokenizer(map(chr, range(97, 93 + VOCAB)))
    tokenizer.save_pretrained(tmp_path)
    engine = EmbeddedEngine(tmp_path, max_batch_rows=5)  # Rows end at different times, and others take their places.
    engine.load_weights([list(model.state_dict().items())], 0)
    free = make_requests([6, 3, 9], 6, SamplingParams(max_new_tokens=40))
    texts = [tokenizer.decode(response.token_ids) for response in generate(engine, free)]
    stops = (texts[0][10:13], texts[1][20:22], "never", texts[2][-2:])
    sampling = SamplingParams(max_new_tokens=40, stop=stops, stop_token_ids=(5,))
    requests = [replace(request, sampling=sampling) for request in free]
    ends = set()
    for stopped, full in zip(generate(engine, requests), generate(engine, free), strict=True):
        prefixes = [tokenizer.decode(full.token_ids[: n + 1]) for n in range(40)]
        hits = [n for n, text in enumerate(prefixes) if full.token_ids[n] == 5 or any(stop in text for stop in stops)]
        length = hits[0] + 1 if hits else 40
        assert stopped.token_ids.tolist() == full.token_ids[:length].tolist()
        assert np.abs(stopped.logprobs - full.logprobs[:length]).max() < 1e-5
        assert stopped.finish_reason == ("stop" if hits else "length")
        ends |= {stop for stop in stops if stop in prefixes[length - 1]} if hits else {"length"}
    assert len(ends) > 1


def test_greedy_equals_generate(model: Qwen2ForCausalLM, engine: EmbeddedEngine) -> None:
    requests = make_requests([6, 3, 11], 1, SamplingParams(temperature=0, max_new_tokens=25))
    for request, response in zip(requests, generate(engine, requests), strict=True):
        prompt = torch.from_numpy(request.prompt_token_ids).long()[None]
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=25,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert response.token_ids.tolist() == output[0, prompt.shape[1] :].tolist()
        logprobs = reference_logprobs(model, request, response, temperature=1.0)
        assert np.abs(response.logprobs - logprobs.max(1).values.numpy()).max() < 1e-5


def test_prompts_are_prefilled_once_and_finished_rows_are_free(engine: EmbeddedEngine) -> None:
    shapes: list[tuple[int, ...]] = []
    num_logits: list[int] = []
    assert engine._model is not None
    engine._model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine._model.register_forward_hook(lambda _, __, output: num_logits.append(output.logits.shape[1]))
    requests = make_requests([6, 3, 11, 11], 6, SamplingParams(max_new_tokens=40, stop_token_ids=(3, 5)))
    responses = generate(engine, requests)
    assert shapes[0] == (4, 11)
    assert set(num_logits) == {1}
    # The first token comes from the prefill, each further one from one row of one forward.
    assert sum(rows for rows, _ in shapes[1:]) == sum(len(r.token_ids) - 1 for r in responses)


def test_no_requests_give_no_responses(engine: EmbeddedEngine) -> None:
    assert engine.generate([]) == []


def test_requests_that_cannot_be_served_are_named_before_anything_runs(engine: EmbeddedEngine) -> None:
    good, *bad = make_requests([4, 4, 4, 4, 4, 250], 1, SamplingParams(max_new_tokens=10))
    bad[0] = replace(bad[0], prompt_token_ids=np.array([], dtype=np.int32))
    bad[1] = replace(bad[1], prompt_token_ids=np.array([1, VOCAB], dtype=np.int32))
    bad[2] = replace(bad[2], prompt_token_ids=np.array([1, -1], dtype=np.int32))
    bad[3] = replace(bad[3], sampling=SamplingParams(max_new_tokens=0))
    assert engine._model is not None
    engine._model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match="cannot be served") as error:
        engine.generate([good, *bad])
    message = str(error.value)
    assert all(f"{request.request_id}" in message for request in bad)
    assert str(good.request_id) not in message
    for reason in ("empty prompt", "vocabulary of 37", "max_new_tokens below 1", "max_position_embeddings=256"):
        assert reason in message


def test_a_request_may_use_all_positions(engine: EmbeddedEngine) -> None:
    requests = make_requests([250], 1, SamplingParams(max_new_tokens=6))
    assert len(generate(engine, requests)[0].token_ids) == 6


def test_an_engine_without_weights_refuses_to_generate(model: Qwen2ForCausalLM) -> None:
    random_state = torch.get_rng_state()
    engine = EmbeddedEngine(model.config)
    assert torch.equal(torch.get_rng_state(), random_state), "the trainer's random numbers must not be used up"
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="no weights have been loaded"):
        engine.generate(make_requests([4], 1, SamplingParams()))


def test_from_config_reads_a_folder(model: Qwen2ForCausalLM, engine: EmbeddedEngine, tmp_path: Any) -> None:
    model.config.save_pretrained(tmp_path)
    other = EmbeddedEngine(str(tmp_path))
    other.load_weights([list(model.state_dict().items())], 0)
    requests = make_requests([4], 3, SamplingParams(max_new_tokens=8))
    for mine, theirs in zip(generate(engine, requests), generate(other, requests), strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()


def test_new_weights_replace_the_old_ones_with_their_version(engine: EmbeddedEngine) -> None:
    requests = make_requests([4, 7], 3, SamplingParams(max_new_tokens=8))
    assert {r.weight_version for r in generate(engine, requests)} == {3}
    successor = make_model(seed=1)
    # One tensor per bucket, in another precision than the engine's.
    engine.load_weights(([(name, t.double())] for name, t in successor.state_dict().items()), version=4)
    responses = generate(engine, requests)
    assert {r.weight_version for r in responses} == {engine.weight_version} == {4}
    assert_matches_reference(successor, requests, responses)


def without(model: Qwen2ForCausalLM, *names: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in model.state_dict().items() if name not in names]


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_name_of_a_tied_pair_suffices(left_out: str) -> None:
    successor = make_model(seed=1)
    engine = make_engine(make_model())
    engine.load_weights([without(successor, left_out)], 4)
    requests = make_requests([4], 2, SamplingParams(max_new_tokens=8))
    assert_matches_reference(successor, requests, generate(engine, requests))


def test_an_untied_head_is_a_weight_of_its_own() -> None:
    model = make_model(tie_word_embeddings=False)
    engine = make_engine(model)
    requests = make_requests([4], 2, SamplingParams(max_new_tokens=8))
    assert_matches_reference(model, requests, generate(engine, requests))
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        engine.load_weights([without(model, "lm_head.weight")], 4)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("extra", "left_out", "message"),
    [
        ([("model.nrom.weight", torch.ones(32))], (), r"'model\.nrom\.weight' is unknown"),
        ([(NORM, torch.ones(31))], (NORM,), r"'model\.norm\.weight' has shape \(31,\), expected \(32,\)"),
        ([(NORM, torch.ones(32, dtype=torch.int64))], (NORM,), r"'model\.norm\.weight' has dtype torch\.int64"),
        ([(NORM, torch.ones(32))], (), r"'model\.norm\.weight' was given twice"),
        ([("lm_head.weight", torch.ones(VOCAB, 32))], ("lm_head.weight",), r"'lm_head\.weight' differs"),
        ([], (NORM, "model.layers.1.mlp.up_proj.weight"), r"2 of 27 .*layers\.1\.mlp\.up_proj\.weight, model\.norm"),
    ],
)
def test_a_wrong_stream_is_refused_and_the_engine_with_it(
    model: Qwen2ForCausalLM, engine: EmbeddedEngine, extra: NamedTensors, left_out: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.load_weights([without(model, *left_out), extra], 4)
    requests = make_requests([4], 1, SamplingParams(max_new_tokens=4))
    with pytest.raises(RuntimeError, match="version 4 did not complete"):
        engine.generate(requests)


def test_an_engine_refuses_after_a_broken_stream_until_a_full_load(
    model: Qwen2ForCausalLM, engine: EmbeddedEngine
) -> None:
    def broken() -> Iterator[NamedTensors]:
        yield list(model.state_dict().items())[:5]
        raise ConnectionError("lost")

    with pytest.raises(ConnectionError):
        engine.load_weights(broken(), 4)
    assert engine.weight_version == -1
    requests = make_requests([4], 1, SamplingParams(max_new_tokens=4))
    with pytest.raises(RuntimeError, match="version 4 did not complete"):
        engine.generate(requests)
    engine.load_weights([list(model.state_dict().items())], 5)
    assert generate(engine, requests)[0].weight_version == 5


def test_weights_that_are_not_finite_yield_an_error_and_no_tokens(
    model: Qwen2ForCausalLM, engine: EmbeddedEngine
) -> None:
    broken = [(name, torch.full_like(t, torch.nan) if name == NORM else t) for name, t in model.state_dict().items()]
    engine.load_weights([broken], 4)
    with pytest.raises(FloatingPointError):
        engine.generate(make_requests([4], 1, SamplingParams(max_new_tokens=4)))


def test_a_closed_engine_refuses_everything(model: Qwen2ForCausalLM, engine: EmbeddedEngine) -> None:
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(make_requests([4], 1, SamplingParams()))
    with pytest.raises(RuntimeError, match="closed"):
        engine.load_weights([list(model.state_dict().items())], 4)


def test_layers_without_keys_and_values_are_refused() -> None:
    model = make_model()
    model.config.layer_types = ["mamba", "full_attention"]
    with pytest.raises(ValueError, match="mamba"):
        EmbeddedEngine(model.config)
