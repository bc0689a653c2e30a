"""A policy loss of the user's own, tried on made-up tokens before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from dapo_mega.algorithms.policy_losses.protocol import LossInputs, TokenLosses
from dapo_mega.algorithms.ratios import means_over
from dapo_mega.config import LossSettings, OwnLoss
from dapo_mega.own_code import MisuseError, check_call, described, load_function, unusable
from dapo_mega.rewards.records import PART_NAME

_NUM_TRIED = 12
_SPLIT_TOLERANCE = 1e-5


class OwnPolicyLoss:
    """`function(tokens: LossInputs, **settings)` returns the loss of every token [T], or a pair of it and values [T] by
    name, whose means over the tokens in the loss become the metrics `policy/own_<name>`."""

    def __init__(self, own: OwnLoss) -> None:
        """Raises InputError if the function cannot be loaded or called, or if what it returns for made-up tokens is not
        finite, not differentiable, of another shape, or dependent on other tokens."""
        self.is_sequence_level = own.whole_responses
        self._path, self._settings = own.path, own.settings
        self._names: tuple[str, ...] | None = None
        try:
            self._function = load_function(own.path)
            check_call(self._function, ("tokens",), own.settings)
            self._try(own)
        except MisuseError as error:
            raise unusable("algorithm.policy_loss", own.path, error) from error.__cause__

    @property
    def sum_names(self) -> tuple[str, ...]:
        """See `PolicyLoss`."""
        return tuple(f"own_{name}" for name in self._names or ())

    def token_losses(self, tokens: LossInputs, settings: LossSettings | None = None) -> TokenLosses:
        """See `PolicyLoss`. Raises InputError for what is no loss of these tokens."""
        try:
            return self._losses(tokens)
        except MisuseError as error:
            raise unusable("algorithm.policy_loss", self._path, error) from error.__cause__

    def _losses(self, tokens: LossInputs) -> TokenLosses:
        try:
            returned = self._function(tokens, **self._settings)
        except Exception as error:
            raise MisuseError(f"it raises {described(error, self._path.rpartition(':')[0])}") from error
        loss, values = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        _check_row("the loss", loss, tokens)
        if not isinstance(values, Mapping):
            raise MisuseError(f"beside the loss it returned {type(values).__name__}, not values [T] by name")
        for name, row in values.items():
            if not isinstance(name, str) or not PART_NAME.fullmatch(name):
                raise MisuseError(f"{name!r} cannot be a metric's name; use letters, digits and _")
            _check_row(f"the value {name!r}", row, tokens)
        if self._names is None:
            self._names = tuple(values)
        if tuple(values) != self._names:
            raise MisuseError(f"it returned the values {list(values)}, and before {list(self._names)}")
        with torch.no_grad():
            sums = {f"own_{name}": (row.detach() * tokens.in_loss).sum() for name, row in values.items()}
        return TokenLosses(loss, sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """See `PolicyLoss`."""
        return means_over(
            sums["loss_tokens"], {f"policy/own_{name}": sums[f"own_{name}"] for name in self._names or ()}
        )

    def _try(self, own: OwnLoss) -> None:
        tokens = _made_up_tokens(with_responses=own.whole_responses)
        whole = self._losses(tokens).loss
        if not whole.requires_grad:
            raise MisuseError("its loss has no gradient; compute it from tokens.logprobs, without detach()")
        (gradient,) = torch.autograd.grad(whole.sum(), tokens.logprobs, allow_unused=True)
        if gradient is None or not gradient.isfinite().all() or not whole.isfinite().all():
            raise MisuseError("for made-up tokens its loss or its gradient is not finite")
        if own.depends_on_split:
            return
        half = _NUM_TRIED // 2
        parts = [self._losses(_part(tokens, slice(start, start + half))).loss for start in (0, half)]
        if not torch.allclose(torch.cat(parts), whole, rtol=_SPLIT_TOLERANCE, atol=_SPLIT_TOLERANCE):
            raise MisuseError(
                "a token's loss depends on which other tokens are in its micro-batch, so its gradient would change "
                "with the layout; use only the token's own columns, or set depends_on_split: true"
            )


def _made_up_tokens(*, with_responses: bool) -> LossInputs:
    """Tokens with ratios around 1 and far from it, advantages of both signs and 0, and some out of the loss."""
    old = -torch.linspace(0.1, 3.0, _NUM_TRIED)
    ratios = torch.tensor([0.0, 0.1, -0.1, 0.5, -0.5, 2.0, -2.0, 0.01, -0.01, 0.3, -0.3, 0.0])
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5, -0.5, 2.0, -2.0, 1.0, -1.0, 0.1, -0.1, 1.0])
    in_loss = torch.arange(_NUM_TRIED) % 5 != 4
    of_responses = torch.stack([ratios.cumsum(0), torch.full((_NUM_TRIED,), 3.0)]) if with_responses else None
    return LossInputs((old + ratios).requires_grad_(), old, advantages, in_loss, of_responses)


def _part(tokens: LossInputs, part: slice) -> LossInputs:
    columns = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return replace(tokens, **{name: row[..., part] for name, row in columns.items() if row is not None})


def _check_row(what: str, row: Any, tokens: LossInputs) -> None:
    if not isinstance(row, Tensor):
        raise MisuseError(f"{what} is {type(row).__name__}, not a tensor [T] with one number per token")
    if row.shape != tokens.logprobs.shape or not (row.is_floating_point() or row.dtype is torch.bool):
        raise MisuseError(f"{what} is {list(row.shape)} {row.dtype}, not {list(tokens.logprobs.shape)} floating point")
