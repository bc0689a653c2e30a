"""Keeps the responses of an evaluation on disk, so that an interrupted one continues and asks nothing twice.

While an evaluation is under way its responses are in `samples/parts`, a file for so many requests that follow one
another; a file gets its name when all of it is on disk. Finished, they are joined to one file of the samples format.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dapo_mega.evaluation.evaluator import EvaluatedResponse
from dapo_mega.samples.files import file_of, samples_folder, write_table, write_tables
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import FORMAT, Row, SampleFile
from dapo_mega.samples.table import account_of, errors_of_reading, metadata_of, schema, to_table
from dapo_mega.types import GenerationRequest

_ID = "request_id"


class ResponseStore:
    """The responses to `requests`, `group_size` to a problem, in `folder`. `part_size` requests are kept together."""

    def __init__(
        self, folder: Path, requests: Sequence[GenerationRequest], group_size: int, part_size: int, tokenizer: Any
    ) -> None:
        self.file = answers_file(folder)
        self._folder = folder
        self._parts = samples_folder(folder) / "parts"
        self._joined = samples_folder(folder) / "joined_parts"
        self._first_id = requests[0].request_id
        self._group_size = group_size
        self._num_requests = len(requests)
        self._requests = [requests[start : start + part_size] for start in range(0, len(requests), part_size)]
        self._pieces = TokenPieces(tokenizer)

    @property
    def is_finished(self) -> bool:
        """Whether all requests have been answered and joined. Those that failed are asked again by the next start."""
        return has_all_answers(self._folder) and pq.read_metadata(self.file).num_rows >= self._num_requests

    def take_over(self) -> None:
        """Spread the responses of a finished evaluation with fewer to each problem over parts, numbered as the first
        ones of their problem. The file stays until `finish` replaces it. Nothing to do otherwise."""
        if not has_all_answers(self._folder) or self.is_finished:
            return
        table, first, size = _read(self.file), self._first_id, self._group_size
        fewer = len(table) * size // self._num_requests
        numbers = np.asarray(table[_ID]) - first
        groups = first + numbers // fewer * size
        for name, values in ((_ID, groups + numbers % fewer), ("group", groups)):
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
        table = table.replace_schema_metadata(_metadata(account_of(table.schema.metadata)["engines"])).sort_by(_ID)
        ids = np.asarray(table[_ID])
        spread = self._parts.with_name("spread_parts")
        shutil.rmtree(spread, ignore_errors=True)
        for number, requests in enumerate(self._requests):
            start, end = np.searchsorted(ids, [requests[0].request_id, requests[-1].request_id + 1])
            if start < end:
                write_table(spread / self._path(number).name, table.slice(start, end - start))
        spread.rename(self._parts)

    def missing(self) -> dict[int, list[GenerationRequest]]:
        """The requests of each part that have no response on disk. Raises InputError for a file that is damaged."""
        if self.is_finished:
            return {}
        missing = {}
        for number, requests in enumerate(self._requests):
            path = self._path(number)
            known = set(_read(path, [_ID])[_ID].to_pylist()) if path.exists() else set()
            if wanted := [request for request in requests if request.request_id not in known]:
                missing[number] = wanted
        return missing

    def write(self, part: int, results: Sequence[EvaluatedResponse], engines: Iterable[str]) -> None:
        """Add responses to a part. `engines` names what sampled them, with its version."""
        # The group is the smallest id of the problem's trajectories.
        first, size = self._first_id, self._group_size
        rows = [Row(answer.id - (answer.id - first) % size, prompt, answer) for prompt, answer in results]
        table = to_table(SampleFile(0, "evaluation", rows), self._pieces)
        names = set(engines)
        if self._path(part).exists():
            earlier = _read(self._path(part))
            names |= set(account_of(earlier.schema.metadata)["engines"])
            same = earlier.replace_schema_metadata(table.schema.metadata)
            table = pa.concat_tables([same, table], promote_options="default")
        write_table(self._path(part), table.sort_by(_ID).replace_schema_metadata(_metadata(names)))

    def finish(self, settings: Mapping[str, Any]) -> None:
        """Join the parts to one file, whose account has the `settings`. They stay if requests failed, for the next
        start to ask these again."""
        if not self.is_finished:
            paths = [self._path(number) for number in range(len(self._requests)) if self._path(number).exists()]
            accounts = [account_of(pq.read_metadata(path).metadata) for path in paths]
            metadata = _metadata((name for account in accounts for name in account["engines"]), settings=dict(settings))
            columns = pa.unify_schemas([schema(), *(pq.read_schema(path).remove_metadata() for path in paths)])
            columns = columns.with_metadata(metadata)
            parts = (_read(path).replace_schema_metadata(metadata) for path in paths)
            tables = (pa.concat_tables([columns.empty_table(), part], promote_options="default") for part in parts)
            is_complete = not self.missing()
            write_tables(self.file, columns, tables)
            if is_complete:
                # Removed under another name: a kill in between must not leave some parts, whose lack would be noticed.
                self._parts.rename(self._joined)
        shutil.rmtree(self._joined, ignore_errors=True)

    def _path(self, part: int) -> Path:
        return self._parts / f"part_{part:06d}.parquet"


def answers_file(folder: Path) -> Path:
    """The file with all responses of an evaluation in this folder."""
    return file_of(samples_folder(folder), "evaluation", 0)


def has_all_answers(folder: Path) -> bool:
    """Whether all that an evaluation into this folder asked has been answered and joined."""
    return answers_file(folder).exists() and not (samples_folder(folder) / "parts").exists()


def _read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    with errors_of_reading(path, "remove it and start again: its responses are then asked for anew"):
        return pq.read_table(path, columns=columns, page_checksum_verification=True)


def _metadata(engines: Iterable[str], **more: Any) -> dict[bytes, bytes]:
    return metadata_of({"format": FORMAT, "step": 0, "kind": "evaluation", "engines": sorted(set(engines)), **more})
