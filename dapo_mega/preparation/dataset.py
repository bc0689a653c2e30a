"""Prepares a training dataset from its sources, in two passes over rows on disk.

The first reads each row once and leaves it out, or keeps it for the second: rows that are invalid, exact duplicates,
what the filters refuse, what evaluation sets hold. The second leaves out near duplicates and writes the rest.
"""

import dataclasses
import hashlib
import logging
import time
import unicodedata
from array import array
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import dapo_mega
from dapo_mega.config.preparation import PreparationConfig
from dapo_mega.data.readers import Row
from dapo_mega.errors import InputError
from dapo_mega.metrics.run_text import installed_versions
from dapo_mega.preparation.candidates import INVALID_REASONS, Candidate, CandidateReader, Invalid
from dapo_mega.preparation.card import CARD, Card, SourceRecord, card_of, file_record, read_card
from dapo_mega.preparation.contamination import EvaluationIndex
from dapo_mega.preparation.filters import Filters, integer_of
from dapo_mega.preparation.near_duplicates import NearDuplicates
from dapo_mega.preparation.normalization import NormalText, normal_text
from dapo_mega.preparation.output import DatasetWriter, DroppedFormat, check_folder, new_dataset
from dapo_mega.preparation.sources import Source, evaluation_index

logger = logging.getLogger(__name__)

MADE_BY = "dapo-mega prepare dataset"

_FIRST_ROWS = 1000
"""A source of which so many rows are invalid from its beginning is refused at once."""
_SHOWN_EXAMPLES = 3
_LOG_SECONDS = 10.0


def prepare_dataset(
    config: PreparationConfig, output: Path, dropped: DroppedFormat | None = None, *, force: bool = False
) -> tuple[Card, bool]:
    """Write `train.parquet`, `card.json` and, if asked for, the dropped rows into the new folder `output`.

    Returns the card, and whether anything was written: a folder that was made from the same files with the same
    settings and versions is left alone. Raises `InputError` for sources that cannot be read, for one whose share of
    invalid rows is over `max_invalid_share`, and if nothing is left; then nothing is written.
    """
    sources = {name: Source(name, source) for name, source in config.sources.items()}
    index, sets = evaluation_index(config.decontamination)
    filters = Filters(config.filters)
    record: dict[str, Any] = {"settings": _settings(config), "versions": {**_versions(config), **filters.versions()}}
    for name, files in sets.items():
        record["settings"]["decontamination"]["sets"][name]["files"] = [vars(file) for file in files]
    finished = None if force else _finished(output, record, sources, dropped)
    if finished:
        return finished, False
    check_folder(output, force=force)
    with new_dataset(output, dropped, force=force) as writer:
        return _Preparation(config, index, filters, writer).run(sources, record), True


