"""Divides a number of GPUs between trainer and engines: in turns on all of them, or each on GPUs of its own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from dapo_mega.config import ParallelConfig, RunConfig
from dapo_mega.planning.estimate import Assumptions, Estimate, estimate
from dapo_mega.planning.proposals import Proposal, override, propose
from dapo_mega.planning.rank_layout import RankLayout

if TYPE_CHECKING:
    from dapo_mega.models import Architecture

RENDEZVOUS = "trainer-0:21600"
"""The address that proposals name where the configuration has none."""

_ENGINE_KEYS = (
    "rollout.placement", "rollout.fleet.urls", "rollout.fleet.rendezvous", "rollout.fleet.min_engines",
    "rollout.fleet.engine_tensor", "weight_sync.transport",
)  # fmt: skip


@dataclass(frozen=True)
class Division:
    """One way to divide GPUs, with the trainer's fastest layout; `num_rounds` of generation fill a step."""

    config: RunConfig
    trainer: Proposal
    num_rounds: float

    @property
    def plan(self) -> Estimate:
        return self.trainer.estimate

    @property
    def num_engines(self) -> int:
        return self.plan.engine.num_engines(self.plan.workload.placement.data_size)

    @property
    def generation_seconds(self) -> float:
        """Of one step: each round lasts until its longest response has ended."""
        return self.num_rounds * self.plan.generation.seconds

    @property
    def seconds(self) -> float:
        """Of one step of the synchronous schedule: generation, then training and sending the weights."""
        return self.generation_seconds + self.plan.time.total

    def overrides(self, config: RunConfig) -> list[str]:
        """What to add to `config` for this division, as `key=value` of a command line."""
        own, before = (
            {key: reduce(getattr, key.split("."), each) for key in _ENGINE_KEYS} for each in (self.config, config)
        )
        changed = [override(key, value) for key, value in own.items() if value != before[key]]
        return changed + self.trainer.overrides(config)


def divide(
    config: RunConfig, arch: "Architecture", num_gpus: int, assumptions: Assumptions, num_rounds: float
) -> list[Division]:
    """Every division of `num_gpus` that fits, fastest first. GPUs of several machines are divided by machines.

    Of the layouts that a division's trainer may have the fastest is kept, with engines of every size that divides
    their GPUs, or of `assumptions.engine_tensor`.
    """
    found = [*in_turns(config, arch, num_gpus, assumptions, num_rounds)]
    unit = machine_size(num_gpus, assumptions)
    trainers = range(unit, num_gpus, unit)
    found += side_by_side(config, arch, num_gpus, assumptions, num_rounds, trainers)
    return sorted(found, key=lambda division: division.seconds)


def machine_size(num_gpus: int, assumptions: Assumptions) -> int:
    """The GPUs by which so many are divided: a machine's, if they are of several."""
    gpus_per_node = assumptions.machine.gpus_per_node
    return gpus_per_node if num_gpus > gpus_per_node else 1


def in_turns(
    config: RunConfig, arch: "Architecture", num_gpus: int, assumptions: Assumptions, num_rounds: float
) -> Iterator[Division]:
    """Engines asleep on the trainer's GPUs while it trains. Memory is shared within a machine only."""
    transport = "auto" if num_gpus <= assumptions.machine.gpus_per_node else "disk"
    for tensor in _engine_sizes(num_gpus, assumptions):
        candidate = _with_engines(config, "colocated", num_gpus // tensor, tensor, transport)
        given = replace(assumptions, engine_tensor=tensor, engine_gpus=num_gpus)
        proposals, _ = propose(candidate, RankLayout(arch, ParallelConfig(), num_gpus), given)
        # How much cache an engine has depends on the layout, so the fastest trainer may have slow engines.
        divisions = (Division(candidate, proposal, num_rounds) for proposal in proposals)
        yield from sorted(divisions, key=lambda division: division.seconds)[:1]


def side_by_side(
    config: RunConfig,
    arch: "Architecture",
    num_gpus: int,
    assumptions: Assumptions,
    num_rounds: float,
    trainers: Iterable[int],
) -> Iterator[Division]:
    """Engines on GPUs of their own, which the trainer's layout does not change; `trainers` are its GPUs to try."""
    for trainer_gpus in trainers:
        engine_gpus = num_gpus - trainer_gpus
        trainer: Proposal | None = None
        # The largest engine first: where it does not fit, none does.
        for tensor in reversed(_engine_sizes(engine_gpus, assumptions)):
            candidate = _with_engines(config, "fleet", engine_gpus // tensor, tensor, "auto")
            given = replace(assumptions, engine_tensor=tensor, engine_gpus=engine_gpus)
            if trainer is None:
                proposals, _ = propose(candidate, RankLayout(arch, ParallelConfig(), trainer_gpus), given)
                if not proposals:
                    break
                trainer = proposals[0]
            layout = trainer.estimate.workload
            plan = estimate(layout.config, layout.placement, given)
            if not plan.fits:
                break
            yield Division(candidate, Proposal(trainer.settings, plan), num_rounds)


def _engine_sizes(num_gpus: int, assumptions: Assumptions) -> list[int]:
    """Tensor-parallel sizes of engines on `num_gpus`, smallest first: powers of two within a machine, or the given."""
    powers = (1 << power for power in range(assumptions.machine.gpus_per_node.bit_length()))
    sizes = [assumptions.engine_tensor] if assumptions.engine_tensor else powers
    return [size for size in sizes if num_gpus % size == 0]


def _with_engines(config: RunConfig, placement: str, num_engines: int, tensor: int, transport: str) -> RunConfig:
    """`config` with engines that register, so that no addresses need be known."""
    given = config.rollout.fleet
    engines = {"urls": (), "min_engines": num_engines, "engine_tensor": tensor}
    fleet = given.model_copy(update={"rendezvous": given.rendezvous or RENDEZVOUS, **engines})
    rollout = config.rollout.model_copy(update={"placement": placement, "fleet": fleet})
    sync = config.weight_sync.model_copy(update={"transport": transport})
    return config.model_copy(update={"rollout": rollout, "weight_sync": sync})
