"""Builds the bodies of SGLang's /generate calls and checks the answers. Sends nothing."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pybase64

from dapo_mega.engines.sglang.versions import VersionRange, WeightVersion
from dapo_mega.engines.sglang.weight_protocol import PACKED_LOGPROBS
from dapo_mega.models import Architecture
from dapo_mega.types import (
    FinishReason,
    GenerationRequest,
    LogProbs,
    Response,
    Routes,
    SamplingParams,
    TokenIds,
    extend_spans,
    no_routes,
)

Fault = Literal["malformed", "token_count", "vocabulary", "logprobs", "version", "routes"]
"""What is wrong with an answer: its form, its number of tokens, ids outside of the vocabulary, log-probs that are
missing or impossible, the version of the weights that sampled it, or the experts of its tokens."""

_ANY_TOKEN = -1
_MAX_ROUNDING = 1e-4  # A log-prob near 0 may be rounded to this much above 0.
_INTEGERS, _NUMBERS, _NUMBERS_OR_NULL = {int}, {int, float}, {int, float, type(None)}


class MalformedAnswer(Exception):
    """An engine's answer that must not be used. `foreign`: the other run's weights that sampled part of it."""

    def __init__(self, fault: Fault, reason: str, foreign: WeightVersion | None = None) -> None:
        super().__init__(reason)
        self.fault = fault
        self.foreign = foreign


@contextmanager
def _engines_fault() -> Iterator[None]:
    """Raise MalformedAnswer for whatever an answer of another form makes Python raise."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise MalformedAnswer("malformed", f"it cannot be read: {str(error)[:100]}") from error


@dataclass(frozen=True, eq=False)
class Completion:
    """What one call of the engine at `url` generated: `token_ids` [L] and `logprobs` [L]. `version_spans` are (weight
    version, end) with ascending ends, the last of them L. After `abort` the response is incomplete."""

    token_ids: TokenIds
    logprobs: LogProbs
    finish: Literal["stop", "length", "abort"]
    version_spans: tuple[tuple[int, int], ...]
    url: str = ""
    routes: Routes = field(default_factory=no_routes)


@dataclass(frozen=True)
class RouteSizes:
    """Of the policy: its layers, those of them with experts, and how many of how many experts a token goes to."""

    num_layers: int
    layers: tuple[int, ...]
    per_token: int
    experts: int

    @classmethod
    def of(cls, arch: Architecture) -> RouteSizes | None:
        """None of a dense model."""
        layers = tuple(filter(arch.has_experts, range(arch.num_layers)))
        return cls(arch.num_layers, layers, arch.experts.per_token, arch.experts.number) if arch.experts else None

    def num_bytes(self, request: GenerationRequest) -> int:
        """The most that the experts of a request's tokens take in an answer: base64 of int32."""
        longest = len(request.prompt_token_ids) + request.sampling.max_new_tokens
        return 0 if request.routes_from is None else longest * self.num_layers * self.per_token * 16 // 3 + 4


def generate_payload(
    request: GenerationRequest, parts: Sequence[Completion], rid: str, adapter: str = ""
) -> dict[str, Any]:
    """The body of the /generate call that continues after `parts`; `rid` names the call for /abort_request, `adapter`
    a LoRA adapter of the engine. Its `input_ids` are an array [P]."""
    sampling = request.sampling
    prompt = np.concatenate([request.prompt_token_ids, tokens_of(parts)]) if parts else request.prompt_token_ids
    seed = hashlib.blake2b(str(request.seed).encode(), digest_size=8)
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or _ANY_TOKEN,
        "max_new_tokens": sampling.max_new_tokens - sum(len(part.token_ids) for part in parts),
        # Used only by servers with --enable-deterministic-inference.
        "sampling_seed": int.from_bytes(seed.digest(), "little") >> 1,  # 63 bits.
        "custom_params": {PACKED_LOGPROBS: True},  # Read only by servers with the plugin.
    }
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    else:
        parameters["ignore_eos"] = True
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    return {
        "rid": rid,
        "input_ids": prompt,
        "sampling_params": parameters,
        "return_logprob": True,
        **({} if (start := _routes_start(request, parts)) is None else {"return_routed_experts": True}),
        **({"routed_experts_start_len": start} if start else {}),
        **({"lora_path": adapter} if adapter else {}),
    }


