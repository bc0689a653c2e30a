"""Evaluates a model on benchmarks: asks what is not on disk yet, scores it, and writes the results."""

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_mega.atomic_files import replace_file
from dapo_mega.cli import print_once
from dapo_mega.config import RunConfig
from dapo_mega.data import load_prompts, load_tokenizer
from dapo_mega.data.tokenizer import decoder, num_ids, stop_tokens
from dapo_mega.errors import InputError
from dapo_mega.evaluation.benchmarks import Source
from dapo_mega.evaluation.choices import Choices, configuration, record, refuse_differences
from dapo_mega.evaluation.evaluator import Evaluator
from dapo_mega.evaluation.model_folder import EvaluatedModel, context_length, model_hash
from dapo_mega.evaluation.responses import ResponseStore, has_all_answers
from dapo_mega.evaluation.results import refuse_other_model, result_of, results_table, write_results
from dapo_mega.evaluation.sampling import Sampler
from dapo_mega.metrics.run_text import package_versions
from dapo_mega.rewards.build import make_reward
from dapo_mega.rollout.asking import Rollout, ask_in_parts
from dapo_mega.types import Prompt, Trajectory

SETTINGS_FILE = "settings.json"
_DECIDING_PACKAGES = ("python", "dapo_mega", "torch", "transformers", "numpy", "math-verify")
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Engine:
    """What generates. `settings` are written down with the score; responses to `part_size` requests are kept together
    on disk; `start` makes the sampler for a configuration and its prompts, when there is something to ask."""

    settings: Mapping[str, Any]
    part_size: int
    start: Callable[[RunConfig, Sequence[Prompt]], Sampler]


@dataclass(frozen=True)
class Evaluation:
    """A model and how it is evaluated. A folder `output` that an interrupted evaluation left is continued."""

    model: EvaluatedModel
    sources: Sequence[Source]
    choices: Choices
    dtype: str
    engine: Engine
    output: Path


@dataclass(frozen=True, eq=False)
class Task:
    """One benchmark with its problems as prompts, and its folder."""

    name: str
    config: RunConfig
    prompts: Sequence[Prompt]
    settings: Mapping[str, Any]
    folder: Path


def evaluate(evaluation: Evaluation) -> dict[str, Any]:
    """Write `results.json`, and return its content. Raises InputError before anything is asked, and FleetError when
    engines stay away."""
    output, model = evaluation.output, evaluation.model
    output.mkdir(parents=True, exist_ok=True)
    with locked(output), contextlib.ExitStack() as stack:
        tokenizer = load_tokenizer(str(model.folder))
        tasks = list(_tasks(evaluation, tokenizer))
        samplers: list[Sampler] = []

        def sampler(task: Task) -> Sampler:
            """Started once, when a benchmark has something to ask."""
            if not samplers:
                samplers.append(evaluation.engine.start(task.config, task.prompts))
                stack.callback(samplers[0].close)
            return samplers[0]

        results = {}
        for task in tasks:
            file = answered(task, evaluation.engine.part_size, tokenizer, model.folder, sampler)
            results[task.name] = result_of(file, task.settings)
        content = write_results(output, str(model.path), results)
    print_once(results_table(content))
    return content


