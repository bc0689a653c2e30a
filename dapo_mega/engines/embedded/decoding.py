"""The decoding loop of the embedded engine: many rows in lockstep over one key-value cache.

One batch goes through these steps::

    [forward one token -> where enough places are free, prefill each distinct prompt that waits once and repeat its
     cache for the group's members -> sample -> hand out finished rows] ...

Rows are aligned at their newest token: all write the same cache slot, and shorter rows leave slots on their left
unused. The last row moves into the place of a finished row, so nothing is computed for finished rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dapo_mega.engines.embedded.routes import ChosenExperts
from dapo_mega.engines.embedded.sampling import request_uniforms, sample_tokens
from dapo_mega.types import GenerationRequest, Routes, no_routes

_PREFILL_TOKENS = 8192
"""Padded tokens of one prefill forward: bounds its activations."""

_SPARE_SLOTS = 64
"""Least number of cache slots obtained at once."""

_UNIFORMS_AT_ONCE = 128
"""Random numbers drawn per row at once."""

_REFILLS = 8
"""A refill starts once this part of the batch is free: the prompts of several responses cost less together."""

FinishedRow = tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32], bool, Routes]
"""(index of the request, token ids, log-probs, whether a stop ended it, experts of all tokens but the last)"""

_GROUPED_DECODE = "grouped_decode"


def use_grouped_decode_attention(model: PreTrainedModel) -> None:
    """Make a CPU model with SDPA attention use `_grouped_decode_attention`; leave other models unchanged."""
    is_sdpa = model.config._attn_implementation == "sdpa" and model._supports_attention_backend
    if is_sdpa and model.device.type == "cpu":
        AttentionInterface.register(_GROUPED_DECODE, _grouped_decode_attention)
        AttentionMaskInterface.register(_GROUPED_DECODE, sdpa_mask)
        model.set_attn_implementation(_GROUPED_DECODE)


def copy_hidden_of_last_tokens(model: PreTrainedModel) -> None:
    """Hand the output layer a copy of the last tokens' hidden states [B, 1, h], which are a view into those of all.

    torch multiplies such a view as B matrices, and copies the whole weight for each of them.
    """
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: (given[0].contiguous(), *given[1:]))


def _grouped_decode_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA that computes single-token queries [B, H, 1, D] per key head: the query heads of a key head form one matrix.

    On a CPU the SDPA kernel costs more for such queries than two batched products in float32 (in bfloat16 ten times as
    much), and with a mask transformers before 5.23 copies the cache once per query head. Keys and values are float32,
    because scores must not be rounded to bfloat16. All other calls go to SDPA.
    """
    is_plain_mask = attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1)
    has_extras = kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    if query.shape[2] != 1 or key.dtype != torch.float32 or not is_plain_mask or has_extras:
        key, value = key.to(query.dtype), value.to(query.dtype)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    num_rows, num_key_heads, _, head_dim = key.shape
    grouped = query.float().reshape(num_rows, num_key_heads, -1, head_dim)
    scores = (grouped * (head_dim**-0.5 if scaling is None else scaling)) @ key.transpose(2, 3)
    if attention_mask is not None:
        scores.masked_fill_(~attention_mask, -torch.inf)
    output = torch.softmax(scores, dim=-1) @ value
    return output.to(query.dtype).reshape(num_rows, 1, -1, value.shape[-1]), None


def _cache_dtype(model: PreTrainedModel) -> torch.dtype:
    is_grouped = model.config._attn_implementation == _GROUPED_DECODE
    # Latent attention caches vectors that the model's projections turn into keys and values later.
    is_latent = "kv_lora_rank" in model.config.to_dict()
    return torch.float32 if model.dtype.itemsize < 4 and is_grouped and not is_latent else model.dtype


def prompt_key(request: GenerationRequest) -> bytes:
    """Equal exactly for requests with the same prompt."""
    return request.prompt_token_ids.astype(np.int32).tobytes()


