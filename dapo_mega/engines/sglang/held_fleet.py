"""A fleet whose engines keep the weights that they hold: for models that are asked and not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from dapo_mega.config import RunConfig
from dapo_mega.engines.sglang.engine_client import EngineInfo
from dapo_mega.engines.sglang.engine_fit import size_difference
from dapo_mega.engines.sglang.engine_model import model_difference
from dapo_mega.engines.sglang.fleet_client import FleetClient
from dapo_mega.engines.sglang.membership import Member, Membership
from dapo_mega.engines.sglang.versions import HeldWeights
from dapo_mega.models import Architecture
from dapo_mega.types import Answer, GenerationRequest

_POLL_S = 0.5


class _HoldingMembership(Membership):
    """Engines serve as soon as they have joined, with the weights that the first of them held. Others may use them."""

    _takes_over = False
    _held: HeldWeights | None = None

    def _difference(self, info: EngineInfo) -> str:
        held = self._held or HeldWeights(info.weight_version)
        if info.weight_version != held.name:
            return (
                f"it holds weights {info.weight_version!r}, and the others {held.name!r}; give engines with the same "
                f"model, which nobody updates"
            )
        difference = size_difference(info, self._config, self._vocab_size)
        return difference or (model_difference(info.model, self._arch) if self._arch else "")

    def _check_foreign(self, url: str, member: Member, info: EngineInfo, is_new: bool) -> None:
        """Whose weights they are does not matter."""

    def _admit(self, member: Member, info: EngineInfo) -> None:
        self._held = self._held or HeldWeights(info.weight_version)
        member.state, member.version, member.reason = "serving", 0, ""
        self.dispatcher.add_engine(member.client, 0, self._held)


class HeldFleet:
    """Asks the engines of `rollout.fleet.urls`, with no weights sent and nothing of theirs changed."""

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        api_key: str,
        arch: Architecture | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """As `FleetClient`; the engines' models must have the sizes `arch`."""
        fleet = config.rollout.fleet
        self._window = 2 * fleet.requests_per_engine * max(len(fleet.urls), 1)
        self._client = FleetClient(config, vocab_size, api_key, "", arch, check_stop, _HoldingMembership)

    def answers(self, batches: Iterable[list[GenerationRequest]]) -> Iterator[Answer]:
        """One answer per request, as they come; batches are taken as there is room.

        Raises FleetError when too few engines are reachable for longer than `rollout.fleet.wait_limit_s`.
        """
        waiting = chain.from_iterable(batches)
        num_open = 0
        while True:
            more = list(islice(waiting, self._window - num_open))
            if more:
                self._client.submit(more)
                num_open += len(more)
            if not num_open:
                return
            self._client.wait_for_engines()
            if answer := self._client.next_answer(_POLL_S):
                num_open -= 1
                yield answer

    def close(self) -> None:
        """Disconnect from the engines, which keep running."""
        self._client.close()
