"""Estimates memory, traffic and time of one layout."""

from dataclasses import dataclass

from dapo_mega.config import RunConfig
from dapo_mega.planning import memory
from dapo_mega.planning.communication import Traffic, step_traffic
from dapo_mega.planning.parameters import num_parameters
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.step_time import Generation, Machine, StepTime, generation, step_time
from dapo_mega.planning.workload import Workload


@dataclass(frozen=True)
class Assumptions:
    """What the configuration does not say. `reserved_bytes` of each GPU are left to CUDA, NCCL and fragmentation.
    Without `engine_tensor` and `engine_gpus` the engines are the configuration's; where it names no size they are as
    small as is sensible."""

    machine: Machine
    mean_prompt: float
    mean_response: float
    engine_tensor: int | None
    engine_gpus: int | None
    reserved_bytes: float


@dataclass(frozen=True)
class Estimate:
    """One layout's memory on every pipeline stage, traffic and time. An engine that is not embedded may take
    `engine_memory` bytes of a GPU for weights and cache, and needs `least_engine_memory`: for one longest response."""

    assumptions: Assumptions
    workload: Workload
    engine: memory.EngineLayout
    engine_memory: float
    least_engine_memory: float
    generation: Generation
    stages: tuple[memory.StageMemory, ...]
    traffic: tuple[Traffic, ...]
    time: StepTime

    @property
    def worst(self) -> memory.StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def available(self) -> float:
        """Bytes of a GPU that the plan may use."""
        return self.assumptions.machine.memory_bytes - self.assumptions.reserved_bytes

    @property
    def engine_fits(self) -> bool:
        return self.engine.is_embedded or self.least_engine_memory <= self.engine_memory

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.available and self.engine_fits


def estimate(config: RunConfig, placement: RankLayout, assumptions: Assumptions) -> Estimate:
    """Memory, traffic and time of `config` in the layout of `placement`."""
    workload = Workload(config, placement, assumptions.mean_prompt, assumptions.mean_response)
    size = num_parameters(placement.arch)
    kind = memory.layer_kind(config)
    engine_memory = _engine_memory(workload, assumptions)
    gpus_per_node = assumptions.machine.gpus_per_node
    tensor = assumptions.engine_tensor or config.rollout.fleet.engine_tensor
    tensor = tensor or memory.smallest_engine(config, placement.arch, engine_memory, gpus_per_node)
    num_gpus = assumptions.engine_gpus or memory.num_engines_of(config, placement.world_size, tensor) * tensor
    engine = memory.engine_of(config, tensor, num_gpus)
    weights, num_engines = memory.engine_weight_bytes(engine, placement.arch), engine.num_engines(placement.data_size)
    return Estimate(
        assumptions,
        workload,
        engine,
        engine_memory,
        weights + workload.longest * memory.cache_bytes_per_token(placement, engine),
        generation(workload, engine, assumptions.machine, max(0.0, engine_memory - weights)),
        tuple(memory.stage_memory(workload, engine, stage) for stage in range(config.parallel.pipeline)),
        tuple(step_traffic(workload, kind, size, num_engines)),
        step_time(workload, assumptions.machine, kind, size, num_engines),
    )


def _engine_memory(workload: Workload, assumptions: Assumptions) -> float:
    """Bytes of a GPU that an awake engine may take; 0 for an embedded engine, which has no share of its own."""
    gpu_bytes = assumptions.machine.memory_bytes
    match workload.config.rollout.placement:
        case "fleet":
            return memory.ENGINE_SHARE * gpu_bytes
        case "colocated":
            held = [memory.trainer_memory(workload, stage) for stage in range(workload.placement.parallel.pipeline)]
            lends = workload.config.rollout.offload_trainer
            resident = max(parts.get("FP8 weights", 0.0) if lends else sum(parts.values()) for parts in held)
            return max(0.0, gpu_bytes - assumptions.reserved_bytes - resident - memory.ASLEEP_BYTES)
    return 0.0
