"""A policy loss of the user's own, tried on made-up tokens before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from dapo_mega.algorithms.own import OwnCode
from dapo_mega.algorithms.policy_losses.base import LossInputs, LossNeed, PolicyLoss, TokenLosses
from dapo_mega.declared import Metric
from dapo_mega.types import METRIC_PART

if TYPE_CHECKING:
    from torch import Tensor

_NUM_TRIED = 12
_SPLIT_TOLERANCE = 1e-5
_names: WeakKeyDictionary[partial[Any], tuple[str, ...]] = WeakKeyDictionary()
"""The values that each loaded loss returns beside the loss."""


class OwnLoss(OwnCode, PolicyLoss):  # type: ignore[misc]
    """A policy loss of your own: `function(tokens: LossInputs, **settings)` returns the loss of every token [T], or a
    pair of it and values [T] by name, whose means over the tokens in the loss become the metrics `policy/own_<name>`.
    """

    whole_responses: bool = False
    """Also give it sums of log-ratios over whole responses (tokens.of_responses)."""
    inputs: tuple[LossNeed, ...] = ()
    """What else it is given. entropy: tokens.entropy, with gradient; reference: tokens.reference_logprobs, of a frozen
    copy of the starting model in memory; engine: tokens.engine_logprobs, at sampling."""
    depends_on_split: bool = False
    """A token's loss may depend on which other tokens are in its micro-batch. false: such a loss is refused, because
    its gradient would change with the layout and with batch.tokens_per_microbatch."""

    key: ClassVar[str] = "algorithm.policy_loss"
    described_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "policy/own_<name>",
            "any",
            "Mean over the tokens in the loss of a value that a policy loss of your own returns beside the loss.",
            "what its function says",
        ),
    )

    @property
    def is_sequence_level(self) -> bool:
        return self.whole_responses

    @property
    def needs(self) -> frozenset[LossNeed]:
        return frozenset(self.inputs)

    @property
    def sum_names(self) -> tuple[str, ...]:
        function = self.loaded("tokens")
        if function not in _names:
            self.try_out()
        return tuple(f"policy/own_{name}" for name in _names[function])

    def token_losses(self, tokens: LossInputs) -> TokenLosses:
        """The loss of every token. Raises InputError for what is no loss of these tokens."""
        returned = self.call(tokens=tokens)
        loss, values = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        self._check_row("the loss", loss, tokens)
        if not isinstance(values, Mapping):
            raise self.unusable(f"beside the loss it returned {type(values).__name__}, not values [T] by name")
        for name, row in values.items():
            if not isinstance(name, str) or not METRIC_PART.fullmatch(name):
                raise self.unusable(f"{name!r} cannot be a metric's name; use letters, digits and _")
            self._check_row(f"the value {name!r}", row, tokens)
        before = _names.setdefault(self.loaded("tokens"), tuple(values))
        if tuple(values) != before:
            raise self.unusable(f"it returned the values {list(values)}, and before {list(before)}")
        sums = {f"policy/own_{name}": (row.detach() * tokens.in_loss).sum() for name, row in values.items()}
        return TokenLosses(loss, sums)

    def try_out(self, group_size: int = 0) -> None:
        """Compute the losses of made-up tokens. Raises InputError if they are not finite, not differentiable, of
        another shape, or dependent on other tokens."""
        import torch

        tokens = _made_up_tokens(self.needs, with_responses=self.whole_responses)
        whole = self.token_losses(tokens).loss
        if not whole.requires_grad:
            raise self.unusable("its loss has no gradient; compute it from tokens.logprobs, without detach()")
        (gradient,) = torch.autograd.grad(whole.sum(), tokens.logprobs, allow_unused=True)
        if gradient is None or not gradient.isfinite().all() or not whole.isfinite().all():
            raise self.unusable("for made-up tokens its loss or its gradient is not finite")
        if self.depends_on_split:
            return
        half = _NUM_TRIED // 2
        parts = [self.token_losses(_part(tokens, slice(start, start + half))).loss for start in (0, half)]
        if not torch.allclose(torch.cat(parts), whole, rtol=_SPLIT_TOLERANCE, atol=_SPLIT_TOLERANCE):
            raise self.unusable(
                "a token's loss depends on which other tokens are in its micro-batch, so its gradient would change "
                "with the layout; use only the token's own columns, or set depends_on_split: true"
            )

    def _check_row(self, what: str, row: Any, tokens: LossInputs) -> None:
        """Raises InputError unless `row` has one number per token."""
        import torch

        if not isinstance(row, torch.Tensor):
            raise self.unusable(f"{what} is {type(row).__name__}, not a tensor [T] with one number per token")
        if row.shape != tokens.logprobs.shape or not (row.is_floating_point() or row.dtype is torch.bool):
            raise self.unusable(
                f"{what} is {list(row.shape)} {row.dtype}, not {list(tokens.logprobs.shape)} floating point"
            )


def _made_up_tokens(needs: frozenset[LossNeed], *, with_responses: bool) -> LossInputs:
    """Tokens with ratios around 1 and far from it, advantages of both signs and 0, and some out of the loss."""
    import torch

    old = -torch.linspace(0.1, 3.0, _NUM_TRIED)
    ratios = torch.tensor([0.0, 0.1, -0.1, 0.5, -0.5, 2.0, -2.0, 0.01, -0.01, 0.3, -0.3, 0.0])
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5, -0.5, 2.0, -2.0, 1.0, -1.0, 0.1, -0.1, 1.0])
    in_loss = torch.arange(_NUM_TRIED) % 5 != 4
    of_responses = torch.stack([ratios.cumsum(0), torch.full((_NUM_TRIED,), 3.0)]) if with_responses else None
    return LossInputs(
        (old + ratios).requires_grad_(),
        old,
        advantages,
        in_loss,
        of_responses,
        entropy=ratios.square().requires_grad_() if "entropy" in needs else None,
        reference_logprobs=old - 0.1 if "reference" in needs else None,
        engine_logprobs=old + 0.01 if "engine" in needs else None,
    )


def _part(tokens: LossInputs, part: slice) -> LossInputs:
    columns: dict[str, Tensor | None] = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return replace(tokens, **{name: row[..., part] for name, row in columns.items() if row is not None})  # type: ignore[arg-type]
