"""What is compared: the rows of the paper's Table 1, each with one technique more than the row before, and the presets.

An arm is a list of `section.key=value` overrides of a run's file, as a user could type them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dapo_mega.config import PRESETS, AlgorithmConfig
from dapo_mega.config.choices import owner_of
from dapo_mega.errors import InputError

Group = Literal["ladder", "methods"]


@dataclass(frozen=True)
class Rung:
    """A row of Table 1. `keys`: what its technique sets, with the values without it and with it. `paper` is the row's
    accuracy in the paper, in percent (AIME 2024, avg@32)."""

    name: str
    title: str
    paper: int
    keys: Mapping[str, tuple[Any, Any]]


LADDER = (
    Rung("naive_grpo", "Naive GRPO", 30, {}),
    Rung("overlong_filtering", "+ Overlong Filtering", 36, {"reward.overlong_filtering": (False, True)}),
    Rung("clip_higher", "+ Clip-Higher", 38, {"algorithm.policy_loss.high": (0.2, 0.28)}),
    Rung("soft_overlong_punishment", "+ Soft Overlong Punishment", 41, {"reward.overlong_punishment": (False, True)}),
    Rung("token_level_loss", "+ Token-level Loss", 42, {
        "algorithm.aggregation": ("sequence_mean_token_mean", "token_mean"),
    }),
    Rung("dynamic_sampling", "+ Dynamic Sampling (DAPO)", 50, {"algorithm.dynamic_sampling": (False, True)}),
)  # fmt: skip
"""Table 1 in its order. The first row has DAPO's advantage, its dual clip and no KL penalty, as all other rows."""

METHODS: tuple[str, ...] = get_args(AlgorithmConfig.model_fields["preset"].annotation)


@dataclass(frozen=True)
class Arm:
    """Settings to compare with others. `first` stands before a user's overrides, `last` after them."""

    group: Group
    name: str
    title: str
    first: tuple[str, ...]
    last: tuple[str, ...] = ()
    paper: int | None = None


def ladder(names: Sequence[str], given: Mapping[str, Any], overrides: Sequence[str]) -> list[Arm]:
    """The rows with these names, in the paper's order. `given` is the section `algorithm` of the file.

    Raises InputError for unknown names, and for overrides of what the ladder changes.
    """
    _refuse_unknown(names, [rung.name for rung in LADDER], "--rows")
    decided = {key for rung in LADDER for key in rung.keys}
    keys = [override.partition("=")[0].strip() for override in overrides]
    owners = (owner_of(AlgorithmConfig, key.removeprefix("algorithm.")) for key in keys)
    keys += [f"algorithm.{'.'.join(owner)}" for owner in owners if owner]
    if taken := sorted(decided & set(keys)):
        raise InputError(f"{', '.join(taken)}: the rows of the ladder set this themselves; leave the override out")
    start = preset_overrides("dapo", given)
    arms = []
    for index, rung in enumerate(LADDER):
        # Its own technique and those of the rows before are on, the others are off.
        last = tuple(
            _override(key, values[number <= index])
            for number, each in enumerate(LADDER)
            for key, values in each.keys.items()
        )
        arms.append(Arm("ladder", rung.name, rung.title, start, last, rung.paper))
    return [arm for arm in arms if arm.name in names]


def methods(names: Sequence[str], given: Mapping[str, Any]) -> list[Arm]:
    """The presets with these names, in the order of the configuration's list. Raises InputError for unknown names."""
    _refuse_unknown(names, METHODS, "--methods")
    return [Arm("methods", name, name, preset_overrides(name, given)) for name in METHODS if name in names]


def preset_overrides(preset: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Overrides that make the algorithm this preset, whatever the section `given` of the file says.

    Keys that no preset sets stay as the file has them.
    """
    own = AlgorithmConfig.model_validate({"preset": preset}).model_dump(mode="json")
    return (f"algorithm.preset={preset}", *(_override(f"algorithm.{key}", own[key]) for key in reset_keys(given)))


def reset_keys(given: Mapping[str, Any]) -> list[str]:
    """The keys of the section `given` that some preset sets, so that all arms set them."""
    decided = _keys(key for values in PRESETS.values() for key in values)
    return [key for key in _keys(given) if key in decided]


def _keys(names: Iterable[str]) -> list[str]:
    """Keys of the section `algorithm`, those that earlier versions had as those of the choices in which they are."""
    owners = ((name, owner_of(AlgorithmConfig, name)) for name in names)
    return list(dict.fromkeys(owner[0] if owner else name for name, owner in owners))


def _override(key: str, value: Any) -> str:
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _refuse_unknown(names: Sequence[str], known: Sequence[str], option: str) -> None:
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"{option} {' '.join(unknown)}: there is no such; choose of {', '.join(known)}")
