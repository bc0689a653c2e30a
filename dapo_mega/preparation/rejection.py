"""Rejection sampling: a model's own responses to the prompts of a prepared dataset; those that are kept are a dataset
for supervised fine-tuning (DeepSeek-R1, arXiv 2501.12948, section 2.3.3; Kimi k1.5, arXiv 2501.12599, section 2.4)."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow.parquet as pq

from dapo_mega.config import RunConfig
from dapo_mega.config.preparation import DecontaminationConfig
from dapo_mega.data import load_tokenizer
from dapo_mega.errors import FleetError, InputError
from dapo_mega.evaluation.responses import has_all_answers
from dapo_mega.evaluation.run import Task, answered, check_folder, locked
from dapo_mega.evaluation.settings import evaluation_settings
from dapo_mega.metrics.run_text import installed_versions
from dapo_mega.preparation import output as prepared
from dapo_mega.preparation.asking import (
    asking_settings,
    check_lengths,
    check_range,
    dataset_of,
    pass_rate_summary,
    prompts_of,
    sampler_of,
)
from dapo_mega.preparation.card import DECIDING_PACKAGES, Card
from dapo_mega.preparation.contamination import EvaluationIndex
from dapo_mega.preparation.normalization import normal_text
from dapo_mega.preparation.sources import evaluation_index
from dapo_mega.samples.table import errors_of_reading
from dapo_mega.types import Prompt

Rule = Literal["all", "best", "shortest", "diverse"]
Response = dict[str, Any]
"""A row of a file of samples."""

MADE_BY: Final = "rejection-sample"
_NGRAM: Final = 4
_COLUMNS: Final = ["prompt_index", "request_id", "response", "answer", "correct", "reward", "length", "finish_reason"]


@dataclass(frozen=True)
class KeepOptions:
    """`samples` responses are drawn per prompt. Of the correct ones `rule` keeps: all; the `per_prompt` of the highest
    reward (best: also where the reward does not judge correctness), the shortest, or the most diverse, each as far as
    possible from those before. `min_distance`: the n-gram distance, 0 to 1, below which a response repeats one that is
    kept. Prompts with a pass rate outside of `pass_rates` are left out.

    `drop_failed`: do without responses that could not be had, in place of an error. For the others see `new_dataset`.
    """

    samples: int
    rule: Rule = "all"
    per_prompt: int = 1
    min_distance: float = 0.0
    pass_rates: tuple[float, float] = (0.0, 1.0)
    decontamination: DecontaminationConfig = field(default_factory=DecontaminationConfig)
    drop_failed: bool = False
    dropped: prepared.DroppedFormat | None = None
    force: bool = False


def responses_folder(output: Path) -> Path:
    """Where the responses for the dataset `output` are kept, also after it is written."""
    return output.with_name(f"{output.name}.responses")


def rejection_sample(config: RunConfig, source: Path, output: Path, options: KeepOptions) -> Card:
    """Write the responses of the model of `config` to the prompts of the prepared dataset `source` that are kept, as
    the dataset `output`; returns its card, in which rows are responses.

    The sections of `config` that count are model, data.train (but for its path), rollout, reward and seed. All scored
    responses stay in `responses_folder(output)`: nothing is asked twice, after a kill or by another rule. Raises
    InputError for what cannot be used, and FleetError if engines are gone or did not answer.
    """
    check_range(options.pass_rates)
    if not 0 <= options.min_distance <= 1:
        raise InputError(f"an n-gram distance is from 0 to 1, and {options.min_distance:g} is given")
    prepared.check_folder(output, force=options.force)
    if config.reward.for_evaluation().deciding is None and (options.rule != "best" or options.pass_rates != (0.0, 1.0)):
        raise InputError("the reward does not say which responses are correct; only --keep best does without that")
    index, sets = evaluation_index(options.decontamination)
    parent = prepared.read_dataset(source)[0]
    tokenizer = load_tokenizer(config.model.path)
    config, prompts = prompts_of(config, source, tokenizer)
    short = [prompt for prompt in prompts if len(prompt.token_ids) <= config.data.max_prompt_tokens]
    if not short:
        raise InputError(f"all prompts of {source} are over data.max_prompt_tokens; raise it")
    check_lengths(config, short)
    config = _as_evaluation(config, options.samples)
    settings = {
        **evaluation_settings(config),
        **asking_settings(config),
        "dataset_sha256": parent.data.sha256,
        "num_problems": len(short),
        "k": options.samples,
    }
    folder, path = responses_folder(output), Path(config.model.path)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder), contextlib.ExitStack() as stack:
        check_folder(folder, settings)
        task = Task("rejection sampling", config, short, settings, folder)
        file = answered(
            task,
            config.rollout.max_batch_rows,
            tokenizer,
            path,
            lambda task: stack.enter_context(contextlib.closing(sampler_of(config, task.prompts))),
        )
        if not has_all_answers(folder) and not options.drop_failed:
            raise FleetError(
                f"{folder} lacks responses that could not be had; the same command asks for these again; --drop-failed "
                f"does without them"
            )
        with prepared.new_dataset(output, options.dropped, force=options.force) as writer:
            rates, kept = [], Counter[int]()
            for number, responses in _by_prompt(file):
                verdicts = [response["correct"] for response in responses if response["correct"] is not None]
                rate = sum(verdicts) / len(verdicts) if verdicts else None
                rates += [] if rate is None else [rate]
                choices = choose(prompts[number], responses, rate, options, index)
                kept[_write(writer, prompts[number], rate, choices, f"{source}, row {number}")] += 1
            return writer.finish(
                MADE_BY,
                settings={
                    **settings,
                    **{"keep": options.rule, "per_prompt": None if options.rule == "all" else options.per_prompt},
                    **{"min_distance": options.min_distance, "pass_rates": list(options.pass_rates)},
                    "decontamination": {name: [vars(file) for file in files] for name, files in sets.items()},
                },
                versions=installed_versions(DECIDING_PACKAGES),
                details={
                    **pass_rate_summary(rates, options.samples),
                    "long_prompts": len(prompts) - len(short),
                    "prompts_by_kept_responses": {str(n): kept[n] for n in sorted(kept)},
                },
                parent=parent,
            )


def _as_evaluation(config: RunConfig, samples: int) -> RunConfig:
    """The configuration whose evaluation samples as its rollout does."""
    sampling = config.rollout.model_dump(include={"temperature", "top_p", "top_k"})
    evaluation = config.evaluation.model_copy(update={"samples_per_prompt": samples, **sampling})
    data = config.data.model_copy(update={"evaluation": dataset_of(config)})
    return config.model_copy(update={"evaluation": evaluation, "data": data})


def _by_prompt(file: Path) -> Iterator[tuple[int, list[Response]]]:
    """The responses to each prompt, which follow one another in the file."""
    with errors_of_reading(file, "remove its folder and start again"), pq.ParquetFile(file) as opened:
        batches = opened.iter_batches(columns=_COLUMNS, use_threads=False)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, found in groupby(rows, lambda row: int(row["prompt_index"])):
            yield number, list(found)


def choose(
    prompt: Prompt, responses: Sequence[Response], rate: float | None, options: KeepOptions, index: EvaluationIndex
) -> Iterator[tuple[Response, str, str]]:
    """Each response with the reason and the evidence for leaving it out, empty for those that are kept."""
    lowest, highest = options.pass_rates
    candidates: list[Response] = []
    spelled: set[str] = set()
    for response in responses:
        reason = evidence = ""
        if response["reward"] is None or (response["correct"] is None and options.rule != "best"):
            reason = "unscored"
        elif rate is not None and not lowest <= rate <= highest:
            reason, evidence = "too_hard" if rate < lowest else "too_easy", f"pass rate {rate:.3f}"
        elif response["correct"] is False:
            reason = "wrong"
        elif response["finish_reason"] == "length":
            reason, evidence = "truncated", f"{response['length']} tokens"
        elif not response["response"].strip():
            reason = "empty"
        elif (spelling := normal_text(response["response"]).spelling) in spelled:
            reason = "exact duplicate"
        else:
            spelled.add(spelling)
            text = normal_text(f"{prompt.problem}\n{response['response']}")
            if found := index.find(text) if len(index) else None:
                reason, evidence = "contaminated", found.evidence()
        if reason:
            yield response, reason, evidence
        else:
            candidates.append(response)
    yield from _selected(candidates, options)


def _selected(candidates: Sequence[Response], options: KeepOptions) -> Iterator[tuple[Response, str, str]]:
    """The candidates, which differ, by the rule."""
    order = {"best": lambda r: (-r["reward"], r["length"]), "all": lambda r: r["request_id"]}
    left = sorted(candidates, key=order.get(options.rule, lambda r: (r["length"], r["request_id"])))
    if options.rule != "diverse" and not options.min_distance:
        limit = len(left) if options.rule == "all" else options.per_prompt
        yield from ((response, "" if i < limit else "not chosen", "") for i, response in enumerate(left))
        return
    grams = {response["request_id"]: _ngrams(response["response"]) for response in left}
    nearest = dict.fromkeys(grams, 1.0)  # The distance to the nearest one that is kept.
    num_kept = 0
    while left:
        # Of equals the first by the rule.
        place = max(range(len(left)), key=lambda i: nearest[left[i]["request_id"]]) if options.rule == "diverse" else 0
        response = left.pop(place)
        own = response["request_id"]
        if num_kept and nearest[own] < options.min_distance:
            yield response, "near duplicate", f"n-gram distance {nearest[own]:.3f}"
        elif options.rule != "all" and num_kept >= options.per_prompt:
            yield response, "not chosen", ""
        else:
            num_kept += 1
            for other in left:
                number = other["request_id"]
                nearest[number] = min(nearest[number], _distance(grams[own], grams[number]))
            yield response, "", ""


def _ngrams(text: str) -> set[tuple[str, ...]]:
    tokens = normal_text(text).tokens
    return {tokens[i : i + _NGRAM] for i in range(max(1, len(tokens) - _NGRAM + 1))}


def _distance(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    """The share of the n-grams of both that only one has: 0 for equal texts, 1 for those that share nothing."""
    return 1 - len(one & other) / len(one | other)


def _write(
    writer: prepared.DatasetWriter,
    prompt: Prompt,
    rate: float | None,
    choices: Iterator[tuple[Response, str, str]],
    place: str,
) -> int:
    """Write what `choose` says of a prompt's responses, those that are left out first; how many were kept."""
    kept = []
    for response, reason, evidence in choices:
        if reason:
            writer.drop(reason, evidence, place, response)
        else:
            kept.append(response)
    for response in kept:
        writer.keep(_row(prompt, response, rate), place)
    return len(kept)


def _row(prompt: Prompt, response: Response, rate: float | None) -> Mapping[str, Any]:
    """`prompt` has the instruction around the problem, as the model was asked."""
    asked = [dict(message) for message in prompt.messages]
    said = response["response"]
    return {
        "prompt": asked,
        "response": said,
        "messages": [*asked, {"role": "assistant", "content": said}],
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "reward": response["reward"],
        "length": response["length"],
        "pass_rate": rate,
    }
