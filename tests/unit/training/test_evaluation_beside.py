"""Evaluations beside training: what is recorded of them, when, and what a resumed run makes of one under way."""

import contextlib
import logging
import re
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from dapo_mega.config import RunConfig
from dapo_mega.engines.protocol import Generation
from dapo_mega.engines.sglang.event_loop import LoopThread
from dapo_mega.errors import InputError, StopRequested
from dapo_mega.evaluation.evaluator import Evaluator
from dapo_mega.metrics import MetricsWriter, read_metrics
from dapo_mega.metrics.timeline import Activity
from dapo_mega.rewards import ScoringFailure
from dapo_mega.rewards.composed import ComposedScore
from dapo_mega.training import evaluating
from dapo_mega.training.evaluation_beside import BesideTraining, is_recorded
from dapo_mega.types import GenerationFailure, Prompt, Response

TIMEOUT_S = 20


class Reward:
    """Right where the response's first token is even; waits until it may."""

    def __init__(self, fails=False):
        self.may_score = threading.Event()
        self.may_score.set()
        self.fails = fails
        self.threads = set()

    def begin_step(self):
        pass

    def score(self, records):
        assert self.may_score.wait(TIMEOUT_S)
        self.threads.add(threading.current_thread())
        if self.fails:
            return [ScoringFailure("scripted") for _ in records]
        verdicts = [bool(record.token_ids[0] % 2 == 0) for record in records]
        return [ComposedScore(float(v), float(v), v, {}, str(v)) for v in verdicts]


NUM_REQUESTS = 6


class Fleet:
    """Answers when it is told to."""

    def __init__(self):
        self.asked = []
        self.thread = LoopThread("fleet")
        self.has_asked = threading.Semaphore(0)

    def start(self, work):
        future = self.thread.start(work)
        assert self.has_asked.acquire(timeout=TIMEOUT_S)
        return future

    @contextlib.asynccontextmanager
    async def reserved(self, **given):
        self.asked.append(([], given))
        self.engines = SimpleNamespace(generate=self._generate, num_engines=1, ended_early="")
        yield self.engines

    def _generate(self, request):
        generations, _ = self.asked[-1]
        generations.append(Generation(request, self.thread.loop))
        if len(generations) == NUM_REQUESTS:
            self.has_asked.release()
        return generations[-1]

    def answer(self, num_missing=0, ended_early=""):
        self.thread.run(self._answer(num_missing, ended_early))

    async def _answer(self, num_missing, ended_early):
        generations, given = self.asked[-1]
        self.engines.ended_early = ended_early
        tokens = np.zeros(3, np.int32)
        for i, generation in enumerate(generations):
            request_id = generation.request.request_id
            if i < NUM_REQUESTS - num_missing:
                logprobs = tokens.astype(np.float32)
                generation.answer(Response(request_id, tokens + i, logprobs, "stop", given["version"]))
            else:
                generation.answer(GenerationFailure(request_id, ended_early))


class Recorder:
    def __init__(self):
        self.files = []

    def write(self, file):
        self.files.append(file)


@pytest.fixture
def start(tmp_path):
    """Start a run of ten steps at a step: all that evaluations touch of it. `step` moves it on."""
    writers, fleets = [], []

    def make(step=0, interrupted=None, reward=None, check_stop=lambda: None):
        config = RunConfig.model_validate(
            {
                "output_dir": str(tmp_path),
                "num_steps": 10,
                "model": {"path": "m"},
                "data": {"train": {"path": "d"}},
                "rollout": {"placement": "fleet", "fleet": {"rendezvous": "127.0.0.1:21600"}},
                "tracking": {"samples_per_evaluation": 1},
                "evaluation": {"beside_training": True, "samples_per_prompt": 2, "engines": 3, "limit_s": 77.0},
            }
        )
        reward = reward or Reward()
        prompts = [Prompt(i, f"{i}?", np.array([i], np.int32), "g") for i in range(3)]
        evaluator = Evaluator(config, prompts, reward, lambda ids: [str(i) for i in ids], ())
        for writer in writers:
            writer.close()
        shutil.rmtree(tmp_path / "tensorboard", ignore_errors=True)  # A start waits until its file has a later second.
        writers.append(MetricsWriter(tmp_path, step + 1 if step else 0))
        if not step:
            writers[-1].write(0, {"policy/entropy": 0.0})
        messages = []
        activity = Activity()
        fleets.append(Fleet())
        return SimpleNamespace(
            config=config,
            step=step,
            activity=activity,
            unrecorded=None,
            fleet=fleets[-1],
            beside=BesideTraining(evaluator, config.evaluation, check_stop, activity),
            writer=writers[-1],
            recorder=Recorder(),
            interrupted=interrupted,
            progress=SimpleNamespace(message=messages.append),
            messages=messages,
            reward=reward,
        )

    yield make
    for writer in writers:
        writer.close()
    for fleet in fleets:
        fleet.thread.close()


def advance(run, to):
    while run.step < to:
        run.step += 1
        run.writer.write(run.step, {"policy/entropy": float(run.step)})


def records(tmp_path):
    return {record["step"]: record for record in read_metrics(tmp_path / "metrics.jsonl")}


def lines_of(tmp_path, step):
    """The lines of a step with something of an evaluation."""
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if f'"step": {step},' in line and "evaluation/" in line]