def _routes_start(request: GenerationRequest, parts: Sequence[Completion]) -> int | None:
    """The first token whose experts are to be said, after those that `parts` have."""
    return None if request.routes_from is None else request.routes_from + sum(len(part.routes) for part in parts)


def scoring_payload(token_ids: TokenIds, adapter: str = "") -> dict[str, Any]:
    """The body of a /generate call that scores these tokens; SGLang also samples one more token."""
    return {
        "input_ids": token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        **({"lora_path": adapter} if adapter else {}),
    }


@_engines_fault()
def parse_scores(body: Any, token_ids: TokenIds, versions: VersionRange) -> LogProbs:
    """Log-probs [L - 1] of all tokens but the first, from the answer to `scoring_payload`; NaN where one is missing.

    `versions` are the weight versions that may have scored the tokens. Raises MalformedAnswer.
    """
    output_ids, meta_info = _fields(body)
    _version_spans(meta_info, len(output_ids), versions)
    return _prompt_logprobs(meta_info, token_ids)


@_engines_fault()
def parse_prompt_logprobs(body: Any, token_ids: TokenIds) -> LogProbs:
    """Log-probs [L - 1] of all tokens but the first, of those from `logprob_start_len` on, by whatever weights. Raises
    MalformedAnswer, also where one is missing or above 0."""
    values = _prompt_logprobs(_fields(body)[1], token_ids)
    if not (values <= _MAX_ROUNDING).all():
        raise MalformedAnswer("logprobs", "its prompt's log-probs are missing or above 0")
    return np.minimum(values, np.float32(0.0))


@_engines_fault()
def parse_prompt_top(body: Any, num_tokens: int, top_k: int) -> tuple[TokenIds, LogProbs]:
    """The `top_k` most probable tokens in place of each of `num_tokens` behind `logprob_start_len`, with log-probs,
    [num_tokens, top_k] each. Raises MalformedAnswer, also where there are not as many."""
    rows = (_fields(body)[1].get("input_top_logprobs") or [None])[1:] if top_k else [[]] * num_tokens
    name = f"its prompt's {top_k} most probable tokens"
    found = [len(row or ()) for row in rows]
    if found != [top_k] * num_tokens:
        raise MalformedAnswer("logprobs", f"{name} are missing at some of {num_tokens} tokens: it has {found[:100]}")
    if not _INTEGERS.issuperset(type(triple[1]) for row in rows for triple in row):
        raise MalformedAnswer("logprobs", f"{name} are not triples of log-prob, token id and text")
    ids = np.array([[triple[1] for triple in row] for row in rows], np.int32).reshape(num_tokens, top_k)
    flat = [triple for row in rows for triple in row]
    logprobs = _float32(flat, [triple[1] for triple in flat], name).reshape(num_tokens, top_k)
    repeats = any(len({*row}) < top_k for row in ids.tolist())
    if (ids < 0).any() or repeats or not (np.isfinite(logprobs) & (logprobs <= _MAX_ROUNDING)).all():
        raise MalformedAnswer(
            "logprobs", f"{name} are below 0 or twice there, or their log-probs not finite or above 0"
        )
    return ids, np.minimum(logprobs, np.float32(0.0))


def _prompt_logprobs(meta_info: dict[str, Any], token_ids: TokenIds) -> LogProbs:
    triples = meta_info.get("input_token_logprobs")
    values = _float32(triples, token_ids.tolist(), "its prompt's log-probs", start=1, or_null=True)
    if np.isinf(values).any():
        raise MalformedAnswer("logprobs", "its prompt's log-probs are too large")
    return values