class _SlotLayer(DynamicLayer):
    """One layer's keys and values [rows, heads, slots, head_dim], written in place into buffers with spare slots.

    The base class concatenates: it copies the whole cache for every token.
    """

    def __init__(self, num_rows: int, num_slots: int, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """`num_slots` zeroed slots of `dtype` in use, shaped like `keys` and `values` [*, heads, *, head_dim]."""
        super().__init__()
        self.is_initialized = True
        self._first, self._end = 0, num_slots
        self._buffers = [_roomy_buffer(tensor, num_rows, num_slots, dtype) for tensor in (keys, values)]
        self._expose(num_rows)
        # Slots without a token are masked, but 0 * NaN from uninitialised memory would still spread.
        self.keys.zero_()
        self.values.zero_()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one slot to every row; returns the slots in use."""
        num_rows = self.keys.shape[0]
        if self._end == self._buffers[0].shape[2]:
            self._move_to_larger_buffers(num_rows, self.keys.shape[2])
        self._end += 1
        self._expose(num_rows)
        self.keys[:, :, -1:] = key_states
        self.values[:, :, -1:] = value_states
        return self.keys, self.values

    def drop_rows(self, places: Tensor, movers: Tensor, num_rows: int, num_unused: int) -> None:
        """Move rows `movers` to `places`, then keep the first `num_rows` rows without the oldest slots."""
        if len(places):
            self.keys[places] = self.keys[movers]
            self.values[places] = self.values[movers]
        self._first += num_unused
        self._expose(num_rows)

    def make_room(self, num_rows: int, num_slots: int) -> None:
        """Have `num_rows` rows, those added zeroed, and at least `num_slots` slots, those added on the left."""
        num_added = max(0, num_slots - self.keys.shape[2])
        first_added = self.keys.shape[0]
        if num_rows > self._buffers[0].shape[0] or num_added > self._first:
            self._move_to_larger_buffers(num_rows, self.keys.shape[2] + num_added)
        else:
            self._first -= num_added
        self._expose(num_rows)
        self.keys[first_added:].zero_()
        self.values[first_added:].zero_()

    def _move_to_larger_buffers(self, num_rows: int, num_slots: int) -> None:
        used = (self.keys, self.values)
        self._buffers = [_roomy_buffer(tensor, num_rows, num_slots, tensor.dtype) for tensor in used]
        self._first, self._end = 0, num_slots
        for buffer, old in zip(self._buffers, used, strict=True):
            rows, _, slots, _ = old.shape
            buffer[:rows, :, : num_slots - slots] = 0
            buffer[:rows, :, num_slots - slots : num_slots] = old

    def _expose(self, num_rows: int) -> None:
        self.keys, self.values = (buffer[:num_rows, :, self._first : self._end] for buffer in self._buffers)


class _StateLayer(LinearAttentionLayer):
    """One gated delta layer's states, of each row one of each kind whatever its length."""

    def __init__(self, prefilled: LinearAttentionLayer, num_rows: int) -> None:
        super().__init__()
        self.__dict__.update(prefilled.__dict__)
        self.conv_states, self.recurrent_states = (
            {index: state.new_empty(num_rows, *state.shape[1:]) for index, state in states.items()}
            for states in (prefilled.conv_states, prefilled.recurrent_states)
        )

    def make_room(self, num_rows: int, num_slots: int) -> None:
        """Have `num_rows` rows."""
        for states in self._states:
            for index, state in states.items():
                states[index] = state.new_empty(num_rows, *state.shape[1:])
                states[index][: len(state)] = state

    def fill(self, rows: slice, prefilled: LinearAttentionLayer, repeats: Tensor) -> None:
        for mine, others in zip(self._states, (prefilled.conv_states, prefilled.recurrent_states), strict=True):
            for index, state in others.items():
                mine[index][rows] = state.repeat_interleave(repeats, dim=0)

    def drop_rows(self, places: Tensor, movers: Tensor, num_rows: int, num_unused: int) -> None:
        """Move rows `movers` to `places`, then keep the first `num_rows` rows."""
        for states in self._states:
            for index, state in states.items():
                if len(places):
                    state[places] = state[movers]
                states[index] = state[:num_rows]

    @property
    def _states(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        return self.conv_states, self.recurrent_states


def _roomy_buffer(like: Tensor, num_rows: int, num_slots: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised buffer with 1.5 times the slots in use, so that growing costs each token O(1) copies."""
    _, num_heads, _, head_dim = like.shape
    roomy = num_slots + max(_SPARE_SLOTS, num_slots // 2)
    return like.new_empty(num_rows, num_heads, roomy, head_dim, dtype=dtype)


class RowBatch:
    """Rows that are decoded in lockstep; row r of every tensor belongs to `_rows[r]`."""

    def __init__(
        self,
        waiting: list[tuple[int, GenerationRequest]],
        model: PreTrainedModel,
        experts: ChosenExperts,
        max_rows: int,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`waiting` are (index, request), ordered by prompt length, equal prompts adjacent; they differ in sampling
        only in `max_new_tokens`. The batch empties it, with at most `max_rows` rows at a time. `experts` are those of
        the model's last pass. `decode` makes text of tokens, where texts end responses.
        """
        self._waiting = waiting
        self._rows: list[tuple[int, GenerationRequest]] = []
        self._model = model
        self._experts = experts if any(request.routes_from is not None for _, request in waiting) else None
        # Of each request's prompt [P, layers, experts per token], and of what was sampled [rows, history, layers, ...].
        self._prompt_routes: dict[int, Tensor] = {}
        self._routes = torch.empty(0)
        self._sampling = waiting[0][1].sampling
        self._stop_ids = torch.tensor(self._sampling.stop_token_ids, dtype=torch.int64, device=model.device)
        self._decode = decode
        self._max_rows = min(max_rows, len(waiting))
        history = (self._max_rows, max(request.sampling.max_new_tokens for _, request in waiting))
        self._tokens = torch.empty(history, dtype=torch.int64, device=model.device)
        self._logprobs = torch.empty(history, dtype=torch.float32, device=model.device)
        self._uniforms = torch.empty(self._max_rows, _UNIFORMS_AT_ONCE, dtype=torch.float64, device=model.device)
        # Of each row: the tokens sampled, the most it may have, and the slots on its left that are not its own.
        self._lengths, self._limits = np.zeros((2, 0), dtype=np.int64)
        self._unused = torch.zeros(0, dtype=torch.int64, device=model.device)
        self._num_slots = 0
        self._is_ragged = False
        self._layers: list[_SlotLayer | _StateLayer] = []

    def decode(self, check_stop: Callable[[], None] = lambda: None) -> Iterator[FinishedRow]:
        """Yield each row as soon as it finishes. `check_stop` is called before every token and may raise."""
        while self._rows or self._waiting:
            check_stop()
            logits = self._forward() if self._rows else None
            if num_added := self._num_to_add():
                prefilled = self._prefill(num_added)
                logits = prefilled if logits is None else torch.cat([logits, prefilled])
            assert logits is not None
            newest = (torch.arange(len(self._rows)), torch.from_numpy(self._lengths))
            tokens, self._logprobs[newest] = self._sample(logits)
            self._tokens[newest] = tokens
            self._lengths = self._lengths + 1
            stopped = torch.isin(tokens, self._stop_ids)
            if self._decode:
                stopped |= torch.tensor(self._ends_in_stop(self._decode), device=stopped.device)
            finished = stopped
            if (ended := self._lengths == self._limits).any():
                finished = stopped | torch.from_numpy(ended).to(stopped.device)
            if bool(finished.any()):
                yield from self._finish(finished, stopped)

    def _num_to_add(self) -> int:
        """How many of those that wait start now: none before some can be prefilled together, and whole groups, which
        share a prefill, unless not even one fits into half of the batch."""
        free = min(self._max_rows - len(self._rows), len(self._waiting))
        if free < min(-(-self._max_rows // _REFILLS), len(self._waiting)) or not free:
            return 0
        keys = [prompt_key(request) for _, request in self._waiting[: free + 1]]
        ends = (end for end in range(free, 0, -1) if end == len(keys) or keys[end] != keys[end - 1])
        return next(ends, free if 2 * free >= self._max_rows else 0)

    def _prefill(self, num_added: int) -> Tensor:
        """Add the next rows, and the prompts to the cache; returns the logits [added, V] of their last positions."""
        first, added = len(self._rows), self._waiting[:num_added]
        del self._waiting[:num_added]
        lengths = [len(request.prompt_token_ids) for _, request in added]
        if not first:
            self._layers, self._num_slots = [], 0
        num_slots = max(self._num_slots, lengths[-1])
        unused = num_slots - torch.tensor(lengths, device=self._unused.device)
        self._unused = torch.cat([self._unused[:first] + num_slots - self._num_slots, unused])
        self._num_slots = num_slots
        self._is_ragged = bool(self._unused.any())
        self._rows += added
        self._lengths = np.append(self._lengths, np.zeros(num_added, dtype=np.int64))
        self._limits = np.append(self._limits, [request.sampling.max_new_tokens for _, request in added])
        for layer in self._layers:
            layer.make_room(len(self._rows), num_slots)
        prompts: dict[bytes, list[int]] = defaultdict(list)
        for row, (_, request) in enumerate(added, first):
            prompts[prompt_key(request)].append(row)
        return torch.cat([self._prefill_slice(s) for s in _prefill_slices(list(prompts.values()), first, lengths)])

    def _prefill_slice(self, members: list[list[int]]) -> Tensor:
        """One forward over the distinct prompts of adjacent rows: `members` lists the rows of each prompt."""
        device = self._model.device
        prompts = [self._rows[rows[0]][1].prompt_token_ids for rows in members]
        width = len(prompts[-1])
        ids, mask = np.zeros((2, len(prompts), width), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = prompt
            mask[i, width - len(prompt) :] = 1
        layer_types = self._model.config.get_text_config().to_dict().get("layer_types") or ()
        cache = DynamicCache(config=self._model.config if "linear_attention" in layer_types else None)
        output = self._model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=None if mask.all() else torch.from_numpy(mask).to(device),
            position_ids=torch.from_numpy((mask.cumsum(1) - 1).clip(min=0)).to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if self._experts:
            routes = self._experts.chosen(len(prompts))
            for i, rows in enumerate(members):
                of_prompt = routes[i, width - len(prompts[i]) :].clone()
                self._prompt_routes |= {self._rows[row][0]: of_prompt for row in rows}
            if not len(self._routes):
                self._routes = routes.new_empty(*self._tokens.shape, *routes.shape[2:])
        self._layers = self._layers or [self._empty_layer(layer) for layer in cache.layers]
        repeats = torch.tensor([len(rows) for rows in members], device=device)
        first, last = members[0][0], members[-1][-1]
        for layer, prefilled in zip(self._layers, cache.layers, strict=True):
            if isinstance(layer, _StateLayer):
                layer.fill(slice(first, last + 1), prefilled, repeats)
                continue
            layer.keys[first : last + 1, :, -width:] = prefilled.keys.repeat_interleave(repeats, dim=0)
            layer.values[first : last + 1, :, -width:] = prefilled.values.repeat_interleave(repeats, dim=0)
        return output.logits[:, -1].repeat_interleave(repeats, dim=0)

    def _empty_layer(self, prefilled: Any) -> _SlotLayer | _StateLayer:
        if isinstance(prefilled, LinearAttentionLayer):
            return _StateLayer(prefilled, len(self._rows))
        keys, values = prefilled.keys, prefilled.values
        return _SlotLayer(len(self._rows), self._num_slots, keys, values, _cache_dtype(self._model))

    def _sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        place = self._lengths % _UNIFORMS_AT_ONCE
        if len(used_up := np.flatnonzero(place == 0)):
            streams = [
                request_uniforms(self._rows[row][1].seed, _UNIFORMS_AT_ONCE, start=int(self._lengths[row]))
                for row in used_up
            ]
            self._uniforms[torch.from_numpy(used_up)] = torch.from_numpy(np.stack(streams)).to(logits.device)
        uniforms = self._uniforms[torch.arange(len(place)), torch.from_numpy(place)]
        sampling = self._sampling
        limits = sampling.temperature, sampling.top_p, sampling.top_k, sampling.num_tokens
        return sample_tokens(logits, uniforms, *limits)

    def _forward(self) -> Tensor:
        """Append every row's newest token to the cache; returns the logits [rows, V] after them."""
        newest = (torch.arange(len(self._rows)), torch.from_numpy(self._lengths - 1))
        token_ids = self._tokens[newest].unsqueeze(1)
        self._num_slots += 1
        mask = None
        if self._is_ragged:
            mask = torch.arange(self._num_slots, device=token_ids.device) >= self._unused.unsqueeze(1)
        output = self._model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=(self._num_slots - 1 - self._unused).unsqueeze(1),
            past_key_values=Cache(layers=self._layers),
            use_cache=True,
            logits_to_keep=1,
        )
        if self._experts:
            self._routes[newest] = self._experts.chosen(len(self._rows))[:, 0]
        logits: Tensor = output.logits[:, -1]
        return logits

    def _ends_in_stop(self, decode: Callable[[list[int]], str]) -> list[bool]:
        """Of each row, whether it has just had one of the texts that end a response."""
        longest = self._sampling.longest_stop
        tails = (self._tokens[row, max(0, end - longest) : end] for row, end in enumerate(self._lengths))
        return [any(stop in text for stop in self._sampling.stop) for text in (decode(t.tolist()) for t in tails)]

    def _finish(self, finished: Tensor, stopped: Tensor) -> Iterator[FinishedRow]:
        """Hand out the finished rows, and keep the others."""
        ended_by_stop = stopped.tolist()
        is_finished = finished.tolist()
        for row, (index, request) in enumerate(self._rows):
            if is_finished[row]:
                length = int(self._lengths[row])
                tokens = self._tokens[row, :length].to("cpu", torch.int32, copy=True).numpy()
                logprobs = self._logprobs[row, :length].to("cpu", copy=True).numpy()
                routes = no_routes()
                if request.routes_from is not None:
                    of_all = torch.cat([self._prompt_routes.pop(index), self._routes[row, : length - 1]])
                    routes = of_all[request.routes_from :].cpu().numpy()
                yield index, tokens, logprobs, ended_by_stop[row], routes
        num_rows = len(is_finished) - sum(is_finished)
        places = [row for row in range(num_rows) if is_finished[row]]
        movers = [row for row in range(num_rows, len(is_finished)) if not is_finished[row]]
        for place, mover in zip(places, movers, strict=True):
            self._rows[place] = self._rows[mover]
        del self._rows[num_rows:]
        for counts in (self._lengths, self._limits):
            counts[places] = counts[movers]
        self._lengths, self._limits = self._lengths[:num_rows], self._limits[:num_rows]
        if self._rows:
            self._move(torch.tensor(places), torch.tensor(movers), num_rows)

    def _move(self, places: Tensor, movers: Tensor, num_rows: int) -> None:
        """Copy the state of rows `movers` to `places`; drop unused rows and slots."""
        if len(places):
            length = int(self._lengths.max())
            self._tokens[places, :length] = self._tokens[movers, :length]
            self._logprobs[places, :length] = self._logprobs[movers, :length]
            if self._experts:
                self._routes[places, :length] = self._routes[movers, :length]
            self._uniforms[places] = self._uniforms[movers]
            self._unused[places] = self._unused[movers]
        self._unused = self._unused[:num_rows]
        num_unused = int(self._unused.min())
        self._unused = self._unused - num_unused
        self._num_slots -= num_unused
        self._is_ragged = bool(self._unused.any())
        for layer in self._layers:
            layer.drop_rows(places, movers, num_rows, num_unused)


def _prefill_slices(prompts: list[list[int]], first: int, lengths: Sequence[int]) -> Iterator[list[list[int]]]:
    """Cut the prompts, each a list of its rows and sorted by length, so that a padded slice fits the budget. `lengths`
    are those of the rows from `first` on."""
    pending: list[list[int]] = []
    for rows in prompts:
        if pending and (len(pending) + 1) * lengths[rows[0] - first] > _PREFILL_TOKENS:
            yield pending
            pending = []
        pending.append(rows)
    yield pending