def test_a_result_is_recorded_at_its_step_when_later_steps_are_done(start, tmp_path):
    run = start()
    advance(run, 2)
    evaluating.begin_beside(run)
    ((_, given),) = run.fleet.asked
    assert given == {"version": 2, "num_engines": 3, "limit_s": 77.0}
    advance(run, 4)
    evaluating.settle_beside(run, wait=False)
    assert lines_of(tmp_path, 2) == []
    run.fleet.answer()
    evaluating.settle_beside(run, wait=True)
    recorded = records(tmp_path)
    assert recorded[2]["evaluation/avg_at_k"] == 0.5
    assert recorded[2]["policy/entropy"] == 2.0
    assert recorded[2]["evaluation/unfinished"] == recorded[2]["evaluation/failed"] == 0
    assert [step for step in recorded if "evaluation/k" in recorded[step]] == [2]
    (file,) = run.recorder.files
    assert (file.step, file.kind, len(file.rows)) == (2, "evaluation", 6)
    (message,) = run.messages
    assert message.startswith("held-out evaluation after step 2: avg@2=0.500")
    assert run.beside.step is None
    spans = run.activity.pop(4, {}).spans["evaluation"]
    assert [span.name for span in spans] == ["generation for step 2", "scoring for step 2"]
    evaluating.settle_beside(run, wait=True)
    assert len(lines_of(tmp_path, 2)) == 1


def test_scoring_takes_no_time_of_training_and_of_the_fleet(start, tmp_path):
    run = start()
    run.reward.may_score.clear()
    evaluating.begin_beside(run)
    run.fleet.answer()
    evaluating.settle_beside(run, wait=False)
    assert lines_of(tmp_path, 0) == []
    run.reward.may_score.set()
    evaluating.settle_beside(run, wait=True)
    assert len(lines_of(tmp_path, 0)) == 1
    assert not {thread.name for thread in run.reward.threads} & {"MainThread", "fleet"}


@pytest.mark.parametrize("num_missing", [2, 6])
def test_what_is_missing_at_the_limit_is_counted_and_told(start, tmp_path, caplog, num_missing):
    run = start()
    evaluating.begin_beside(run)
    run.fleet.answer(num_missing, "the limit of 77 s was reached")
    with caplog.at_level(logging.WARNING):
        evaluating.settle_beside(run, wait=True)
    recorded = records(tmp_path)[0]
    assert recorded["evaluation/unfinished"] == recorded["evaluation/failed"] == num_missing
    assert not {name for name in recorded if re.search("avg_at|mean|share|pass|part", name)}
    assert f"(the limit of 77 s was reached): {num_missing} of 6 responses are missing" in caplog.text
    assert f"no score, {num_missing} responses are missing" in run.messages[0]


def test_after_the_last_step_all_engines_evaluate(start):
    run = start()
    run.step = 10
    evaluating.begin_beside(run)
    assert run.fleet.asked[0][1]["num_engines"] is None


def test_waiting_ends_when_the_run_is_to_stop(start, tmp_path):
    def check_stop():
        raise StopRequested

    run = start(check_stop=check_stop)
    evaluating.begin_beside(run)
    with pytest.raises(StopRequested):
        evaluating.settle_beside(run, wait=True)
    assert run.beside.step == 0, "the checkpoint would not name the evaluation"


def test_a_reward_that_cannot_score_ends_the_run_as_in_training(start):
    run = start(reward=Reward(fails=True))
    evaluating.begin_beside(run)
    run.fleet.answer()
    with pytest.raises(InputError, match="could not be scored"):
        evaluating.settle_beside(run, wait=True)


def test_a_closed_evaluation_scores_nothing(start):
    run = start()
    evaluating.begin_beside(run)
    ((generations, _),) = run.fleet.asked
    run.beside.close()
    run.fleet.thread.close()
    assert all(generation.cancelled() for generation in generations)
    assert not run.reward.threads


@pytest.mark.parametrize(
    ("step", "was_recorded", "has_unrecorded", "again", "lost"),
    [
        (3, False, False, True, False),  # The checkpoint has the weights that were being evaluated.
        (4, False, False, False, True),
        (4, False, True, False, True),
        (4, True, False, False, False),  # The result came between checkpoint and kill.
        (3, True, False, False, False),
    ],
)
def test_an_evaluation_under_way_at_a_kill_is_repeated_or_lost_and_never_twice(
    start, tmp_path, caplog, step, was_recorded, has_unrecorded, again, lost
):
    killed = start()
    advance(killed, 3)
    evaluating.begin_beside(killed)
    advance(killed, 5)
    if was_recorded:
        killed.fleet.answer()
        evaluating.settle_beside(killed, wait=True)
    resumed = start(step, interrupted=3)
    resumed.unrecorded = {} if has_unrecorded else None
    with caplog.at_level(logging.WARNING):
        assert evaluating.take_up_interrupted(resumed) is again
    if again:
        evaluating.begin_beside(resumed)
    if again:
        assert resumed.fleet.asked[0][1]["version"] == 3
        advance(resumed, 4)
        resumed.fleet.answer()
        evaluating.settle_beside(resumed, wait=True)
    else:
        assert not resumed.fleet.asked
    assert len(lines_of(tmp_path, 3)) == 1
    recorded = records(tmp_path)[3]
    assert ("evaluation/lost" in recorded) is lost
    assert ("evaluation/avg_at_k" in recorded) is not lost
    assert ("is lost" in caplog.text) is lost
    assert is_recorded(str(tmp_path), 3)
    # A second start from the same checkpoint does not state it again.
    third = start(step, interrupted=3)
    assert evaluating.take_up_interrupted(third) is False
    assert len(lines_of(tmp_path, 3)) == 1
