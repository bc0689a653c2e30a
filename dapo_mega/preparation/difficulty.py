"""How hard prompts are for a model: the share of its responses that are correct (Kimi k1.5, arXiv 2501.12599, section
2.1, takes 10 responses per prompt)."""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dapo_mega.config import RunConfig
from dapo_mega.data import load_tokenizer
from dapo_mega.data.tokenizer import decoder, num_ids, stop_tokens
from dapo_mega.errors import FleetError, InputError
from dapo_mega.metrics.run_text import installed_versions
from dapo_mega.preparation.asking import (
    asking_settings,
    check_lengths,
    check_range,
    pass_rate_summary,
    prompts_of,
    sampler_of,
)
from dapo_mega.preparation.card import DECIDING_PACKAGES, Card
from dapo_mega.preparation.journal import Journal, journal_of, open_journal
from dapo_mega.preparation.output import DroppedFormat, check_folder, new_dataset, read_dataset
from dapo_mega.rewards.build import make_reward
from dapo_mega.rewards.trial import try_reward
from dapo_mega.rollout.asking import DIFFICULTY_IDS, Numbering, Rollout, ask_in_parts
from dapo_mega.rollout.scoring import ResponseScorer, trial_record
from dapo_mega.types import GenerationFailure, Prompt, SamplingParams, ScoredTrajectory

logger = logging.getLogger(__name__)

MADE_BY: Final = "prepare difficulty"
_REPORT_EVERY_S: Final = 60.0


@dataclass(frozen=True)
class DifficultyOptions:
    """`samples` responses are drawn per prompt. `column` is the name of the pass rate's column, and begins those of its
    counts. Prompts with a pass rate outside of `keep` (lowest, highest) are dropped. `drop_failed`: leave out prompts
    with responses that could not be had or scored, in place of an error. For the others see `new_dataset`."""

    samples: int
    column: str = "difficulty"
    keep: tuple[float, float] = (0.0, 1.0)
    drop_failed: bool = False
    dropped: DroppedFormat | None = None
    force: bool = False


@dataclass(frozen=True)
class Measured:
    """Of one prompt's responses, how many were drawn, correct, and cut off at the longest length."""

    samples: int
    correct: int
    truncated: int

    @property
    def pass_rate(self) -> float:
        return self.correct / self.samples


def measure_difficulty(config: RunConfig, source: Path, output: Path, options: DifficultyOptions) -> Card:
    """Write the rows of the prepared dataset `source` with their pass rates to the folder `output`; returns its card.

    The sections of `config` that count are model, data.train (but for its path), rollout, reward and seed. Results
    are kept in a journal beside `output`. Raises InputError for what cannot be used, a journal of another call among
    it, and FleetError if engines are gone or did not answer.
    """
    if options.samples < 1:
        raise InputError(f"{options.samples} samples per prompt say nothing; give 1 or more")
    lowest, highest = options.keep
    check_range(options.keep)
    check_folder(output, force=options.force)
    parent, rows = read_dataset(source)
    tokenizer = load_tokenizer(config.model.path)
    config, prompts = prompts_of(config, source, tokenizer)
    settings = {**asking_settings(config), "samples": options.samples}
    is_long = [len(prompt.token_ids) > config.data.max_prompt_tokens for prompt in prompts]
    depends_on = {"made_by": MADE_BY, "dataset_sha256": parent.data.sha256, **settings}
    with open_journal(journal_of(output), depends_on) as journal:
        short = [prompt for prompt in prompts if not is_long[prompt.index]]
        check_lengths(config, short)
        failures = _measure(config, short, tokenizer, options.samples, journal)
        if failures and not options.drop_failed:
            raise FleetError(
                f"{len(failures)} prompts have responses that could not be had or scored, lastly: "
                f"{list(failures.values())[-1]}; the same command tries these again; --drop-failed leaves them out"
            )
        with new_dataset(output, options.dropped, force=options.force) as writer:
            rates = []
            for number, values in enumerate(rows):
                where = f"{source}, row {number}"
                if is_long[number]:
                    length = f"{len(prompts[number].token_ids)} tokens"
                    writer.drop("long_prompt", length, where, values)
                elif number in failures:
                    writer.drop("failed", failures[number], where, values)
                else:
                    found = Measured(**journal.entries[number])
                    rates.append(found.pass_rate)
                    if not lowest <= found.pass_rate <= highest:
                        reason = "too_hard" if found.pass_rate < lowest else "too_easy"
                        writer.drop(reason, f"{found.correct} of {found.samples} are correct", where, values)
                    else:
                        writer.keep(_with_columns(values, found, options.column, where), where)
            card = writer.finish(
                MADE_BY,
                settings={**settings, "column": options.column, "keep": list(options.keep)},
                versions=installed_versions(DECIDING_PACKAGES),
                details=pass_rate_summary(rates, options.samples),
                parent=parent,
            )
        journal.remove()
    return card


