"""A new column of trajectories is its declaration and what fills it: every place that keeps trajectories has it."""

import base64
import gzip
import json
import re
from dataclasses import dataclass, field

import numpy as np
import pyarrow.parquet as pq

from dapo_mega import trajectory_records
from dapo_mega.commands.show_samples import main
from dapo_mega.evaluation.responses import ResponseStore
from dapo_mega.rollout.group_state import pack_groups, unpack_groups
from dapo_mega.samples.files import file_of, samples_folder, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.reading import read_step
from dapo_mega.samples.rows import SampleFile, Training, rows_of_group
from dapo_mega.samples.table import to_table
from dapo_mega.types import GenerationRequest, Group, Prompt, Response, SamplingParams, ScoredTrajectory, Trajectory
from dapo_mega.types import column as declared

PROMPT = Prompt(0, "1+1?", np.array([1, 2], np.int32), "2")


@dataclass(frozen=True, eq=False, kw_only=True)
class Observed(ScoredTrajectory):
    surprise: float = field(metadata=declared("number"))
    ranks: np.ndarray = field(metadata=declared("int32"))


class Letters:
    def batch_decode(self, sequences, skip_special_tokens):
        return ["".join(chr(97 + i % 26) for i in ids) for ids in sequences]


def observed(number):
    answer = Response(number, np.arange(3, dtype=np.int32), -np.ones(3, np.float32), "stop", 0)
    verdict = {"text": "abc", "correct": True, "accuracy_reward": 1.0, "reward": 1.0}
    return Observed(**vars(Trajectory.of(answer)), **verdict, surprise=0.5 + number, ranks=np.arange(3) + number)


def assert_there(trajectory):
    assert trajectory.surprise == 0.5 + trajectory.id
    assert trajectory.ranks.tolist() == [trajectory.id + k for k in range(3)]
    assert trajectory.ranks.dtype == np.int32


def test_a_declared_column_is_in_checkpoint_samples_replay_evaluation_and_page(tmp_path, monkeypatch):
    monkeypatch.setattr(trajectory_records, "SCORED", Observed)
    group = Group(PROMPT, (observed(1), observed(2)))
    # Checkpoint.
    records, arrays = pack_groups([group], "buffer")
    for restored in unpack_groups(json.loads(json.dumps(records)), arrays, [PROMPT], "buffer")[0].trajectories:
        assert_there(restored)
    # Samples, and the replay that reads them.
    rows = list(rows_of_group(group, "trained"))
    rows = [type(row)(**{**vars(row), "training": Training(i, 0.0, True, -np.ones(3))}) for i, row in enumerate(rows)]
    path = file_of(samples_folder(tmp_path), "training", 1)
    write_table(path, to_table(SampleFile(1, "training", rows), TokenPieces(Letters())))
    assert pq.read_table(path)["surprise"].to_pylist() == [1.5, 2.5]
    for restored in read_step(path).groups[0].trajectories:
        assert_there(restored)
    # A saved evaluation, whose parts were written one after the other.
    asked = [GenerationRequest(number, PROMPT.token_ids, 0, SamplingParams()) for number in (4, 5)]
    store = ResponseStore(tmp_path / "evaluation", asked, 2, 2, Letters())
    for number in (4, 5):
        store.write(0, [(PROMPT, observed(number))], ["scripted"])
    store.finish({})
    assert pq.read_table(store.file)["ranks"].to_pylist() == [[4, 5, 6], [5, 6, 7]]
    # Page.
    main([str(tmp_path)])
    (packed,) = re.findall(r'id="rows">([^<]*)<', (tmp_path / "samples.html").read_text())
    assert json.loads(gzip.decompress(base64.b64decode(packed)))["more surprise"] == [1.5, 2.5]