@_engines_fault()
def parse_answer(
    body: Any,
    request: GenerationRequest,
    parts: Sequence[Completion],
    vocab_size: int,
    versions: VersionRange,
    url: str = "",
    sizes: RouteSizes | None = None,
) -> Completion:
    """The completion in the answer of the server at `url` to `generate_payload(request, parts, ...)`.

    `versions` are the weight versions that may have sampled its tokens, `sizes` those of the experts that a request may
    ask for. Raises MalformedAnswer.
    """
    output_ids, meta_info = _fields(body)
    token_ids = _token_ids(output_ids, vocab_size)
    if meta_info.get("completion_tokens", len(token_ids)) != len(token_ids):
        raise MalformedAnswer(
            "token_count", f"it has {len(token_ids)} tokens but says {meta_info['completion_tokens']}"
        )
    logprobs = _logprobs(meta_info, output_ids, token_ids)
    limit = request.sampling.max_new_tokens - sum(len(part.token_ids) for part in parts)
    finish = _finish(meta_info, output_ids, request.sampling.stop_token_ids, limit)
    spans, routes = _version_spans(meta_info, len(token_ids), versions), no_routes()
    if sizes and (start := _routes_start(request, parts)) is not None:
        num_tokens = len(request.prompt_token_ids) + sum(len(part.token_ids) for part in parts) + len(token_ids)
        routes = _routes(meta_info.get("routed_experts"), num_tokens - 1 - start, sizes, is_cut_off=finish == "abort")
    return Completion(token_ids, logprobs, finish, spans, url, routes)


def joined(request_id: int, parts: Sequence[Completion]) -> Response:
    """Join parts that continue each other to one response; the last part must be complete."""
    finish = parts[-1].finish
    assert finish != "abort"
    versions: list[tuple[int, int]] = []
    engines: list[tuple[str, int]] = []
    start = 0
    for part in parts:
        extend_spans(versions, part.version_spans, start)
        extend_spans(engines, [(part.url, len(part.token_ids))], start)
        start += len(part.token_ids)
    return Response(
        request_id=request_id,
        token_ids=tokens_of(parts),
        logprobs=parts[0].logprobs if len(parts) == 1 else np.concatenate([part.logprobs for part in parts]),
        finish_reason=finish,
        weight_version=min(version for version, _ in versions),
        version_spans=tuple(versions) if len(versions) > 1 else (),
        engine_spans=tuple(engines) if any(url for url, _ in engines) else (),
        routes=np.concatenate(found) if (found := [p.routes for p in parts if p.routes.size]) else no_routes(),
    )


def ended_by_text(
    parts: Sequence[Completion], sampling: SamplingParams, decode: Callable[[list[int]], str]
) -> Completion | None:
    """The last part up to a text of `sampling.stop` that its engine did not see, as the text began in a part before or
    ended with the last token before an abort; None if there is none."""
    last = parts[-1]
    if len(parts) == 1 and last.finish != "abort":
        return None
    tokens, longest = tokens_of(parts).tolist(), sampling.longest_stop
    start = len(tokens) - len(last.token_ids)
    ends = list(range(start + 1, min(start + longest, len(tokens) + 1))) if start else []
    if last.finish == "abort":
        ends.append(len(tokens))
    for end in ends:
        tail = decode(tokens[max(0, end - longest) : end])
        if any(text in tail for text in sampling.stop):
            return _up_to(last, end - start)
    return None


def _up_to(part: Completion, length: int) -> Completion:
    """As if its engine had stopped there."""
    before = [(version, end) for version, end in part.version_spans if end < length]
    version = next(version for version, end in part.version_spans if end >= length)
    return Completion(
        part.token_ids[:length],
        part.logprobs[:length],
        "stop",
        (*before, (version, length)),
        part.url,
        part.routes[: max(0, len(part.routes) - len(part.token_ids) + length)],
    )


