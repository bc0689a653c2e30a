"""Evaluates a checkpoint on the held-out prompts of a run's file, as the run would."""

import contextlib
from pathlib import Path

import torch

from dapo_mega.config import RunConfig
from dapo_mega.data import load_evaluation_prompts, load_tokenizer
from dapo_mega.data.tokenizer import decoder, num_ids, stop_tokens
from dapo_mega.environments.build import make_environment
from dapo_mega.errors import InputError
from dapo_mega.evaluation.evaluator import Evaluator
from dapo_mega.evaluation.sampling import EmbeddedSampler
from dapo_mega.evaluation.settings import evaluation_settings
from dapo_mega.rewards.build import make_reward
from dapo_mega.rewards.trial import try_reward
from dapo_mega.rollout.scoring import trial_record
from dapo_mega.samples.files import file_of, samples_folder, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import SampleFile, rows_of_evaluation
from dapo_mega.samples.table import to_table


def evaluate_checkpoint(config: RunConfig, samples: Path | None = None) -> dict[str, float]:
    """`evaluation/...` metrics of the checkpoint `model.path` on `data.evaluation`, as training would report them. If
    `samples` is given, writes all responses to the folder `samples/` in it, as a run does."""
    if config.data.evaluation is None:
        raise InputError("data.evaluation names no dataset; add data.evaluation.path=FILE")
    path = Path(config.model.path)
    if not path.is_dir():
        raise InputError(f"model.path={path} does not exist; give a folder with a Hugging Face checkpoint")
    if config.threads_per_process:
        torch.set_num_threads(config.threads_per_process)
    tokenizer = load_tokenizer(config.model.path)
    environment, render = make_environment(config, tokenizer)
    with contextlib.ExitStack() as stack:
        stack.callback(environment.close)
        prompts = load_evaluation_prompts(config.data, tokenizer, render)
        engine = stack.enter_context(
            contextlib.closing(EmbeddedSampler(path, config.model.dtype, config.rollout.max_batch_rows))
        )
        reward = stack.enter_context(contextlib.closing(make_reward(config, for_evaluation=True)))
        if config.reward.is_own:
            try_reward(reward, trial_record(prompts.prompts[0]))
        decode, stops = decoder(tokenizer), stop_tokens(path, tokenizer)
        evaluator = Evaluator(config, prompts.prompts, reward, decode, stops, environment, num_ids(tokenizer))
        metrics = engine.run(evaluator.run(engine.generate))
    if samples:
        account = {"settings": evaluation_settings(config)}
        file = SampleFile(0, "evaluation", rows_of_evaluation(evaluator.pop_results()), account)
        write_table(file_of(samples_folder(samples), "evaluation", 0), to_table(file, TokenPieces(tokenizer)))
    return metrics