def _tasks(evaluation: Evaluation, tokenizer: Any) -> Iterator[Task]:
    """The benchmarks, read and checked against what is in the folder. Says what was chosen."""
    model, choices, engine = evaluation.model, evaluation.choices, evaluation.engine
    context, digest = context_length(model.folder), model_hash(model.folder)
    refuse_other_model(evaluation.output, digest)
    versions = {name: found for name, found in package_versions().items() if name in _DECIDING_PACKAGES}
    has_template = tokenizer.chat_template is not None
    chat_template = has_template if choices.chat_template is None else choices.chat_template
    if choices.template_arguments and not chat_template:
        raise InputError("--template-arguments are of a chat template, which is not used here; leave them out")
    print_once(f"model: {model.path}, sha256 {digest[:12]}, {evaluation.dtype}, context of {context} tokens")
    how = "through the tokenizer's chat template" if chat_template else "as plain text"
    why = f" (the tokenizer has {'a' if has_template else 'no'} chat template)"
    print_once(f"prompts: template {choices.template}, {how}{why if choices.chat_template is None else ''}")
    for source in evaluation.sources:
        config = configuration(choices, source, model.folder, evaluation.dtype, context, chat_template=chat_template)
        prompts = _prompts(config, source, tokenizer, choices.num_problems, context)
        settings = record(source, config, prompts, model, digest, {"engine": engine.settings, "versions": versions})
        folder = evaluation.output / source.benchmark.name
        check_folder(folder, settings)
        name, k, limit = source.benchmark.name, settings["k"], settings["max_response_tokens"]
        print_once(
            f"{name}: {len(prompts)} problems of {source.path}, {k} responses to each, of at most {limit} tokens"
        )
        yield Task(name, config, prompts, settings, folder)


def check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises InputError for a folder with responses that came about otherwise than these settings say. The k of those
    that are whole may be raised."""
    if (folder / SETTINGS_FILE).exists():
        refuse_differences(folder / SETTINGS_FILE, settings, may_grow=has_all_answers(folder))
    elif (folder / "samples").exists():
        raise InputError(
            f"{folder} holds responses, but no {SETTINGS_FILE} that says how they came about; give another --output"
        )


def _prompts(config: RunConfig, source: Source, tokenizer: Any, limit: int | None, context: int) -> Sequence[Prompt]:
    """The first `limit` problems. Raises InputError for one that leaves no room for the longest response."""
    assert config.data.evaluation
    name, response = source.benchmark.name, config.rollout.max_response_tokens
    try:
        prompts = load_prompts(config.data.evaluation, tokenizer, 10**9).prompts[:limit]
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest + response > context:
            too_long = f"which with {response} for the response is more than the model's context of {context}; give "
            if longest < context:
                too_long += f"--max-tokens {context - longest} or less"
            else:
                too_long += "a shorter --template, fewer --num-problems, or a model with more positions"
            load_prompts(config.data.evaluation, tokenizer, context - response, too_long=too_long)  # Names the row.
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    return prompts


def answered(task: Task, part_size: int, tokenizer: Any, model: Path, sampler: Callable[[Task], Sampler]) -> Path:
    """The file with the responses to all requests of a benchmark, after asking those that are missing."""
    with contextlib.closing(make_reward(task.config, for_evaluation=True)) as reward:
        decode, ends = decoder(tokenizer), stop_tokens(model, tokenizer)
        evaluator = Evaluator(task.config, task.prompts, reward, decode, ends, num_tokens=num_ids(tokenizer))
        k = task.config.evaluation.responses_per_prompt
        store = ResponseStore(task.folder, evaluator.requests, k, part_size, tokenizer)
        if not store.is_finished:
            task.folder.mkdir(exist_ok=True)
            replace_file(task.folder / SETTINGS_FILE, json.dumps(task.settings, indent=1) + "\n")
            store.take_over()
        if missing := store.missing():
            total = len(evaluator.requests)
            done = total - sum(map(len, missing.values()))
            if done:
                print_once(f"{task.name}: {done} responses are there, {total - done} are missing")
            asked, next_line = sampler(task), time.monotonic() + _SECONDS_BETWEEN_LINES

            def keep(part: int, rollouts: Sequence[Rollout]) -> None:
                nonlocal done, next_line
                answered = [rollout for rollout in rollouts if isinstance(rollout, Trajectory)]
                if answered:
                    store.write(part, evaluator.score(answered), asked.engines)
                done += len(rollouts)
                if time.monotonic() >= next_line:
                    next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
                    print_once(f"{task.name}: {done} of {total} responses")

            parts = ((part, evaluator.prompted(requests)) for part, requests in missing.items())
            asked.run(ask_in_parts(asked.generate, parts, keep, asked.most_open))
        store.finish(task.settings)
    return store.file


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Raises InputError while another process evaluates into the folder."""
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another evaluation writes into {output}; wait until it ends, or give another --output"
            ) from None
        yield