def tokens_of(parts: Sequence[Completion]) -> TokenIds:
    """All tokens [L] int32 of one part or several."""
    return parts[0].token_ids if len(parts) == 1 else np.concatenate([part.token_ids for part in parts])


def unfit(request: GenerationRequest, vocab_size: int) -> str:
    """Why the request must not be sent; empty if it may. A token id outside of the vocabulary kills the server."""
    tokens = request.prompt_token_ids
    if not len(tokens):
        return "its prompt is empty"
    if _is_outside(tokens, vocab_size):
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        return f"its prompt has token id {outside}, and the model's are 0 to {vocab_size - 1}"
    return ""


def _is_outside(token_ids: TokenIds, vocab_size: int) -> bool:
    """Whether one of them is no id of the vocabulary. Read without a sign, negative numbers are the largest."""
    return bool(len(token_ids)) and int(token_ids.view(np.uint32).max()) >= vocab_size


def _fields(body: Any) -> tuple[list[Any], dict[str, Any]]:
    if not isinstance(body, dict):
        raise MalformedAnswer("malformed", f"it is a {type(body).__name__} instead of one object")
    output_ids, meta_info = body.get("output_ids"), body.get("meta_info")
    if not isinstance(output_ids, list) or not isinstance(meta_info, dict):
        raise MalformedAnswer("malformed", "it has no output_ids or no meta_info")
    return output_ids, meta_info


def _token_ids(output_ids: list[Any], vocab_size: int) -> TokenIds:
    if not _INTEGERS.issuperset(map(type, output_ids)):
        raise MalformedAnswer("malformed", "its output_ids are not whole numbers")
    try:
        token_ids = np.frombuffer(bytearray(struct.pack(f"{len(output_ids)}i", *output_ids)), np.int32)
        is_outside = _is_outside(token_ids, vocab_size)
    except struct.error:  # Beyond int32.
        is_outside = True
    if is_outside:
        raise MalformedAnswer("vocabulary", f"it has a token id outside of 0 to {vocab_size - 1}")
    return token_ids


def _float32(triples: Any, token_ids: list[int], name: str, *, start: int = 0, or_null: bool = False) -> LogProbs:
    """[L - start] of triples of log-prob, token id and text, from the one number `start` on; NaN for null and infinite
    beyond float32. Raises MalformedAnswer for what is no number, booleans and text among them, and for other tokens."""
    try:
        numbers = [triple[0] for triple in triples[start:]]
        if not (_NUMBERS_OR_NULL if or_null else _NUMBERS).issuperset(map(type, numbers)):
            raise TypeError("not a number")
        # One call for all of them: numpy takes twice as long.
        values = np.array(numbers, np.float64) if or_null else np.frombuffer(struct.pack(f"{len(numbers)}d", *numbers))
        ids = [triple[1] for triple in triples]
    except (TypeError, ValueError, LookupError, OverflowError, struct.error):
        raise MalformedAnswer("logprobs", f"{name} are not triples of log-prob, token id and text") from None
    if ids != token_ids:
        raise MalformedAnswer("logprobs", f"{name} are those of other tokens")
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _logprobs(meta_info: dict[str, Any], output_ids: list[int], token_ids: TokenIds) -> LogProbs:
    """[L], from what `PACKED_LOGPROBS` says or triples of log-prob, token id and null."""
    found = meta_info.get("output_token_logprobs")
    packed = pybase64.b64decode(found, validate=True) if isinstance(found, str) else None
    count = len(packed) / 8 if packed is not None else len(found) if isinstance(found, list) else "no"
    if count != len(token_ids):
        raise MalformedAnswer("logprobs", f"it has {count} log-probs for {len(token_ids)} tokens")
    if packed is None:
        values = _float32(found, output_ids, "its log-probs")
    elif packed.startswith(token_ids.tobytes()):
        values = np.frombuffer(packed, np.float32)[len(token_ids) :]
    else:
        raise MalformedAnswer("logprobs", "its log-probs are those of other tokens")
    if len(values) and not (values.min() > -np.inf and values.max() <= _MAX_ROUNDING):
        raise MalformedAnswer("logprobs", "its log-probs are missing, not finite or above 0")
    return np.minimum(values, np.float32(0.0))


