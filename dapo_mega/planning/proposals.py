"""Proposes layouts of a number of GPUs that fit into memory, fastest first."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from dapo_mega.config import ParallelConfig, RunConfig, divisors
from dapo_mega.errors import InputError
from dapo_mega.planning.estimate import Assumptions, Estimate, estimate
from dapo_mega.planning.rank_layout import RankLayout

_RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Proposal:
    """One layout that fits, and what limits its speed."""

    settings: dict[str, object]
    estimate: Estimate

    def overrides(self, config: RunConfig) -> list[str]:
        """What to add to `config` for this layout, as `key=value` of a command line."""
        before = _settings(config)
        return [override(name, value) for name, value in self.settings.items() if value != before.get(name)]

    @property
    def reason(self) -> str:
        time = self.estimate.time
        parts = {
            "computing": time.scoring + time.updates,
            "the pipeline's bubble": time.bubble,
            "communication": time.communication + time.weights,
        }
        text = ", ".join(f"{seconds / time.total:.0%} {name}" for name, seconds in parts.items() if seconds > 0)
        traffic = max(self.estimate.traffic, key=self.estimate.assumptions.machine.seconds, default=None)
        return f"{text}; most sent: {traffic.name}" if traffic else text


def propose(config: RunConfig, base: RankLayout, assumptions: Assumptions) -> tuple[list[Proposal], int]:
    """The layouts that fit, fastest first, and how many valid ones were looked at.

    Of one layout the least recompute that fits is kept: more of it only costs time.
    """
    proposals, num_valid = [], 0
    # Selective leaves out the MLP or the experts: with flash attention the rest saves next to nothing.
    modules = ("moe",) if base.arch.experts else ("mlp",)
    for parallel in valid_layouts(base):
        num_valid += 1
        for recompute in _RECOMPUTES:
            compute = config.compute.model_copy(update={"recompute": recompute, "recompute_modules": modules})
            candidate = config.model_copy(update={"parallel": parallel, "compute": compute})
            result = estimate(candidate, RankLayout(base.arch, parallel, base.world_size), assumptions)
            if result.fits:
                proposals.append(Proposal(_settings(candidate), result))
                break
    return sorted(proposals, key=lambda proposal: proposal.estimate.time.total), num_valid


def valid_layouts(base: RankLayout) -> Iterator[ParallelConfig]:
    """Every layout that the configuration and the model accept; tensor parallelism always with sequence parallelism."""
    world_size, arch = base.world_size, base.arch
    for tensor in divisors(world_size):
        for pipeline in divisors(world_size // tensor):
            for context in divisors(world_size // (tensor * pipeline)):
                for expert, expert_tensor in _expert_sizes(base, tensor, pipeline):
                    for virtual in divisors(max(1, arch.num_layers // pipeline)) if pipeline > 1 else [1]:
                        if virtual > 4:
                            continue
                        sizes = {"tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual}
                        sizes |= {"context": context, "expert": expert, "expert_tensor": expert_tensor}
                        with contextlib.suppress(ValidationError, InputError):
                            sizes |= {"sequence": tensor > 1, "world_size": world_size}
                            parallel = ParallelConfig.model_validate(sizes)
                            arch.check_layout(parallel)
                            yield parallel


def _expert_sizes(base: RankLayout, tensor: int, pipeline: int) -> list[tuple[int, int]]:
    if base.arch.experts is None:
        return [(1, 1)]
    stage_size = base.world_size // pipeline
    return [(expert, cut) for expert in divisors(stage_size) for cut in sorted({1, tensor}) if stage_size % cut == 0]


def _settings(config: RunConfig) -> dict[str, object]:
    parallel, compute = config.parallel.model_dump(), config.compute
    settings: dict[str, object] = {f"parallel.{name}": value for name, value in parallel.items()}
    settings["compute.recompute"] = compute.recompute
    if compute.recompute == "selective":
        settings["compute.recompute_modules"] = compute.recompute_modules
    return settings


def override(key: str, value: object) -> str:
    """`key=value` of a command line."""
    text = f"[{','.join(value)}]" if isinstance(value, tuple) else "null" if value is None else str(value).lower()
    return f"{key}={text}"
