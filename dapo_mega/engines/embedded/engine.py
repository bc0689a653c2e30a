"""Generates inside the trainer's process: a Hugging Face model with a decoding loop made for groups.

For the quickstart and for machines without SGLang. The loop itself is in `decoding.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from dapo_mega.atomic_files import read_json_object
from dapo_mega.data.tokenizer import load_tokenizer
from dapo_mega.engines.embedded.decoding import (
    RowBatch,
    copy_hidden_of_last_tokens,
    prompt_key,
    use_grouped_decode_attention,
)
from dapo_mega.engines.embedded.routes import ChosenExperts
from dapo_mega.models.families import language_config
from dapo_mega.types import FinishReason, GenerationFailure, GenerationRequest, NamedTensors, Response, SamplingParams


class EmbeddedEngine:
    """Generates with a transformers causal LM; answers every request with a `Response`.

    Works for models whose layers cache keys and values (full or sliding-window attention), some of them states (gated
    delta layers).
    """

    def __init__(
        self,
        config: str | Path | Any,
        dtype: torch.dtype = torch.float32,
        max_batch_rows: int = 512,
        device: torch.device | str = "cpu",
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """The architecture of `config` (a Hugging Face folder or configuration object), without weights until
        `load_weights`: `weight_version` is -1 before the first and after a failed one. At most `max_batch_rows`
        responses are decoded at once, and requests that wait take the places of finished ones. `check_stop` is called
        before every token and may raise StopRequested. Texts that end responses need a folder, with its tokenizer."""
        self._folder = config
        if isinstance(config, str | Path):
            raw = read_json_object(Path(config) / "config.json")
            language = language_config(raw)
            config = AutoConfig.from_pretrained(config) if language is raw else AutoConfig.for_model(**language)
        layer_types = set(config.get_text_config().to_dict().get("layer_types") or ())
        if unsupported := layer_types - {"full_attention", "sliding_attention", "linear_attention"}:
            raise ValueError(f"the embedded engine cannot cache layers of type {sorted(unsupported)}")
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()  # Skipped together with the initialisation.
        # Loading with `from_pretrained` leaves some tensors in float32, such as routing biases.
        kept = tuple(model._keep_in_fp32_modules_strict or ())
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if kept and name.endswith(kept):
                tensor.data = tensor.data.float()
        self._model: PreTrainedModel | None = model.to(device).eval().requires_grad_(False)
        use_grouped_decode_attention(model)
        copy_hidden_of_last_tokens(model)
        self._chosen_experts = ChosenExperts(model)
        self._max_batch_rows = max_batch_rows
        self._check_stop = check_stop
        self.weight_version = -1
        self._refusal = "no weights have been loaded; call load_weights first"

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(str(self._folder))

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Response | GenerationFailure]:
        """Answer every request, in the order given.

        A request's tokens depend on its prompt, seed and sampling parameters, and on what else is in the batch only
        through float rounding. Raises RuntimeError without a complete set of weights, and FloatingPointError when the
        model's logits are not finite. Raises ValueError, before anything runs, that names the requests that the model
        cannot serve.
        """
        if self.weight_version < 0:
            raise RuntimeError(f"the embedded engine cannot generate: {self._refusal}")
        assert self._model is not None
        _check(requests, self._model.config.get_text_config())
        responses: dict[int, Response] = {}
        for alike in _alike(requests):
            waiting = [(index, requests[index]) for index in alike]
            decode = self._tokenizer.decode if waiting[0][1].sampling.stop else None
            batch = RowBatch(waiting, self._model, self._chosen_experts, self._max_batch_rows, decode)
            for index, tokens, logprobs, stopped, routes in batch.decode(self._check_stop):
                request_id = requests[index].request_id
                finish: FinishReason = "stop" if stopped else "length"
                version = self.weight_version
                responses[index] = Response(request_id, tokens, logprobs, finish, version, routes=routes)
        return [responses[index] for index in range(len(requests))]

    @torch.no_grad()
    def load_weights(self, buckets: Iterable[NamedTensors], version: int) -> None:
        """Copy the streamed tensors into the model in place, and set `version` once the stream has ended.

        Floating-point tensors are cast to the model's dtype. A tied pair may come under one name or under both, with
        equal values. Raises ValueError that names tensors that are unknown, missing, given twice, or of another shape
        or kind. After any error, also one of the stream, the engine refuses to generate until a complete load has
        succeeded.
        """
        assert version >= 0
        if self._model is None:
            raise RuntimeError("the embedded engine is closed")
        self.weight_version = -1
        self._refusal = f"loading of weight version {version} did not complete; call load_weights again"
        targets = _targets(self._model)
        given: set[str] = set()
        filled: set[int] = set()
        for bucket in buckets:
            for name, tensor in bucket:
                if name in given:
                    raise ValueError(f"weight {name!r} was given twice")
                target = _matching_target(targets, name, tensor)
                if id(target) not in filled:
                    target.copy_(tensor)
                elif not torch.equal(target, tensor.to(target)):
                    raise ValueError(f"weight {name!r} differs from the one that the model ties it to")
                given.add(name)
                filled.add(id(target))
        if missing := [name for name, target in targets.items() if id(target) not in filled]:
            raise ValueError(f"{len(missing)} of {len(targets)} weights were not given: {', '.join(missing[:8])}")
        self.weight_version = version

    def close(self) -> None:
        """Free the model; the engine cannot be used afterwards."""
        self.weight_version = -1
        self._refusal = "it is closed"
        self._model = None


def _check(requests: Sequence[GenerationRequest], config: Any) -> None:
    """Raises ValueError that names the requests that a model of `config` cannot serve."""
    problems: dict[str, list[int]] = defaultdict(list)
    for request in requests:
        prompt, limit = request.prompt_token_ids, request.sampling.max_new_tokens
        if len(prompt) == 0:
            problems["an empty prompt"].append(request.request_id)
        elif prompt.min() < 0 or prompt.max() >= config.vocab_size:
            problems[f"token ids outside the vocabulary of {config.vocab_size}"].append(request.request_id)
        if limit < 1:
            problems["max_new_tokens below 1"].append(request.request_id)
        if len(prompt) + limit > config.max_position_embeddings:
            what = f"prompt + max_new_tokens above max_position_embeddings={config.max_position_embeddings}"
            problems[what].append(request.request_id)
    if problems:
        listed = "; ".join(f"{what}: request {', '.join(map(str, ids[:8]))}" for what, ids in problems.items())
        raise ValueError(f"requests cannot be served, with {listed}")


def _targets(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors by their names on disk; transformers' two stacked tensors per layer are split into
    experts, except where they are stacked on disk, with biases."""
    targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
    stacks = [name for name in targets if name.endswith(".mlp.experts.gate_up_proj")]
    for name in [name for name in stacks if f"{name}_bias" not in targets]:
        prefix = name.removesuffix("gate_up_proj")
        gates_and_ups = (expert.chunk(2) for expert in targets.pop(name))
        for number, (gate, up) in enumerate(gates_and_ups):
            targets |= {f"{prefix}{number}.gate_proj.weight": gate, f"{prefix}{number}.up_proj.weight": up}
        for number, down in enumerate(targets.pop(f"{prefix}down_proj")):
            targets[f"{prefix}{number}.down_proj.weight"] = down
    return targets


def _matching_target(targets: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    if name not in targets:
        raise ValueError(f"weight {name!r} is unknown to the model; it has {', '.join(list(targets)[:4])}, ...")
    target = targets[name]
    if tensor.shape != target.shape:
        raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
    if tensor.is_floating_point() != target.is_floating_point():
        raise ValueError(f"weight {name!r} has dtype {tensor.dtype}, which does not cast to {target.dtype}")
    return target


def _alike(requests: Sequence[GenerationRequest]) -> Iterable[list[int]]:
    """Indices of requests to decode together: equal sampling, ordered by prompt length, equal prompts adjacent.

    Lengths may differ: a row that reaches its limit leaves the batch like one that stops.
    """
    by_sampling: dict[SamplingParams, list[int]] = defaultdict(list)
    for index in sorted(
        range(len(requests)), key=lambda i: (len(requests[i].prompt_token_ids), prompt_key(requests[i]))
    ):
        by_sampling[replace(requests[index].sampling, max_new_tokens=0)].append(index)
    return by_sampling.values()