def _routes(encoded: Any, num_tokens: int, sizes: RouteSizes, *, is_cut_off: bool) -> Routes:
    """[tokens, layers, per_token] from base64 of int32; of no tokens where a request was cut off without them: the call
    that goes on then says them."""
    if is_cut_off and not encoded:
        return no_routes()
    if not isinstance(encoded, str):
        raise MalformedAnswer("routes", "it does not say which experts its tokens went through")
    found = np.frombuffer(pybase64.b64decode(encoded, validate=True), np.int32)
    shape = (num_tokens, sizes.num_layers, sizes.per_token)
    if len(found) != math.prod(shape):
        raise MalformedAnswer("routes", f"it has {len(found)} experts where [tokens, layers, each] are {list(shape)}")
    chosen = found.reshape(shape)[:, list(sizes.layers)]
    ordered = np.sort(chosen, axis=-1)
    is_outside = ordered.size and not (ordered.min() >= 0 and ordered.max() < sizes.experts)
    if is_outside or (ordered[..., 1:] == ordered[..., :-1]).any():
        raise MalformedAnswer("routes", f"tokens did not go through {sizes.per_token} of {sizes.experts} experts in it")
    routes = np.full(shape, -1, np.int16)
    routes[:, list(sizes.layers)] = chosen
    return routes


def _finish(
    meta_info: dict[str, Any], output_ids: list[int], stop_token_ids: tuple[int, ...], limit: int
) -> Literal[FinishReason, "abort"]:
    reason = meta_info.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    length = len(output_ids)
    if kind not in ("stop", "length", "abort"):
        raise MalformedAnswer("malformed", f"its finish_reason is {kind!r}")
    if length > limit:
        raise MalformedAnswer("token_count", f"it has {length} tokens where {limit} were allowed")
    if stop_token_ids and not set(stop_token_ids).isdisjoint(output_ids[:-1]):
        raise MalformedAnswer("token_count", "it goes on after a stop token")
    # An abort can come when the response's last token has just been sampled.
    if output_ids and output_ids[-1] in stop_token_ids:
        return "stop"
    match kind:
        case "stop" if length:
            return "stop"  # The server stopped at its model's own end-of-text token.
        case "length" | "abort" if length == limit:
            return "length"
        case "abort":
            return "abort"
    raise MalformedAnswer("token_count", f"it ended with {kind!r} after {length} of {limit} tokens")


def _version_spans(meta_info: dict[str, Any], length: int, allowed: VersionRange) -> tuple[tuple[int, int], ...]:
    spans = meta_info.get("weight_versions")
    if spans is None:  # This server reports only the version at the end.
        spans = [{"version": meta_info.get("weight_version"), "start": 0, "end": length}]
    try:
        filled = [span for span in spans if span["end"] > span["start"]]
        if any(type(span[key]) is not int for span in filled for key in ("start", "end")):
            raise TypeError("not whole numbers")
        ends = [(version, span["end"]) for span in filled if (version := WeightVersion.parse(span["version"]))]
        if len(ends) < len(filled):
            raise ValueError("no version")
        starts = [span["start"] for span in filled]
    except (TypeError, ValueError, LookupError):
        raise MalformedAnswer(
            "version", f"its weights are {str(spans)[:100]}, which are none that this run sent"
        ) from None
    if [*starts, length] != [0] + [end for _, end in ends]:
        raise MalformedAnswer("version", f"its weight_versions do not cover its {length} tokens")
    for version, _ in ends:
        if version not in allowed:
            raise MalformedAnswer(
                "version",
                f"weights of version {version} sampled it and the engine was given {allowed.oldest} to "
                f"{allowed.newest} of {allowed.run or 'this run'}",
                version if version.run != allowed.run else None,
            )
    return tuple((version.step, end) for version, end in ends)
