"""Runs on the engines that the tests share: in this process, so that a fault comes at the moment it is meant for."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from dapo_mega.config import RunConfig
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.training import loop as trainer
from dapo_mega.training.build import TrainingRun, build_run
from dapo_mega.training.run import close
from dapo_mega.training.trainer import Trainer
from dapo_mega.types import GenerationRequest, Prompt, Trajectory

from .conftest import SharedEngines
from .sglang_servers import call

GROUP_SIZE = 4
AT_WORK = {"max_response_tokens": 100}
Record = dict[str, float]


def fleet_values(folder: Path, engines: SharedEngines, **sections: Any) -> dict[str, Any]:
    """The configuration of a short run through the shared engines; `sections` are merged into it.

    The reward is a coin, so nearly all groups are mixed. `AT_WORK` makes responses long enough to be met in flight.
    """
    data = folder / "train.parquet"
    if not data.exists():
        questions = [f"{i} + {3 * i % 7} = ?" for i in range(200)]
        truths = [{"ground_truth": str(i)} for i in range(200)]
        pq.write_table(pa.table({"prompt": questions, "reward_model": truths}), data)
    values: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "seed": 3,
        "num_steps": 3,
        "threads_per_process": 1,
        "model": {"path": str(engines.model), "dtype": "fp32"},
        "data": {"max_prompt_tokens": 24, "train": {"path": str(data), "template": "bare"}},
        "rollout": {
            "placement": "fleet",
            "max_response_tokens": 48,
            "fleet": {
                "urls": engines.launcher.urls,
                "min_engines": 2,
                "heartbeat_s": 0.5,
                "hung_after_s": 60,
                "wait_limit_s": 400,
            },
        },
        "reward": {"source": "random", "overlong_cache_tokens": 4},
        "algorithm": {"max_staleness": 2},
        "batch": {
            "groups_per_step": 4,
            "group_size": GROUP_SIZE,
            "generation_groups": 6,
            "mini_batch_groups": 2,
            "tokens_per_microbatch": 256,
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "weight_sync": {"timeout_s": 60, "bucket_mib": 0.05},
        "checkpoint": {"every": 0, "save_hf_at_end": False},
    }
    for section, given in sections.items():
        values[section] = merge(values.get(section, {}), given) if isinstance(given, dict) else given
    return values


def merge(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    nested = {key: merge(values.get(key, {}), value) for key, value in given.items() if isinstance(value, dict)}
    return {**values, **given, **nested}


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@contextmanager
def training_run_of(values: dict[str, Any], made: Trainer | None = None) -> Iterator[TrainingRun]:
    """The run's pipeline in this process, with a trainer that was `made` or one in this process alone; closed
    afterwards."""
    training_run = build_run(RunConfig.model_validate(values), 0, trainer=made)
    try:
        yield training_run
    finally:
        close(training_run)
        training_run.trainer.close()
        stop_processes()


def train_to_the_end(training_run: TrainingRun) -> list[Record]:
    """The records of all steps."""
    trainer.train(training_run)
    return [r for r in read_metrics(Path(training_run.config.output_dir) / "metrics.jsonl") if r["step"] > 0]


def run(training_run: TrainingRun, *, num_evaluated: int = 0, max_deviation: float = 1e-4) -> list[Record]:
    """Train to the end; the records of all steps, which `checked_records` has checked."""
    train_to_the_end(training_run)
    config = training_run.config
    return checked_records(
        Path(config.output_dir), config.num_steps, num_evaluated=num_evaluated, max_deviation=max_deviation
    )


def checked_records(
    output_dir: Path, num_steps: int, *, num_evaluated: int = 0, max_deviation: float = 1e-4
) -> list[Record]:
    """Every step is there once; at every step each request has one end or is open; every group asked for is in the
    account once.

    `num_evaluated` requests were asked for evaluation. The engines' log-probs are the trainer's to within
    `max_deviation` nats.
    """
    everything = read_metrics(output_dir / "metrics.jsonl")
    for number, record in enumerate(everything, 1):
        ends = ("answered", "failed", "cancelled")
        ended = sum(total(everything[:number], f"rollout/requests_{end}") for end in ends)
        submitted = total(everything[:number], "rollout/requests_submitted")
        assert submitted == ended + record["rollout/requests_open"], record["step"]
    records = [record for record in everything if record["step"] > 0]
    assert [record["step"] for record in records] == list(range(1, num_steps + 1))
    sums = {name: total(everything, name) for name in records[-1]}
    assert (sums["rollout/dropped_groups"], sums["rollout/requests_failed"]) == (0, 0), sums
    groups = sums["groups/offered"] + sums["rollout/groups_expired_in_flight"] + records[-1]["rollout/groups_in_flight"]
    assert sums["rollout/requests_submitted"] == num_evaluated + GROUP_SIZE * groups
    # A step that trains on surplus alone has no response of the current weights to compare.
    assert max(record.get("rollout/logprob_abs_diff_max", 0) for record in records) < max_deviation
    return records


def check_restarted_run(output_dir: Path, num_steps: int) -> None:
    """Every step is there once, by whole weights; every request number has a group that was scored, given up as too
    old, or waits once."""
    records = [record for record in read_metrics(output_dir / "metrics.jsonl") if record["step"] > 0]
    assert [record["step"] for record in records] == list(range(1, num_steps + 1))
    assert max(record.get("rollout/logprob_abs_diff_max", 0) for record in records) < 1e-4
    loop = json.loads((output_dir / "checkpoints" / f"step_{num_steps:08d}" / "loop.json").read_text())
    ends = ("groups/offered", "rollout/groups_expired_in_flight", "rollout/dropped_groups")
    num_groups = sum(total(records, name) for name in ends) + len(loop["in_flight"])
    assert num_groups * GROUP_SIZE == loop["collector"]["next_request_id"]
    waiting = [request_id for group in loop["in_flight"] for request_id in group["request_ids"]]
    waiting += [response["request_id"] for group in loop["buffer"] for response in group["responses"]]
    assert len(set(waiting)) == len(waiting)


def total(records: list[Record], name: str) -> float:
    return sum(record.get(name, 0.0) for record in records)


@contextmanager
def saboteur(act: Callable[[], None]) -> Iterator[None]:
    """Do this in a thread of its own meanwhile; what went wrong there is raised at the end."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    yield
    thread.join(240)
    assert not thread.is_alive(), "the saboteur is not done"
    if errors:
        raise errors[0]


