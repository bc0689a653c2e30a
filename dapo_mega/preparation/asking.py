"""Asks a model the prompts of a prepared dataset: how they are read, what decides the responses, and who gives them."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_mega.config import DatasetConfig, RunConfig
from dapo_mega.config.fleet import require_api_key
from dapo_mega.data import load_prompts
from dapo_mega.data.readers import Row
from dapo_mega.errors import InputError
from dapo_mega.evaluation.model_folder import model_hash
from dapo_mega.models import load_architecture
from dapo_mega.preparation.card import DATA
from dapo_mega.preparation.output import read_dataset
from dapo_mega.types import Prompt

if TYPE_CHECKING:
    from dapo_mega.evaluation.sampling import Sampler

logger = logging.getLogger(__name__)


def prompts_of(config: RunConfig, source: Path, tokenizer: Any) -> tuple[RunConfig, Sequence[Prompt]]:
    """The configuration as it reads the prepared dataset `source`, and one prompt for each of its rows, in order."""
    config = _as_prepared(config, next(iter(read_dataset(source)[1]), {}))
    changes = {"path": str(source / DATA), "deduplicate": False, "max_rows": None}
    return config, load_prompts(dataset_of(config).model_copy(update=changes), tokenizer, 10**9).prompts


def check_lengths(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raises InputError for prompts that leave no room for the longest response."""
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    limit, response = load_architecture(Path(config.model.path))[1].max_positions, config.rollout.max_response_tokens
    if longest + response > limit:
        raise InputError(
            f"the longest prompt has {longest} tokens, which with rollout.max_response_tokens={response} is more than "
            f"the model's {limit} positions; lower it, or lower data.max_prompt_tokens, which drops long prompts"
        )


def asking_settings(config: RunConfig) -> dict[str, Any]:
    """What decides the responses of a model and their verdicts, as JSON values without paths."""
    rollout = config.rollout
    is_embedded = rollout.placement == "embedded"
    return {
        "model": Path(config.model.path).resolve().name,
        "model_fingerprint": model_hash(Path(config.model.path)),
        "engine": "embedded" if is_embedded else "sglang",
        **({"dtype": config.engine_dtype, "max_batch_rows": rollout.max_batch_rows} if is_embedded else {}),
        "seed": config.seed,
        "sampling": rollout.model_dump(include={"temperature", "top_p", "top_k", "max_response_tokens"}),
        **({"stop": list(rollout.stop)} if rollout.stop else {}),
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "data": dataset_of(config).model_dump(mode="json", exclude={"path", "deduplicate", "max_rows", "split"}),
        "reward": config.reward.for_evaluation().model_dump(mode="json", exclude={"num_workers"}),
    }


def dataset_of(config: RunConfig) -> DatasetConfig:
    """How the prompts are asked. Raises InputError for a mixture."""
    if config.data.train is None:
        raise InputError(
            "the run of --config has a mixture of datasets, which does not say how this one is asked; give a file with "
            "data.train, or leave --config out"
        )
    return config.data.train


def _as_prepared(config: RunConfig, first: Mapping[str, Any]) -> RunConfig:
    """The run's `data.train` with the columns that every prepared dataset has, where it names others that this one
    lacks, as those of the file that it was prepared from."""
    own, row = dataset_of(config), Row("", 0, first)
    lacking = [name for name in ("prompt", "ground_truth") if row.optional(getattr(own.columns, name)) is None]
    if not lacking:
        return config
    usual = type(own.columns)()
    changes: dict[str, Any] = {"columns": own.columns.model_copy(update={n: getattr(usual, n) for n in lacking})}
    if "ground_truth" in lacking and own.ground_truth_style != "unchecked":  # Prepared truths are bare answers.
        changes["ground_truth_style"] = type(own).model_fields["ground_truth_style"].default
    logger.info("the dataset has no column %r; read as prepared", getattr(own.columns, lacking[0]))
    data = config.data.model_copy(update={"train": own.model_copy(update=changes)})
    return config.model_copy(update={"data": data})


def sampler_of(config: RunConfig, prompts: Sequence[Prompt]) -> "Sampler":
    """The model of `model.path`: inside this process for `rollout.placement=embedded`, else in the engines of
    `rollout.fleet.urls`."""
    if config.rollout.placement == "embedded":
        import torch

        from dapo_mega.evaluation.sampling import EmbeddedSampler

        if config.threads_per_process:
            torch.set_num_threads(config.threads_per_process)
        return EmbeddedSampler(Path(config.model.path), config.engine_dtype, config.rollout.max_batch_rows)
    fleet = config.rollout.fleet
    if not fleet.urls:
        raise InputError("rollout.fleet.urls names no engine; give the URLs of engines that run")
    from dapo_mega.evaluation.fleet import FleetSampler, with_engines

    return FleetSampler(with_engines(config, **fleet.model_dump()), prompts, require_api_key(fleet.api_key_env))


def pass_rate_summary(rates: Sequence[float], samples: int) -> dict[str, Any]:
    """The mean pass rate, and how many prompts had how many correct responses, before any were dropped."""
    if not rates:
        return {}
    counts = Counter(round(rate * samples) for rate in rates)
    return {
        "mean_pass_rate": math.fsum(rates) / len(rates),
        "prompts_by_correct_responses": {str(n): counts[n] for n in sorted(counts)},
    }


def check_range(rates: tuple[float, float]) -> None:
    """Raises InputError for what is no range of pass rates."""
    lowest, highest = rates
    if not 0 <= lowest <= highest <= 1:
        raise InputError(f"pass rates from {lowest:g} to {highest:g} are no range within 0 to 1, such as 0.1..0.9")


def parse_range(text: str) -> tuple[float, float]:
    """(lowest, highest) of `0.1..0.9`. Raises InputError."""
    lowest, dots, highest = text.partition("..")
    try:
        return float(lowest), float(highest if dots else "")
    except ValueError:
        raise InputError(f"{text!r} is no range of pass rates; give one such as 0.1..0.9") from None
