"""What a trainer is commanded to do to send weights to engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo_mega.distributed.commands import Commanded, command, gathered
from dapo_mega.engines.sglang.weight_protocol import PlannedBucket
from dapo_mega.megatron.lent_memory import Held
from dapo_mega.types import LogProbs, Selection, TokenIds, WeightSource
from dapo_mega.weight_sync.broadcast import BroadcastSender
from dapo_mega.weight_sync.shared_memory import SharedMemorySender
from dapo_mega.weight_sync.update import Sent, SharedBucket, Update, WeightSender


class WeightCommands(Commanded):
    """Sends with each process's `sender` from its `policy`, which is a `WeightSource`."""

    policy: Any
    sender: WeightSender | None = None

    @command
    def weight_plan(self, have_plugin: bool, selection: Selection = "merged") -> list[list[PlannedBucket]]:
        """The buckets that `send_weights` sends in each round, to engines with or without the plugin."""
        assert isinstance(self.sender, BroadcastSender)
        return self.sender.plan(self._selected(selection), have_plugin=have_plugin)

    @command
    def send_weights(self, update: Update, forgotten: Sequence[str]) -> Sent:
        """Broadcast the weights to the engines of an update; those `forgotten` have failed before."""
        assert isinstance(self.sender, BroadcastSender)
        self.sender.forget(forgotten)
        return self.sender.send(self._selected(update.selection), update)

    def _selected(self, selection: Selection) -> WeightSource:
        source: WeightSource = self.policy if selection == "merged" else self.policy.selected(selection)
        return source

    def share_weights(self, update: Update | None) -> SharedBucket | None:
        """The next bucket of an update in shared memory, where it stays until the next call; None frees the last."""
        found = self._share_weights(update)
        return next((bucket for bucket in found if bucket and bucket.handles), found[0])

    @gathered
    def _share_weights(self, update: Update | None) -> SharedBucket | None:
        assert isinstance(self.sender, SharedMemorySender)
        return self.sender.share(self.policy, update)

    def hold(self, held: Held) -> None:
        """With `rollout.offload_trainer`: what of the models is on the device until the next call."""
        raise NotImplementedError

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face checkpoint. Raises InputError if writing fails."""
        raise NotImplementedError

    def logprobs(self, tokens: TokenIds) -> LogProbs:
        """The log-probs [L - 1] of all tokens but the first with the current weights."""
        raise NotImplementedError