def wait_until(condition: Callable[[], bool], limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)


def signal_engine(engines: SharedEngines, index: int, number: signal.Signals) -> None:
    """Send the signal to all processes of the engine, the first one last."""
    pid = engines.launcher.pid(engines.launcher.urls[index])
    assert pid
    main = psutil.Process(pid)
    for process in [*main.children(recursive=True), main]:
        process.send_signal(number)


def responses_over_an_update(training_run: TrainingRun) -> list[tuple[Prompt, Trajectory]]:
    """Change the weights while groups are generated; the prompts and trajectories that old and new ones had part in."""
    collector, fleet = training_run.collector, training_run.fleet

    async def generated(request: GenerationRequest) -> Trajectory:
        return Trajectory.of(await fleet.generate(request))

    pending = []
    prompts = [collector.prompts[index] for index in fleet.call(lambda: collector.sampler.next(8))]
    for prompt, requests in zip(prompts, fleet.call(lambda: list(map(collector.new_requests, prompts))), strict=True):
        for number, request in enumerate(requests, 1):
            # Of different lengths, so that those that began together do not end together.
            sampling = replace(request.sampling, max_new_tokens=40 * number)
            pending.append((prompt, fleet.start(generated(replace(request, sampling=sampling)))))
    wait_until(lambda: any(future.done() for _, future in pending))  # The others are in the middle of theirs then.
    with torch.no_grad():
        for parameter in (
            parameter for chunk in training_run.trainer.policy.chunks for parameter in chunk.parameters()
        ):
            if parameter.requires_grad:
                parameter.mul_(1.5)
    training_run.weight_sync.push(training_run.step + 1)
    complete = [(prompt, future.result(600)) for prompt, future in pending]
    return [(prompt, trajectory) for prompt, trajectory in complete if len(trajectory.version_spans) > 1]


def engine_logprobs(url: str, tokens: list[int], **more: str) -> list[tuple[float, int, Any]]:
    """SGLang's log-prob of each token after the ones before, with the token; nothing for the first."""
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    return call(url, "/generate", {**body, **more, "logprob_start_len": 0})[1]["meta_info"]["input_token_logprobs"]


def deviation_after_update(url: str, prompt: Prompt, response: Trajectory, **more: str) -> float:
    """Of the tokens after the last update: how far, in nats, their log-probs are at most from those that the engine's
    weights, which are still the same, give them in a single pass."""
    scores = engine_logprobs(url, [*prompt.token_ids.tolist(), *response.token_ids.tolist()], **more)
    start = response.version_spans[-2][1]
    samples = zip(
        response.token_ids[start:], response.logprobs[start:], scores[len(prompt.token_ids) + start :], strict=True
    )
    # SGLang scores another token in place of the vocabulary's last one.
    return max(abs(logprob - score) for token, logprob, (score, scored_id, _) in samples if scored_id == token)


def num_serving(training_run: TrainingRun) -> int:
    """Engines that hold the current weights and generate."""
    return len(training_run.fleet._membership.in_state("serving"))


def wait_for_both_engines(training_run: TrainingRun) -> None:
    """A run that may begin with one engine does not wait for the other."""
    membership = training_run.fleet._membership
    wait_until(lambda: len(membership.in_state("serving", "outdated")) == 2)


def in_flight(training_run: TrainingRun, url: str) -> int:
    """Requests that the engine works on now."""
    return next((e.in_flight for e in training_run.fleet._dispatcher.engines() if e.url == url), 0)


def stop_at_work(training_run: TrainingRun, engines: SharedEngines, index: int) -> None:
    """Stop the engine's processes while step 2 waits for requests that it works on."""
    url = engines.launcher.urls[index]

    def is_at_work() -> bool:
        return training_run.step == 1 and in_flight(training_run, url) > 4

    def has_stopped() -> bool:
        if not is_at_work():
            return False
        signal_engine(engines, index, signal.SIGSTOP)
        time.sleep(0.2)  # Answers that it had sent arrive.
        if not is_at_work():
            signal_engine(engines, index, signal.SIGCONT)
            return False
        return True

    wait_until(has_stopped)
