"""Everything that is estimated for one layout."""

from __future__ import annotations

from dataclasses import dataclass

from dapo_mega.config import RunConfig
from dapo_mega.planning.communication import Traffic, step_traffic
from dapo_mega.planning.memory import EngineLayout, StageMemory, engine_of, layer_kind, stage_memory
from dapo_mega.planning.parameters import num_parameters
from dapo_mega.planning.placement import Placement
from dapo_mega.planning.step_time import Machine, StepTime, step_time
from dapo_mega.planning.workload import Workload


@dataclass(frozen=True)
class Assumptions:
    """What the configuration does not say. `reserved_bytes` of each GPU are left to CUDA, NCCL and fragmentation."""

    machine: Machine
    mean_prompt: float
    mean_response: float
    engine_tensor: int
    engine_gpus: int
    reserved_bytes: float


@dataclass(frozen=True)
class Estimate:
    """One layout's memory on every pipeline stage, traffic and time."""

    assumptions: Assumptions
    workload: Workload
    engine: EngineLayout
    stages: tuple[StageMemory, ...]
    traffic: tuple[Traffic, ...]
    time: StepTime

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def available(self) -> float:
        """Bytes of a GPU that the plan may use."""
        return self.assumptions.machine.memory_bytes - self.assumptions.reserved_bytes

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.available


def estimate(config: RunConfig, placement: Placement, assumptions: Assumptions) -> Estimate:
    """Memory, traffic and time of `config` in the layout of `placement`."""
    workload = Workload(config, placement, assumptions.mean_prompt, assumptions.mean_response)
    engine = engine_of(config, assumptions.engine_tensor, assumptions.engine_gpus)
    size = num_parameters(placement.arch)
    kind = layer_kind(config)
    return Estimate(
        assumptions,
        workload,
        engine,
        tuple(stage_memory(workload, engine, size, stage) for stage in range(config.parallel.pipeline)),
        tuple(step_traffic(workload, kind, size)),
        step_time(workload, assumptions.machine, kind, size),
    )
