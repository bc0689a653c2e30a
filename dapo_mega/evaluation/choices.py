"""What a user chooses for an evaluation, what follows from benchmark and model, and the record of all of it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo_mega.config import RunConfig
from dapo_mega.config.base import flat
from dapo_mega.config.files import validated
from dapo_mega.errors import InputError
from dapo_mega.evaluation.benchmarks import EXTRACTION, TEMPLATE, Source, dataset_of
from dapo_mega.evaluation.model_folder import EvaluatedModel
from dapo_mega.evaluation.settings import evaluation_settings
from dapo_mega.types import Prompt

_MAX_TOKENS = 8192
_FREE = ("model",)
"""Where the model lies does not matter, as its hash is compared."""
_PROMPT_SHARE = 4
"""Of the model's context a quarter is left to prompts where the response limit is not given."""


@dataclass(frozen=True)
class Choices:
    """What a user may choose; None: what the benchmark, the model or the tokenizer asks for."""

    samples: int | None = None
    temperature: float = 1.0
    top_p: float = 0.7
    max_tokens: int | None = None
    seed: int = 0
    num_problems: int | None = None
    template: str = TEMPLATE
    extraction: str = EXTRACTION
    chat_template: bool | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def samples_of(self, source: Source) -> int:
        """The k of a benchmark. Raises InputError where greedy responses would all be the same."""
        if self.temperature > 0:
            return self.samples or source.benchmark.samples
        if self.samples not in (None, 1):
            raise InputError(
                f"--temperature 0 gives one response {self.samples} times; leave --k out, or set a temperature"
            )
        return 1

    def max_tokens_of(self, context: int) -> int:
        """The longest response of a model with this context. Raises InputError where it leaves prompts no room."""
        if self.max_tokens is None:
            return min(_MAX_TOKENS, context - context // _PROMPT_SHARE)
        if self.max_tokens >= context:
            raise InputError(
                f"--max-tokens {self.max_tokens} leaves prompts no room in the model's context of {context} tokens; "
                f"give less"
            )
        return self.max_tokens


def configuration(
    choices: Choices, source: Source, model: Path, dtype: str, context: int, *, chat_template: bool
) -> RunConfig:
    """The benchmark as the configuration of a run that only evaluates, so that responses are sampled and scored as in
    training."""
    dataset = dataset_of(source, choices.template, chat_template, choices.template_arguments)
    max_tokens = choices.max_tokens_of(context)
    return validated(
        RunConfig,
        {
            "output_dir": "evaluation",
            "num_steps": 1,
            "seed": choices.seed,
            "model": {"path": str(model), "dtype": dtype},
            "data": {
                "train": dataset.model_dump(),
                "evaluation": dataset.model_dump(),
                "max_prompt_tokens": context - max_tokens,
            },
            "rollout": {"max_response_tokens": max_tokens},
            "batch": {"tokens_per_microbatch": context},
            "reward": {
                "extraction": choices.extraction,
                "numeric_tolerance": source.benchmark.numeric_tolerance,
                "overlong_punishment": False,
            },
            "evaluation": {
                "samples_per_prompt": choices.samples_of(source),
                "temperature": choices.temperature,
                "top_p": choices.top_p,
            },
        },
    )


def record(
    source: Source,
    config: RunConfig,
    prompts: Sequence[Prompt],
    model: EvaluatedModel,
    model_sha256: str,
    surroundings: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that decides the score, as JSON values; `surroundings` are engine and versions. Equal records give
    equal scores, but for what GPUs and their drivers do."""
    return {
        "benchmark": source.benchmark.name,
        "num_problems": len(prompts),
        "problems_sha256": _digest([(prompt.problem, prompt.ground_truth) for prompt in prompts]),
        "prompts_sha256": _digest([prompt.token_ids.tolist() for prompt in prompts]),
        "k": config.evaluation.responses_per_prompt,
        **evaluation_settings(config),
        "model": str(model.path),
        "model_sha256": model_sha256,
        "dtype": config.model.dtype,
        **surroundings,
    }


def refuse_differences(file: Path, now: Mapping[str, Any], *, may_grow: bool) -> None:
    """Raises InputError where the record in `file`, of an earlier start, is another one. `may_grow`: k may be larger
    now."""
    try:
        old, new = flat(json.loads(file.read_text())), flat(now)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}); remove its folder, or give another --output") from error
    found = [
        f"{name} was {old.get(name)} and is {new.get(name)}"
        for name in {**old, **new}
        if name not in _FREE and old.get(name) != new.get(name)
        if not (name == "k" and may_grow and old.get(name, 0) < new["k"])
    ]
    if found:
        raise InputError(
            f"{file.parent} holds responses of other settings: {'; '.join(found)}; give another --output, or the same "
            f"settings to continue"
        )


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, separators=(",", ":")).encode("utf-8", "surrogatepass")).hexdigest()