class _Preparation:
    def __init__(
        self, config: PreparationConfig, index: EvaluationIndex, filters: Filters, writer: DatasetWriter
    ) -> None:
        self._config = config
        self._index = index
        self._filters = filters
        self._writer = writer
        self._problems = DistinctProblems()
        self._kept = array("q")  # For each row of the writer its number in `_problems`.
        self._dropped: dict[str, Counter[str]] = {name: Counter() for name in config.sources}
        self._examples: dict[str, list[str]] = {}
        self._num_other_answers = 0
        self._last_log = time.monotonic()
        duplicates = config.duplicates
        self._near = NearDuplicates(writer.temporary / "keys", duplicates.threshold) if duplicates.near else None

    def run(self, sources: dict[str, Source], record: dict[str, Any]) -> Card:
        num_instructions = sum(self._read(source) for source in sources.values())
        without = self._drop_near_duplicates() if self._near else {}
        details = {
            "duplicates_with_another_answer": self._num_other_answers,
            "instructions_taken_off": num_instructions,
            "broken_files": {place: reason for source in sources.values() for place, reason in source.broken.items()},
            "examples": {reason: self._examples[reason] for reason in sorted(self._examples)},
        }
        return self._writer.finish(
            MADE_BY,
            settings=record["settings"],
            versions=record["versions"],
            sources=[
                SourceRecord(name, source.files, source.num_rows, dict(sorted(self._dropped[name].items())))
                for name, source in sources.items()
            ],
            details=details,
            without=without,
        )

    def _read(self, source: Source) -> int:
        """Read all rows of a source; returns the number of prompts from which an instruction was taken off."""
        config = self._config.sources[source.name]
        reader = CandidateReader(source.name, config, keep_unparsed=not self._config.filters.unparsed_answers)
        is_checked = False
        for row in source.rows(skip_broken=self._config.broken_files == "skip"):
            if row.broken:
                evidence = row.broken.removeprefix(row.where).strip()
                self._drop(source.name, "cannot be read", evidence, row.where, row.values)
                continue
            if not is_checked:
                is_checked = True
                _refuse_ambiguous_columns(row, config.columns.prompt, config.columns.ground_truth)
            candidate = reader.read(row)
            refusal = self._refusal(candidate, row)
            if refusal is None and isinstance(candidate, Candidate):
                self._keep(reader, row, candidate)
            elif refusal:
                self._drop(source.name, *refusal, row.where, row.values)
            if source.num_rows == _FIRST_ROWS and self._num_invalid(source.name) == _FIRST_ROWS:
                self._refuse_invalid(source)
            self._log(source)
        if self._num_invalid(source.name) > self._config.max_invalid_share * source.num_rows:
            self._refuse_invalid(source)
        return reader.num_instructions

    def _refusal(self, candidate: Candidate | Invalid, row: Row) -> tuple[str, str] | None:
        """Reason and evidence for leaving a row out in the first pass, if there are any."""
        if isinstance(candidate, Invalid):
            return candidate.reason, candidate.evidence
        if self._config.duplicates.exact:
            earlier = self._problems.find(candidate.text)
            if earlier is not None:
                is_same = self._problems.has_answer(earlier, candidate.answer)
                self._num_other_answers += not is_same
                other = "" if is_same else f", which has another answer than this row: {candidate.answer:.200}"
                return "exact duplicate", f"of {self._problems.where(earlier)}{other}"
        self._problems.add(candidate.text, candidate.answer, row)
        if refusal := self._filters.refusal(candidate):
            return refusal
        found = self._index.find(normal_text(candidate.text)) if len(self._index) else None
        return ("contaminated", found.evidence()) if found else None

    def _keep(self, reader: CandidateReader, row: Row, candidate: Candidate) -> None:
        if self._config.filters.answer_type == "integer":
            candidate = dataclasses.replace(candidate, answer=integer_of(candidate.answer) or candidate.answer)
        self._writer.keep(reader.values(row, candidate), row.where, row.values if self._near else None)
        self._kept.append(len(self._problems) - 1)
        if self._near:
            self._near.add(normal_text(candidate.text), candidate.answer)

    def _drop_near_duplicates(self) -> dict[int, tuple[int, float]]:
        assert self._near is not None
        logger.info("%d rows are left before near duplicates are looked for", len(self._writer.rows))

        def text(row: int) -> NormalText:
            return normal_text("\n".join(message["content"] for message in self._writer.rows[row]["prompt"]))

        removed = self._near.found(text)
        for later, (earlier, similarity) in removed.items():
            number = self._kept[later]
            evidence = f"similarity {similarity:.3f} to {self._problems.where(self._kept[earlier])}"
            place = self._problems.where(number)
            self._writer.drop_kept("near duplicate", evidence, place, later)
            self._count(self._problems.source(number), "near duplicate", f"{place}: {evidence}")
        return removed

    def _drop(self, source: str, reason: str, evidence: str, where: str, values: Any) -> None:
        self._writer.drop(reason, evidence, where, values)
        self._count(source, reason, f"{where}: {evidence}")

    def _count(self, source: str, reason: str, example: str) -> None:
        self._dropped[source][reason] += 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < _SHOWN_EXAMPLES:
            examples.append(example)

    def _num_invalid(self, source: str) -> int:
        return sum(self._dropped[source][reason] for reason in INVALID_REASONS)

    def _refuse_invalid(self, source: Source) -> None:
        counts = ", ".join(f"{n} {r}" for r, n in self._dropped[source.name].items() if r in INVALID_REASONS)
        examples = "; ".join(self._examples[r][0] for r in INVALID_REASONS if r in self._examples)
        raise InputError(
            f"{self._num_invalid(source.name)} of {source.num_rows} rows of source {source.name} are invalid "
            f"({counts}), more than max_invalid_share={self._config.max_invalid_share:g}: {examples}; correct "
            f"sources.{source.name}.columns or ground_truth_style, or raise max_invalid_share"
        )

    def _log(self, source: Source) -> None:
        now = time.monotonic()
        if now > self._last_log + _LOG_SECONDS:
            self._last_log = now
            logger.info("%s: %d rows read, %d rows kept so far", source.name, source.num_rows, len(self._writer.rows))


