"""Reads a step's groups back from its file, as they were trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dapo_mega.samples.rows import Floats
from dapo_mega.samples.table import account_of, errors_of_reading, trajectory_of
from dapo_mega.types import Group, Prompt


@dataclass(frozen=True, eq=False)
class RecordedSample:
    """What training computed for one response, each [L]; None where the file has no such column for it."""

    request_id: int
    trainer_logprobs: Floats
    update_logprobs: Floats | None
    advantage: float


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """The groups that a step trained on, in order, and `samples`, one for each of their responses."""

    account: Mapping[str, Any]
    groups: tuple[Group, ...]
    samples: tuple[RecordedSample, ...]


def read_account(path: Path) -> dict[str, Any]:
    """The account in a file, without its rows. Raises InputError if it is no file of samples."""
    with errors_of_reading(path, "give a file of samples that is whole"):
        return account_of(pq.read_metadata(path).metadata)


def read_step(path: Path) -> RecordedStep:
    """The groups of a step's file that were trained on. Raises InputError if it cannot be read."""
    with errors_of_reading(path, "remove it"):
        table = pq.read_table(path, filters=[("outcome", "=", "trained")], page_checksum_verification=True)
        account = account_of(table.schema.metadata)
    rows = table.to_pylist()
    trained = sorted((row for row in rows if not row["is_greedy"]), key=lambda row: int(row["sample"]))
    greedy = {row["group"]: trajectory_of(row) for row in rows if row["is_greedy"]}
    members: dict[int, list[dict[str, Any]]] = {}
    for row in trained:
        members.setdefault(row["group"], []).append(row)
    groups, samples = [], []
    for group, found in members.items():
        row, token_ids = found[0], np.array(found[0]["prompt_ids"], np.int32)
        prompt = Prompt(row["prompt_index"], row["prompt"] or "", token_ids, row["ground_truth"] or "")
        groups.append(Group(prompt, tuple(map(trajectory_of, found)), greedy.get(group)))
    for row in trained:
        updated = None if row["update_logprobs"] is None else np.array(row["update_logprobs"], np.float32)
        trainer = np.array(row["trainer_logprobs"], np.float32)
        samples.append(RecordedSample(row["request_id"], trainer, updated, row["advantage"]))
    return RecordedStep(account, tuple(groups), tuple(samples))
