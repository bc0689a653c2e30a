"""Runs in turns on real engines while engines, environments and trainers are killed at random moments, and what holds
afterwards: each trajectory is in the account once, and each trained token is where and what it was sampled.

    python -m tests.integration.soak FOLDER --seconds 600 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from dapo_mega.data.tokenizer import load_tokenizer
from dapo_mega.environments.dialogues import BareText
from dapo_mega.environments.turns import seed_of_group
from dapo_mega.metrics import read_metrics
from dapo_mega.samples.table import trajectory_of
from dapo_mega.types import sampled_rows
from tests.distributed.launching import kill, start_workers, wait_for

from .conftest import SharedEngines
from .fleet_runs import AT_WORK, GROUP_SIZE, check_restarted_run, fleet_values, total, wait_until, write_config
from .runs import TRAIN, kill_when, steps_done
from .sglang_servers import API_KEY, serving_engines, tiny_model
from .soaked_game import NUM_TURNS, Game

GAME = Path(__file__).with_name("soaked_game.py")
KINDS: dict[str, dict[str, Any]] = {
    "function": {"kind": "function", "path": f"{GAME}:Game"},
    "program": {"kind": "program", "command": f"python -S {GAME}"},
}
MARKS = {"worker": "environments.worker", "program": GAME.name}
"""What is in the command lines of the victims that trainers start."""
LIMIT_S = 240.0


class Soak:
    """One run, in a life after the other of its trainer. `resumed` are the steps that later ones went on after."""

    def __init__(self, folder: Path, engines: SharedEngines, kind: str, moments: random.Random) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        values = fleet_values(
            folder,
            engines,
            rollout={**AT_WORK, "schedule": "asynchronous", "fleet": {"min_engines": 1}},
            weight_sync={"in_flight": "continue", "timeout_s": 20},
            checkpoint={"every": 1, "asynchronous": False},
            environment={**KINDS[kind], "max_turn_tokens": 8, "retries": 20},
            algorithm={"dynamic_sampling_on": "unequal_scores"},
        )
        values["reward"] = {"components": [{"kind": "environment"}]}
        self.seed, self.model = values["seed"], engines.model
        self.groups_per_step = values["batch"]["groups_per_step"]
        self.output_dir = folder / "run"
        self.resumed: set[int] = {0}
        self.killed: Counter[str] = Counter()
        self._config = write_config(folder, values)
        self._launcher = engines.launcher
        self._moments = moments
        self._workers: list[BaseProcess] = []
        self._num_lives = 0

    def run(self, victims: Iterable[str]) -> None:
        """Train, kill one of the victims after the other, then train a few steps more."""
        try:
            self._start(10**6)
            for victim in victims:
                wait_until(self._has_gone_on, LIMIT_S)
                time.sleep(self._moments.uniform(0, 4))
                self._kill(victim)
                if victim == "trainer":
                    self._start(10**6)
            self._kill("trainer")
            num_steps = steps_done(self.output_dir) + 3
            self._start(num_steps)
            assert wait_for(self._workers, LIMIT_S) == [0], self._log()
        finally:
            kill(self._workers)
        self.check(num_steps)

    def _start(self, num_steps: int) -> None:
        self._num_lives += 1
        arguments = ["--config", str(self._config), f"num_steps={num_steps}"]
        self._workers = start_workers(TRAIN, 1, arguments, self.output_dir.parent / f"logs_{self._num_lives}")
        self._since = steps_done(self.output_dir)

    def _log(self) -> str:
        return (self.output_dir.parent / f"logs_{self._num_lives}" / "rank_0.log").read_text()[-4000:]

    def _has_gone_on(self) -> bool:
        assert self._workers[0].exitcode is None, self._log()
        return steps_done(self.output_dir) > max(self._since, 0)

    def _kill(self, victim: str) -> None:
        self.killed[victim] += 1
        if victim == "trainer":
            kill_when(self._workers, lambda: True)
            saved = max(self.output_dir.glob("checkpoints/step_*"), default=None)
            self.resumed.add(int(saved.name.removeprefix("step_")) if saved else 0)
            return
        found: list[psutil.Process] = []
        wait_until(lambda: bool(found.extend(self._processes(victim)) or found), LIMIT_S)
        self._moments.choice(found).kill()
        self._since = steps_done(self.output_dir)

    def _processes(self, victim: str) -> Iterator[psutil.Process]:
        if victim == "engine":
            for url in self._launcher.urls:
                pid = self._launcher.pid(url)
                if pid and psutil.pid_exists(pid):
                    yield psutil.Process(pid)
            return
        assert self._workers[0].exitcode is None, self._log()
        for process in psutil.Process(self._workers[0].pid).children(recursive=True):
            try:
                if MARKS[victim] in " ".join(process.cmdline()):
                    yield process
            except psutil.Error:
                continue

    def check(self, num_steps: int) -> None:
        """What must hold of the run, whatever was killed."""
        check_restarted_run(self.output_dir, num_steps)
        records = [record for record in read_metrics(self.output_dir / "metrics.jsonl") if record["step"] > 0]
        was_open = 0.0
        for record in records:
            if record["step"] - 1 in self.resumed:
                was_open = 0.0
            now = {state: record[f"environment/trajectories_{state}"] for state in ("started", *ENDS, "open")}
            assert now["started"] + was_open == sum(now[end] for end in ENDS) + now["open"], (record["step"], now)
            was_open = now["open"]
        differences = self._check_rows(num_steps)
        assert sorted(differences) == list(range(NUM_TURNS))
        assert max(map(max, differences.values())) < 1e-4, {turn: max(of) for turn, of in differences.items()}
        sums = {
            name: total(records, f"environment/{name}")
            for name in ("trajectories_started", "trajectories_finished", "trajectories_failed",
                         "trajectories_cancelled", "retries", "replays", "differing")
        }  # fmt: skip
        assert sums["differing"] == 0
        assert sums["retries"] or self.killed["worker"] + self.killed["program"] < 3
        print(f"{num_steps} steps, killed {dict(self.killed)}, {sums}, "
              f"{ {turn: (len(of), max(of)) for turn, of in differences.items()} }")  # fmt: skip

    def _check_rows(self, num_steps: int) -> dict[int, list[float]]:
        """Play all trained trajectories again. Returns how far the log-probs of tokens that the step's own weights
        sampled are from the trainer's, in nats, by turn."""
        tokenizer = load_tokenizer(str(self.model))
        dialogue = BareText(tokenizer)
        trained: Counter[int] = Counter()
        differences: dict[int, list[float]] = {}
        for step in range(1, num_steps + 1):
            rows = pq.read_table(self.output_dir / "samples" / f"step_{step:08d}.parquet").to_pylist()
            rows = [row for row in rows if row["outcome"] == "trained"]
            assert len(rows) == self.groups_per_step * GROUP_SIZE
            trained.update(row["request_id"] for row in rows)
            for row in rows:
                assert row["prompt_ids"] == tokenizer(row["prompt"])["input_ids"]
                trajectory, game, at = trajectory_of(row), Game(), 0
                seen = game.reset({}, seed_of_group(self.seed, row["prompt_index"]))
                rewards = 0.0
                apart = np.abs(np.subtract(row["engine_logprobs"], row["trainer_logprobs"], dtype=np.float64))
                for number, turn in enumerate(trajectory.turns):
                    sampled = sampled_rows(trajectory.sampled, at, turn.stop)
                    observed = trajectory.token_ids[at : sampled.start].tolist()
                    assert observed == dialogue.opening((), [{"role": "user", "content": seen["text"]}]), row
                    said = dialogue.read((), trajectory.token_ids[sampled].tolist()).text
                    seen, at = game.step({"text": said, "turn": number}), turn.stop
                    rewards += seen["reward"]
                    is_fresh = trajectory.versions[sampled] == step - 1
                    differences.setdefault(number, []).extend(apart[sampled][is_fresh].tolist())
                assert (trajectory.segments, len(trajectory.turns), trajectory.stop) == ((at,), NUM_TURNS, "done")
                assert (trajectory.reward, trajectory.correct) == (rewards, seen["correct"])
        assert set(trained.values()) == {1}
        return differences


ENDS = ("finished", "failed", "cancelled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600, help="how long each kind of environment runs")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    os.environ["DAPO_MEGA_API_KEY"] = API_KEY
    moments = random.Random(given.seed)

    def victims(kind: str) -> Iterator[str]:
        end = time.monotonic() + given.seconds
        while time.monotonic() < end:
            yield moments.choice(["engine", "trainer", *["worker" if kind == "function" else "program"] * 3])

    model = tiny_model(given.folder / "model")
    with serving_engines(model, given.folder / "served", 2) as launcher:
        for kind in KINDS:
            Soak(given.folder / kind, SharedEngines(launcher, model, ""), kind, moments).run(victims(kind))


if __name__ == "__main__":
    main()