def _measure(
    config: RunConfig, prompts: Sequence[Prompt], tokenizer: Any, samples: int, journal: Journal
) -> dict[int, str]:
    """Bring every prompt's result into the journal; the reasons of those where that failed, by row."""
    # In this process the answers of a batch depend on each other by rounding, so it is decoded again as a whole.
    per_batch = max(1, config.rollout.max_batch_rows // samples) if config.rollout.placement == "embedded" else 1
    batches = [prompts[start : start + per_batch] for start in range(0, len(prompts), per_batch)]
    todo = [batch for batch in batches if any(prompt.index not in journal.entries for prompt in batch)]
    if not todo:
        return {}
    num_open = sum(prompt.index not in journal.entries for batch in todo for prompt in batch)
    logger.info("%d of %d prompts are measured already", len(prompts) - num_open, len(prompts))
    with contextlib.closing(make_reward(config, for_evaluation=True)) as reward:
        needs = "a pass rate needs that; give a reward that does"
        try_reward(reward, trial_record(prompts[0]), needs_correctness=needs)
        scorer = ResponseScorer(config.reward.for_evaluation(), reward, decoder(tokenizer), num_open * samples)
        rollout, ends = config.rollout, stop_tokens(Path(config.model.path), tokenizer)
        limits = rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_response_tokens
        sampling = SamplingParams(*limits, ends, num_ids(tokenizer), rollout.stop)
        numbering = Numbering(DIFFICULTY_IDS, samples, config.seed, sampling)
        parts = ((n, [(p, r) for p in batch for r in numbering.of(p.index, p)]) for n, batch in enumerate(todo))
        failures: dict[int, str] = {}
        reported = time.monotonic()

        def keep(number: int, rollouts: Sequence[Rollout]) -> None:
            nonlocal reported
            for place, prompt in enumerate(todo[number]):
                row = prompt.index
                if row in journal.entries:
                    continue
                found = _measured(prompt, rollouts[place * samples : (place + 1) * samples], scorer)
                if isinstance(found, str):
                    failures[row] = found
                else:
                    journal.add(row, asdict(found))
            if time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                logger.info("%d prompts are measured, %d failed", len(journal.entries), len(failures))

        with contextlib.closing(sampler_of(config, prompts)) as sampler:
            sampler.run(ask_in_parts(sampler.generate, parts, keep, sampler.most_open))
    return failures


def _measured(prompt: Prompt, rollouts: Sequence[Rollout], scorer: ResponseScorer) -> Measured | str:
    answered = []
    for rollout in rollouts:
        if isinstance(rollout, GenerationFailure):
            return rollout.reason
        answered.append(rollout)
    verdicts = []
    for result in scorer.score([(prompt, trajectory) for trajectory in answered]):
        if not isinstance(result, ScoredTrajectory):
            return result.reason
        if result.correct is None:
            return "the reward did not say whether a response is correct"
        verdicts.append(result.correct)
    return Measured(len(verdicts), sum(verdicts), sum(trajectory.is_truncated for trajectory in answered))


def _with_columns(values: Mapping[str, Any], found: Measured, column: str, where: str) -> dict[str, Any]:
    new = {column: found.pass_rate, **{f"{column}_{name}": count for name, count in asdict(found).items()}}
    if taken := [name for name in new if name in values]:
        raise InputError(f"{where} has a column {taken[0]!r} already; give --column another name")
    return {**values, **new}
