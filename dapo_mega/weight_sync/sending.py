"""What a trainer is commanded to do to send weights to engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dapo_mega.distributed.commands import Commanded, command, gathered
from dapo_mega.engines.sglang.weight_protocol import PlannedBucket
from dapo_mega.weight_sync.broadcast import BroadcastSender
from dapo_mega.weight_sync.shared_memory import SharedMemorySender
from dapo_mega.weight_sync.update import Sent, SharedBucket, Update, WeightSender


class WeightCommands(Commanded):
    """Implements the sending part of `SendingTrainer` with each process's `sender`, and its `policy`, which is a
    `WeightSource`."""

    policy: Any
    sender: WeightSender | None = None

    @command
    def weight_plan(self, *, have_plugin: bool) -> list[list[PlannedBucket]]:
        """See `SendingTrainer`."""
        assert isinstance(self.sender, BroadcastSender)
        return self.sender.plan(self.policy, have_plugin=have_plugin)

    @command
    def send_weights(self, update: Update, forgotten: Sequence[str]) -> Sent:
        """See `SendingTrainer`."""
        assert isinstance(self.sender, BroadcastSender)
        self.sender.forget(forgotten)
        return self.sender.send(self.policy, update)

    def share_weights(self, update: Update | None) -> SharedBucket | None:
        """See `SendingTrainer`."""
        found = self._share_weights(update)
        return next((bucket for bucket in found if bucket and bucket.handles), found[0])

    @gathered
    def _share_weights(self, update: Update | None) -> SharedBucket | None:
        assert isinstance(self.sender, SharedMemorySender)
        return self.sender.share(self.policy, update)
