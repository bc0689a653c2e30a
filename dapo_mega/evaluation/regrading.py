"""Scores saved responses again, by another extraction style or reward, without asking any model."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo_mega.config import RunConfig
from dapo_mega.config.files import configured
from dapo_mega.errors import InputError
from dapo_mega.evaluation.settings import evaluation_settings
from dapo_mega.rewards import ComposedReward, ScoringFailure
from dapo_mega.rewards.build import make_reward
from dapo_mega.rollout.scoring import record_of
from dapo_mega.samples.files import write_tables
from dapo_mega.samples.reading import read_account
from dapo_mega.samples.table import account_of, errors_of_reading, metadata_of, trajectory_of
from dapo_mega.types import Prompt

_BATCH_ROWS = 256
_UNREAD = ("tokens", "trainer_logprobs", "update_logprobs", "advantages")
"""Long columns that no reward reads."""
_NEW = ("answer", "correct", "reward", "accuracy_reward", "parts")
_REMEDY = "give files of samples that are whole"


@dataclass(frozen=True)
class Changed:
    """A response whose verdict is another one than before; None: it was not, or could not be, judged."""

    problem: int
    ground_truth: str
    response: str
    answers: tuple[str | None, str | None]
    verdicts: tuple[bool | None, bool | None]


@dataclass
class Regraded:
    """How many responses had and have which verdict, the first ones that changed, and why one could not be scored."""

    verdicts: Counter[tuple[bool | None, bool | None]] = field(default_factory=Counter)
    changed: list[Changed] = field(default_factory=list)
    failure: str = ""

    def num_changed(self, now: bool | None) -> int:
        """The responses that are now right (True), wrong, or without a verdict, and were not before."""
        return sum(n for (old, new), n in self.verdicts.items() if new is now and old is not now)

    def accuracy(self, side: int) -> float | None:
        """The share of right ones among the judged responses, before (0) and now (1); None if none was judged."""
        judged = sum(n for pair, n in self.verdicts.items() if pair[side] is not None)
        return sum(n for pair, n in self.verdicts.items() if pair[side]) / judged if judged else None


def saved_reward(path: Path, overrides: Sequence[str]) -> RunConfig:
    """A configuration with the grader that the settings in a saved evaluation name, changed by `overrides`.

    Raises InputError for a file that names none.
    """
    settings = read_account(path).get("settings", {})
    grader: Mapping[str, Any] | None = settings.get("grader")
    if not grader:
        raise InputError(f"{path} does not say how it was judged; give --config with the file of its run")
    reward: Mapping[str, Any] = {"components": [grader]}
    if any(text.startswith("reward.") for text in overrides):
        is_own = any(text.startswith(("reward.function=", "reward.components=")) for text in overrides)
        is_rule = grader["kind"] == "answer" and not is_own
        reward = {name: grader[name] for name in ("extraction", "numeric_tolerance")} if is_rule else {}
    nothing = {"path": "unused"}
    raw = {
        **{"output_dir": "unused", "num_steps": 1, "model": nothing, "data": {"train": nothing}},
        "rollout": {"max_response_tokens": settings.get("max_response_tokens", 1)},
        "reward": {"overlong_punishment": False, **reward},
        "batch": {"tokens_per_microbatch": 2**31},
    }
    return configured(RunConfig, raw, list(overrides))


def regrade(config: RunConfig, source: Path, target: Path, num_shown: int, found: Regraded) -> Mapping[str, Any]:
    """Write the responses of the file of samples `source` to `target` with the verdicts of the reward of `config`, and
    add what changed to `found`, which keeps `num_shown` examples at most; returns the settings of the new file.

    All columns but those of the verdict stay, also the advantages that a step was trained with. Columns of the dataset
    are not in samples, so the reward's records have no `fields`. Raises InputError.
    """
    with errors_of_reading(source, _REMEDY):
        file = pq.ParquetFile(source, page_checksum_verification=True)
        account = account_of(file.schema_arrow.metadata)
    is_evaluation = account["kind"] == "evaluation"
    settings = {**account.get("settings", {}), "grader": evaluation_settings(config)["grader"]}
    columns = file.schema_arrow.with_metadata(metadata_of({**account, "settings": settings}))
    with file, contextlib.closing(make_reward(config, for_evaluation=is_evaluation)) as reward:
        tables = (_scored(table, reward, num_shown, found) for table in _tables(file, source))
        write_tables(target, columns, (table.replace_schema_metadata(columns.metadata) for table in tables))
    return settings


def _scored(table: pa.Table, reward: ComposedReward, num_shown: int, found: Regraded) -> pa.Table:
    rows = table.drop_columns(list(_UNREAD)).to_pylist()
    records = [record_of(_prompt(row), trajectory_of(row), row["response"] or "") for row in rows]
    new: dict[str, list[Any]] = {name: [] for name in _NEW}
    for row, score in zip(rows, reward.score(records), strict=True):
        if isinstance(score, ScoringFailure):
            found.failure = found.failure or score.reason
            values: tuple[Any, ...] = (None,) * len(_NEW)
        else:
            parts = [{"name": name, "value": value} for name, value in score.parts.items()]
            values = (score.answer, score.correct, score.reward, score.score, parts)
        for name, value in zip(_NEW, values, strict=True):
            new[name].append(value)
        _note(row, values[0], values[1], num_shown, found)
    for name in _NEW:
        kind = table.schema.field(name).type
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(new[name], kind))
    return table


def _tables(file: pq.ParquetFile, source: Path) -> Iterator[pa.Table]:
    with errors_of_reading(source, _REMEDY):
        for batch in file.iter_batches(_BATCH_ROWS):
            yield pa.Table.from_batches([batch])


def _prompt(row: Mapping[str, Any]) -> Prompt:
    token_ids = np.asarray(row["prompt_ids"] or [], np.int32)
    source = row["data_source"] or ""
    return Prompt(row["prompt_index"], row["prompt"] or "", token_ids, row["ground_truth"] or "", data_source=source)


def _note(row: Mapping[str, Any], answer: str | None, verdict: bool | None, num_shown: int, found: Regraded) -> None:
    pair = (row["correct"], verdict)
    found.verdicts[pair] += 1
    if pair[0] is not verdict and len(found.changed) < num_shown:
        answers = (row["answer"], answer)
        found.changed.append(Changed(row["prompt_index"], row["ground_truth"], row["response"] or "", answers, pair))