def _refuse_ambiguous_columns(row: Row, *columns: str) -> None:
    """Raises `InputError` for a dotted name that is both a column and a field of a record."""
    for column in columns:
        head, _, rest = column.partition(".")
        inner = row.values.get(head)
        if rest and column in row.values and isinstance(inner, dict) and rest in inner:
            raise InputError(
                f"{row.where} has a column {column!r} and a column {head!r} with a field {rest!r}; rename one of them"
            )


def _settings(config: PreparationConfig) -> dict[str, Any]:
    """The recipe, with paths cut to their last part, so that the card does not depend on where files lie."""
    settings = config.model_dump(mode="json")
    for section in (*settings["sources"].values(), *settings["decontamination"]["sets"].values()):
        section["path"] = Path(section["path"]).name
    if config.filters.tokenizer:
        settings["filters"]["tokenizer"] = Path(config.filters.tokenizer).name
    return settings


def _versions(config: PreparationConfig) -> dict[str, str]:
    """Versions of what decides which rows stay, and of what writes the file."""
    packages = ["pyarrow", "math-verify", "latex2sympy2_extended", "sympy"]
    packages += ["datasketch", "numpy"] if config.duplicates.near else []
    packages += ["py3langid"] if config.filters.languages else []
    packages += ["transformers", "tokenizers"] if config.filters.tokenizer else []
    return {"dapo_mega": dapo_mega.__version__, "unicode": unicodedata.unidata_version, **installed_versions(packages)}


def _finished(
    output: Path, record: dict[str, Any], sources: dict[str, Source], dropped: DroppedFormat | None
) -> Card | None:
    """The card of `output`, if it holds what this preparation would write."""
    if not output.is_dir() or card_of(output) is None:
        return None
    card = read_card(output / CARD)
    is_equal = (
        (card.made_by, card.settings, card.versions) == (MADE_BY, record["settings"], record["versions"])
        and [(source.name, source.files) for source in card.sources] == [(n, s.files) for n, s in sources.items()]
        and (dropped is None or (output / f"dropped.{dropped}").is_file())
        and (output / card.data.name).is_file()
        and file_record(output / card.data.name) == card.data
    )
    return card if is_equal else None


_DIGEST_BYTES = 16
_CACHED_TEXTS = 2**15


class DistinctProblems:
    """The distinct problems so far, numbered from 0. About 230 bytes each."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._answers = array("q")
        self._rows = array("q")
        self._sources = array("I")
        self._source_numbers: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, text: str) -> int | None:
        """The number of the problem that has the spelling of `text`."""
        return self._numbers.get(_digest(text))

    def add(self, text: str, answer: str, row: Row) -> int:
        """Add a problem, also one whose text was there before; returns its number."""
        number = len(self)
        self._numbers.setdefault(_digest(text), number)
        self._answers.append(_short_hash(answer))
        self._rows.append(row.number)
        self._sources.append(self._source_numbers.setdefault((row.source, row.unit), len(self._source_numbers)))
        return number

    def has_answer(self, number: int, answer: str) -> bool:
        """Whether this is the answer of the problem of this number."""
        return self._answers[number] == _short_hash(answer)

    def where(self, number: int) -> str:
        """The place of the row of this number."""
        source, unit = list(self._source_numbers)[self._sources[number]]
        return f"{source}, {unit} {self._rows[number]}"

    def source(self, number: int) -> str:
        """The name of the source of the row of this number."""
        return list(self._source_numbers)[self._sources[number]][0].partition("/")[0]


@lru_cache(maxsize=_CACHED_TEXTS)  # The public DAPO-Math-17k repeats each of its texts a hundred times.
def _digest(text: str) -> bytes:
    spelling = normal_text(text).spelling
    return hashlib.blake2b(spelling.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _short_hash(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True
    )
