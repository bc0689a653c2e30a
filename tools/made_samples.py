"""Samples of a run that never was, of any size, with texts that attack whoever shows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import yaml

from dapo_mega.samples.files import file_of, samples_folder, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import Row, SampleFile, Training, rows_of, rows_of_group
from dapo_mega.samples.table import to_table
from dapo_mega.types import Group, GroupFate, GroupOutcome, Prompt, Response, ScoredTrajectory, Trajectory

ATTACKS = (
    "</script><script>document.title='attacked'</script>",
    "<img src=x onerror=\"document.title='attacked'\">",
    "<svg/onload=document.title='attacked'>",
    "\"' onmouseover=\"document.title='attacked'\" autofocus onfocus='document.title=1' x=\"",
    "javascript:document.title='attacked'//",
    "\u2028document.title='attacked'\u2029</textarea><!--",
    "${document.title='attacked'}`;document.title='attacked';//\\",
    "<iframe srcdoc=\"<script>parent.document.title='attacked'</script>\"></iframe><base href='http://evil/'>",
    "]]><style>*{display:none}</style><meta http-equiv=refresh content='0;url=javascript:document.title=1'>",
)
_SENTENCES = (
    "First we note that the sum of the digits must be divisible by nine , so the number can not end in four .",
    "Let x be the number of apples and y that of pears ; then x + y = 42 and 2 x - y = 18 .",
    "Adding both equations gives 3 x = 60 and x = 20 . Wait , that is not right :",
    "I should check whether the remainder is zero . Therefore the answer follows",
)
_WORDS = " ".join(_SENTENCES).split()


class WordTokenizer:
    """Tokens are words with the space before them; the last ones are `ATTACKS`, a line break and the end."""

    def __init__(self) -> None:
        words = [f" {word}" for word in dict.fromkeys(_WORDS)]
        self.words = [*words, *ATTACKS, "\n", "Answer:", *(f" {n}" for n in range(100)), "</s>"]
        self.number = {word: i for i, word in enumerate(self.words)}

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return ["".join(self.words[i] for i in ids if not (skip_special_tokens and i == len(self.words) - 1))
                for ids in sequences]  # fmt: skip


def make_run(folder: Path, *, num_steps: int, num_groups: int, size: int = 8, mean_tokens: int = 120) -> Path:
    """The folder of a run with so many steps of so many groups, and an evaluation after every fifth."""
    folder.mkdir(parents=True, exist_ok=True)
    algorithm = {"policy_loss": "clip", "clip_low": 0.2, "clip_high": 0.28, "old_policy": "step_start"}
    (folder / "config.yaml").write_text(yaml.safe_dump({"algorithm": algorithm}))
    made = _MadeRun(np.random.default_rng(0), num_steps, num_groups, size, mean_tokens)
    pieces = TokenPieces(made.tokenizer)
    for step in range(1, num_steps + 1):
        files = [made.step(step), made.evaluation(step)] if step % 5 == 0 else [made.step(step)]
        for file in files:
            write_table(file_of(samples_folder(folder), file.kind, file.step), to_table(file, pieces))
    return folder


class _MadeRun:
    def __init__(self, rng: np.random.Generator, num_steps: int, num_groups: int, size: int, mean_tokens: int) -> None:
        self.rng, self.tokenizer = rng, WordTokenizer()
        self.num_steps, self.num_groups, self.size, self.mean_tokens = num_steps, num_groups, size, mean_tokens

    def evaluation(self, step: int) -> SampleFile:
        groups = [self._group(i, 2**62 + i * 4, 4, step, step / self.num_steps) for i in range(8)]
        rows = [row for group in groups for row in rows_of_group(group)]
        return SampleFile(step, "evaluation", rows)

    def step(self, step: int) -> SampleFile:
        """Two thirds of the groups are trained on."""
        lost: list[GroupOutcome] = ["all_right", "surplus", "all_wrong", "stale"]
        num_trained = self.num_groups - self.num_groups // 3
        rows: list[Row] = []
        counts: Counter[str] = Counter()
        for k in range(self.num_groups):
            outcome: GroupOutcome = "trained" if k < num_trained else lost[(k - num_trained) % len(lost)]
            counts[outcome] += 1
            chance = {"all_right": 1.0, "all_wrong": 0.0}.get(outcome, 0.2 + 0.7 * step / self.num_steps)
            first = (step * self.num_groups + k) * self.size
            group = self._group(int(self.rng.integers(500)), first, self.size, step, chance)
            found = list(rows_of(GroupFate(outcome, group.prompt, group)))
            if outcome == "trained":
                found = [replace(row, training=self._training(row, k * self.size + i)) for i, row in enumerate(found)]
            rows += found
        account = {"groups": dict(counts), "recorded_groups": self.num_groups, "all_recorded": True, "in_buffer": 3}
        return SampleFile(step, "training", rows, account)

    def _training(self, row: Row, sample: int) -> Training:
        engine, rng = row.trajectory.logprobs, self.rng
        trainer = np.minimum(engine + rng.normal(0, 0.03, len(engine)) * np.abs(engine), -1e-6).astype(np.float32)
        moved = (trainer + rng.standard_t(2, len(engine)) * 0.05).astype(np.float32)
        assert row.scored
        return Training(sample, 0.9 if row.scored.correct else -1.1, True, trainer, moved)

    def _group(self, index: int, first: int, size: int, step: int, chance: float) -> Group:
        x, y = (int(n) for n in self.rng.integers(99, size=2))
        text = f"Anna has {x} apples and {y} pears. How many fruits does she have?\n{ATTACKS[index % len(ATTACKS)]}"
        prompt = Prompt(index, text, np.arange(5, dtype=np.int32), str(x + y))
        members = tuple(self._response(first + k, step, bool(self.rng.random() < chance)) for k in range(size))
        return Group(prompt, members)

    def _response(self, request_id: int, step: int, is_correct: bool) -> ScoredTrajectory:
        rng, tokenizer = self.rng, self.tokenizer
        length = int(np.clip(rng.lognormal(np.log(self.mean_tokens), 0.6), 8, 12 * self.mean_tokens))
        start = rng.integers(len(_WORDS), size=length)
        words = [f" {_WORDS[(start[k // 6] + k) % len(_WORDS)]}" for k in range(length)]
        words[:: max(7, length // 9)] = ["\n"] * len(words[:: max(7, length // 9)])
        words[1] = ATTACKS[request_id % len(ATTACKS)]
        is_cut = bool(rng.random() < 0.06)
        answer = str(rng.integers(100))
        ending = [] if is_cut else ["\n", "Answer:", f" {answer}", "</s>"]
        ids = np.array([tokenizer.number[word] for word in [*words, *ending]], np.int32)
        logprobs = -(rng.exponential(0.25, len(ids)) * (rng.random(len(ids)) < 0.35)).astype(np.float32)
        spans = ((step - 2, len(ids) // 3), (step - 1, len(ids))) if request_id % 5 == 0 and step > 1 else ()
        response = Response(request_id, ids, logprobs, "length" if is_cut else "stop", max(step - 1, 0), spans)
        (text,) = tokenizer.batch_decode([ids.tolist()], skip_special_tokens=True)
        parts = MappingProxyType({"accuracy": float(is_correct), "format": float(rng.random() < 0.8)})
        found = None if is_cut else ATTACKS[0] if request_id % 50 == 0 else answer
        reward = 1.0 if is_correct else -1.0
        return ScoredTrajectory.judged(
            Trajectory.of(response),
            text=text,
            correct=is_correct and not is_cut,
            accuracy_reward=reward,
            reward=reward - 0.1 * float(rng.random()),
            answer=found,
            parts=parts,
        )
