"""The files and rows of a source, and the records of them for the card."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dapo_mega.config import SourceConfig
from dapo_mega.config.preparation import DecontaminationConfig, EvaluationSetConfig
from dapo_mega.data.readers import Row, dataset_files, file_rows, is_saved_dataset, read_rows
from dapo_mega.data.templates import as_messages
from dapo_mega.errors import InputError
from dapo_mega.preparation.candidates import instruction_frames, without_instruction
from dapo_mega.preparation.card import FileRecord, file_record
from dapo_mega.preparation.contamination import EvaluationIndex, EvaluationProblem

_PROBLEM_COLUMNS = ("prompt", "problem", "question")


class Source:
    """A source while it is read. `files` are its files' records, of a dataset of the hub none until all is read."""

    def __init__(self, name: str, config: SourceConfig) -> None:
        self.name = name
        self.config = config
        self.num_rows = 0
        self.broken: dict[str, str] = {}
        self._folder = Path(config.path)
        self._paths: list[Path] | None = None
        if is_saved_dataset(self._folder):
            self._paths = sorted(file for file in self._folder.rglob("*") if file.is_file())
        elif self._folder.exists():
            self._paths = dataset_files(config)
        self._records = tuple(replace(file_record(path), name=self._inner(path)) for path in self._paths or ())
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The records of the source's files, or one of the rows that were read from the hub."""
        if self._paths is not None:
            return self._records
        return (FileRecord(self.config.path, self._hash.hexdigest(), self._num_bytes),)

    def rows(self, *, skip_broken: bool = False) -> Iterator[Row]:
        """The rows, at most `max_rows`, their places given by the source's and the file's name.

        What cannot be read raises `InputError`, or with `skip_broken` is a row that says so (`Row.broken`); a file
        whose rest cannot be read is named in the source's `broken`.
        """
        limit = self.config.max_rows
        for name, part in self._parts(skip_broken):
            before = self.num_rows
            try:
                for row in part:
                    if self.num_rows == limit:
                        return
                    self.num_rows += 1
                    yield row
            except InputError as error:
                if not self._records:  # Neither a file nor a folder that is there.
                    raise
                if not skip_broken:
                    raise InputError(f"{error}; or set broken_files=skip to leave out what cannot be read") from error
                self.broken[f"{name}, after {self.num_rows - before} rows"] = str(error)

    def _parts(self, keep_broken: bool) -> Iterator[tuple[str, Iterator[Row]]]:
        """The name of each file, or of the dataset, and its rows."""
        if self._paths is None or is_saved_dataset(self._folder):
            yield self.name, self._rows_of_dataset()
            return
        for path in self._paths:
            name = f"{self.name}/{self._inner(path)}"
            yield name, self._rows_of_file(path, name, keep_broken)

    def _rows_of_file(self, path: Path, name: str, keep_broken: bool) -> Iterator[Row]:
        for row in file_rows(path, self.config.split, keep_broken=keep_broken):
            yield replace(row, source=name, broken=row.broken.replace(str(path), name))

    def _rows_of_dataset(self) -> Iterator[Row]:
        for row in read_rows(self.config):
            if self._paths is None:
                line = json.dumps(row.values, default=str).encode()
                self._hash.update(line)
                self._num_bytes += len(line)
            yield replace(row, source=self.name)

    def _inner(self, path: Path) -> str:
        """The path of a file without the folders above the source."""
        return path.name if path == self._folder else str(path.relative_to(self._folder))


def evaluation_problems(
    name: str, config: EvaluationSetConfig
) -> tuple[list[EvaluationProblem], tuple[FileRecord, ...]]:
    """The problems of an evaluation set, which are the last user turns of its prompts without the instruction of a
    known template, and its files.

    Raises `InputError` if a row has none.
    """
    source = Source(name, SourceConfig(path=config.path, split=config.split))
    problems = []
    frames = instruction_frames("auto")
    for row in source.rows():
        column = config.prompt or next((c for c in _PROBLEM_COLUMNS if row.optional(c) is not None), "prompt")
        value = row.value(column, f"decontamination.sets.{name}.prompt")
        try:
            messages = as_messages(value)
        except InputError as error:
            raise InputError(f"decontamination set {row.where}: {error}") from error
        text = next(message["content"] for message in reversed(messages) if message["role"] == "user")
        bare = without_instruction(text, frames)
        problems.append(EvaluationProblem(row.where, text if bare is None else bare))
    if not problems:
        raise InputError(f"decontamination set {name} has no rows; give one with problems")
    return problems, source.files


def evaluation_index(config: DecontaminationConfig) -> tuple[EvaluationIndex, dict[str, tuple[FileRecord, ...]]]:
    """The problems of all evaluation sets, and the files of each set."""
    problems: list[EvaluationProblem] = []
    sets: dict[str, tuple[FileRecord, ...]] = {}
    for name, evaluation_set in config.sets.items():
        found, sets[name] = evaluation_problems(name, evaluation_set)
        problems += found
    return EvaluationIndex(problems, config.ngram, config.min_words, config.min_share), sets
