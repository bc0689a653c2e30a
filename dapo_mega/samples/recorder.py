"""Writes the samples of a run, on rank 0, in a thread that training does not wait for."""

import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from dapo_mega.config import SamplesConfig
from dapo_mega.samples.files import discard_after, file_of, rotate, samples_folder, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import SampleFile
from dapo_mega.samples.table import to_table

logger = logging.getLogger(__name__)

_GIB = 2**30
_MAX_WAITING = 2


class SampleRecorder:
    """Writes files one after the other, in the background. A file that cannot be written is given up, with a warning
    for the first: samples are not the run.

    At most two files wait; the caller of `write` waits when a third comes.
    """

    def __init__(self, output_dir: str, config: SamplesConfig, tokenizer: Any, last_step: int) -> None:
        """Removes what an earlier process wrote of steps after `last_step`, which will be done again."""
        self._folder = samples_folder(output_dir)
        self._max_bytes = int(config.max_gib * _GIB)
        self._pieces = TokenPieces(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._waiting: list[Future[None]] = []
        self._has_warned = threading.Event()
        self._attempt(lambda: discard_after(self._folder, last_step))

    def write(self, file: SampleFile) -> None:
        """Write the file soon. Its arrays must not change afterwards."""
        while len(self._waiting) >= _MAX_WAITING:
            self._waiting.pop(0).result()
        self._waiting.append(self._thread.submit(self._attempt, lambda: self._write(file)))

    def flush(self) -> None:
        """Wait until all files are on disk, or given up."""
        while self._waiting:
            self._waiting.pop(0).result()

    def close(self) -> None:
        """`flush`, and end the thread."""
        self.flush()
        self._thread.shutdown()

    def _write(self, file: SampleFile) -> None:
        write_table(file_of(self._folder, file.kind, file.step), to_table(file, self._pieces))
        rotate(self._folder, self._max_bytes)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            if self._has_warned.is_set():
                return
            self._has_warned.set()
            where = "" if isinstance(error, OSError) else f" in {traceback.extract_tb(error.__traceback__)[-1].name}"
            logger.warning(
                "samples cannot be written to %s (%s%s); training goes on without them, and the next step's are tried "
                "again without another warning",
                self._folder,
                error,
                where,
            )
