"""Gather -> bucket -> push: after every step the engines get the policy's weights under a new version."""

from __future__ import annotations

import time

from dapo_mega.policy.megatron_policy import MegatronPolicy
from dapo_mega.rollout.engine import RolloutEngine


class WeightSync:
    """Numbers the policy's weights and streams them to the engines. Version 0 are the weights a run starts from."""

    def __init__(self, engine: RolloutEngine, bucket_mib: float) -> None:
        self._engine = engine
        self._bucket_bytes = int(bucket_mib * 2**20)

    def push(self, policy: MegatronPolicy, version: int) -> dict[str, float]:
        """Collective over all processes; returns when the engines sample from the new weights."""
        started = time.perf_counter()
        self._engine.load_weights(policy.weights(self._bucket_bytes), version)
        return {"time/weight_sync_s": time.perf_counter() - started}
