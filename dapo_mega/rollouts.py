"""Builds what generates and how weights get there, by `rollout.placement`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dapo_mega.config import RunConfig
from dapo_mega.handover import leaving_together
from dapo_mega.policy.hf_export import save_hf_checkpoint
from dapo_mega.policy.megatron_policy import MegatronPolicy
from dapo_mega.policy.processes import Processes
from dapo_mega.rollout.embedded import EmbeddedEngine
from dapo_mega.rollout.embedded_fleet import EmbeddedFleet
from dapo_mega.rollout.engine import RolloutFleet, StreamingEngine
from dapo_mega.types import Prompt
from dapo_mega.weight_sync.push import EmbeddedWeightSync, WeightSync


@dataclass(frozen=True)
class Rollouts:
    """The engines of a run and the way of the policy's weights to them. `streaming_engine` is rank 0's fleet where it
    answers requests one by one."""

    fleet: RolloutFleet
    weight_sync: WeightSync
    streaming_engine: StreamingEngine | None = None


def start_rollouts(
    config: RunConfig, policy: MegatronPolicy, prompts: Sequence[Prompt], check_stop: Callable[[], None]
) -> Rollouts:
    """What generates in this run, on every process. `prompts` are those that it trains on; `check_stop` raises
    StopRequested when the run is to stop.

    Raises InputError, on all processes, for a missing API key or a rendezvous that cannot be listened on.
    """
    if config.rollout.placement == "embedded":
        return _embedded(config, policy.processes, check_stop)
    return _fleet(config, policy, prompts, check_stop)


def _embedded(config: RunConfig, processes: Processes, check_stop: Callable[[], None]) -> Rollouts:
    engine = None
    if processes.is_leader:
        dtype = torch.bfloat16 if config.engine_dtype == "bf16" else torch.float32
        engine = EmbeddedEngine.from_config(
            config.model.path,
            dtype,
            max_batch_rows=config.rollout.max_batch_rows,
            device=processes.device,
            check_stop=check_stop,
        )
    fleet = EmbeddedFleet(processes, engine)
    return Rollouts(fleet, EmbeddedWeightSync(fleet, config.weight_sync.bucket_mib))


def _fleet(
    config: RunConfig, policy: MegatronPolicy, prompts: Sequence[Prompt], check_stop: Callable[[], None]
) -> Rollouts:
    from dapo_mega.rollout.fleet_driver import FleetDriver
    from dapo_mega.rollout.registry import require_api_key
    from dapo_mega.rollout.sglang_fleet import SglangFleet
    from dapo_mega.rollout.versions import run_name
    from dapo_mega.weight_sync.agreement import PolicyAgreement
    from dapo_mega.weight_sync.fleet_sync import FleetWeightSync
    from dapo_mega.weight_sync.transports import make_transport

    processes = policy.processes
    driver = None
    run = run_name(config.output_dir)
    with leaving_together(processes.control):
        if processes.rank == 0:
            key = require_api_key(config.rollout.fleet.api_key_env)
            driver = FleetDriver(config, policy.arch.vocab_size, key, run, policy.arch, check_stop)
    fleet = SglangFleet(processes, driver)
    transport = make_transport(config, processes, lambda folder: save_hf_checkpoint(policy, folder))
    weight_sync = FleetWeightSync(
        processes, driver, config.weight_sync, transport, run, PolicyAgreement(policy, config, prompts)
    )
    return Rollouts(fleet, weight_sync, fleet if driver else None)
