"""Transforms a prepared dataset: every row of the new one has an integer as its answer."""

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dapo_mega.data.readers import Row
from dapo_mega.data.templates import as_messages
from dapo_mega.errors import FleetError, InputError
from dapo_mega.metrics.run_text import installed_versions
from dapo_mega.preparation.card import DECIDING_PACKAGES, Card
from dapo_mega.preparation.journal import journal_of, open_journal
from dapo_mega.preparation.output import DroppedFormat, check_folder, new_dataset, read_dataset
from dapo_mega.preparation.transformation import PROMPT, Question, Transformation, TransformationSettings, Transformer
from dapo_mega.rewards import AnswerVerifier

MADE_BY: Final = "prepare transform"

_ROWS_AT_ONCE: Final = 1024
_ANSWER: Final = "reward_model.ground_truth"
_RAW: Final = "raw_problem"


@dataclass(frozen=True)
class TransformedDatasetOptions:
    """`drop_unanswered`: leave out rows for which no server gave a reply, in place of an error. `num_workers` processes
    compare answers, each comparison for at most `time_limit_s`. For the others see `new_dataset`."""

    dropped: DroppedFormat | None = None
    force: bool = False
    drop_unanswered: bool = False
    num_workers: int = 2
    time_limit_s: float = 5.0


def transform_dataset(
    source: Path, output: Path, settings: TransformationSettings, options: TransformedDatasetOptions
) -> Card:
    """Write the transformed dataset to the folder `output`; returns its card, which names that of `source` as parent.

    Replies of the model are kept in a journal beside `output` until it is complete. Raises InputError for a folder
    without a card and for a journal of another call, and FleetError if servers did not answer.
    """
    check_folder(output, force=options.force)
    parent, rows = read_dataset(source)
    # Time for all attempts at all rows that are asked about at once.
    endpoints = settings.endpoints
    rounds = math.ceil(_ROWS_AT_ONCE / endpoints.concurrency) + 1
    deadline_s = rounds * endpoints.attempts * endpoints.timeout_s + 60.0
    transformer_settings = replace(settings, endpoints=replace(endpoints, deadline_s=deadline_s))
    depends_on = {"made_by": MADE_BY, "dataset_sha256": parent.data.sha256, **settings.decisive()}
    with (
        open_journal(journal_of(output), depends_on) as journal,
        AnswerVerifier(options.num_workers, options.time_limit_s, "none") as verifier,
    ):
        transformer = Transformer(transformer_settings, journal, verifier)
        unanswered = _ask(_chunks(rows, source), transformer, options.drop_unanswered)
        with new_dataset(output, options.dropped, force=options.force) as writer:
            outcomes: Counter[str] = Counter()
            for chunk in _chunks(read_dataset(source)[1], source):
                results = transformer.results([_question(row) for row in chunk], unanswered)
                for row, result in zip(chunk, results, strict=True):
                    outcomes[result.outcome] += 1
                    if result.reason:
                        outcomes[f"refused: {result.reason}"] += 1
                        writer.drop(result.reason, result.detail, row.where, row.values)
                    else:
                        writer.keep(_rewritten(row, result), row.where)
            card = writer.finish(
                MADE_BY,
                settings={
                    "model": settings.model,
                    "max_tokens": settings.max_tokens,
                    "extra_body": dict(settings.extra_body),
                    "prompt_sha256": hashlib.sha256(PROMPT.encode()).hexdigest(),
                    "time_limit_s": options.time_limit_s,
                },
                versions=installed_versions(DECIDING_PACKAGES),
                details={"rows_by_outcome": dict(sorted(outcomes.items()))},
                parent=parent,
            )
        journal.remove()
    return card


def _ask(chunks: Iterable[list[Row]], transformer: Transformer, drop_unanswered: bool) -> dict[int, str]:
    """Bring replies to all rows into the journal; the reasons of those without, by row. Raises FleetError."""
    unanswered: dict[int, str] = {}
    for chunk in chunks:
        unanswered |= transformer.ask([_question(row) for row in chunk])
        if unanswered and not drop_unanswered and transformer.num_answered == 0:
            reason = next(iter(unanswered.values()))
            raise FleetError(f"no server answered: {reason}; correct --urls, or start the server, and try again")
    if unanswered and not drop_unanswered:
        raise FleetError(
            f"{len(unanswered)} rows got no reply, lastly: {list(unanswered.values())[-1]}; the same command asks for "
            f"these again and keeps all other replies; --drop-unanswered leaves them out"
        )
    return unanswered


def _chunks(values: Iterable[dict[str, Any]], source: Path) -> Iterator[list[Row]]:
    rows = (Row(str(source), number, each) for number, each in enumerate(values))
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        yield chunk


def _question(row: Row) -> Question:
    answer = row.value(_ANSWER, "the column of the answers")
    if not isinstance(answer, str):
        raise InputError(f"{row.where}: the answer must be text, got {answer!r:.80}; prepare the dataset again")
    return Question(row.number, _problem(row.values, row.where)[0], answer)


def _problem(values: Mapping[str, Any], where: str) -> tuple[str, list[dict[str, str]], int]:
    """The bare problem, the turns of the prompt, and the turn that it stands in."""
    try:
        messages = as_messages(values.get("prompt"))
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    turn = max(i for i, message in enumerate(messages) if message["role"] == "user")
    content = messages[turn]["content"]
    raw = (values.get("extra_info") or {}).get(_RAW)
    return (raw if isinstance(raw, str) and raw and raw in content else content), messages, turn


def _rewritten(row: Row, result: Transformation) -> dict[str, Any]:
    """The row with the new problem and answer, and with the original ones in columns of their own."""
    values = copy.deepcopy(dict(row.values))
    values["original_prompt"] = copy.deepcopy(values["prompt"])
    values["original_answer"] = values["reward_model"]["ground_truth"]
    values["transformation"] = result.outcome
    values["reward_model"]["ground_truth"] = result.answer
    if result.addition:
        problem, messages, turn = _problem(values, row.where)
        changed = f"{problem.rstrip()}\n{result.addition}"
        messages[turn]["content"] = messages[turn]["content"].replace(problem, changed, 1)
        values["prompt"] = messages[turn]["content"] if isinstance(values["prompt"], str) else messages
        extra = values.get("extra_info") or {}
        if extra.get(_RAW) == problem:
            extra[_RAW] = changed
    return values
