"""The tracker of newer versions on what 0.16 has in its place."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import moe_utils


class Tracker:
    """Reports the losses of routers, `metrics`, which are kept in a dictionary of Megatron's."""

    @property
    def metrics(self) -> dict[str, Any]:
        """What was collected since it was cleared."""
        collected: dict[str, Any] = moe_utils.get_moe_layer_wise_logging_tracker()
        return collected

    def report(self, **settings: Any) -> None:
        """See Megatron's MoEMetricsTracker. Collective."""
        moe_utils.track_moe_metrics(**settings)
