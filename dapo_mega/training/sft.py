"""Supervised fine-tuning with the same policy class: the cold start before RL, as in DeepSeek-R1."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from dapo_mega.atomic_files import replace_file
from dapo_mega.batching.samples import flatten, single_turn
from dapo_mega.checkpoints.hf_export import save_hf_checkpoint
from dapo_mega.cli import before_leaving, forget_before_leaving, is_rank_zero, print_once
from dapo_mega.config import SftConfig, dump_config, load_config
from dapo_mega.config.base import may_change_at_resume
from dapo_mega.data import Demonstration, PromptCursor, load_demonstrations, load_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.objectives import SupervisedLoss, TokenBatch
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.metrics import MetricsWriter, ProgressDisplay
from dapo_mega.training.process_watch import ProcessWatch
from dapo_mega.training.run import held_folder
from dapo_mega.training.run_status import RunStatus

_STOPPED = "fine-tuning was stopped by SIGTERM and has no checkpoints; the same command starts it from the beginning"
_COLUMNS = (("loss", "policy/loss", ".4f"), ("tokens/s", "policy/tokens_per_s", ".0f"))


def run_sft(config: SftConfig) -> None:
    """Train on the demonstrations for `num_steps` updates and write the result to `output_dir/hf`.

    A finished output is kept. Every rank draws the same order of demonstrations from the seed. Raises InputError if
    another trainer works in the folder.
    """
    status = RunStatus(Path(config.output_dir))
    before_leaving(status.left)
    with ProcessWatch(nothing_saved=_STOPPED) as watch:
        watch.follow_peers(group_is_up=False)
        _run(config, status, watch)
    forget_before_leaving(status.left)


def _run(config: SftConfig, status: RunStatus, watch: ProcessWatch) -> None:
    folder = Path(config.output_dir)
    if (folder / "hf" / "config.json").is_file():
        _refuse_changes(config, folder)
        print_once(f"{folder / 'hf'} already holds a fine-tuned model; nothing to do")
        return
    if not Path(config.model.path).is_dir():
        raise InputError(f"model.path={config.model.path} does not exist; give a folder with a Hugging Face checkpoint")
    if config.threads_per_process:
        torch.set_num_threads(config.threads_per_process)
    tokenizer = load_tokenizer(config.model.path)
    demonstrations = load_demonstrations(config.data.train, tokenizer, config.data.max_tokens)
    processes = start_processes(config.parallel, config.seed)
    watch.follow_peers(group_is_up=True)
    with held_folder(folder, status, processes):
        policy = MegatronPolicy(
            config.model,
            config.parallel,
            config.optimizer,
            processes,
            temperature=1.0,
            updates_per_step=1,
            num_steps=config.num_steps,
            compute=config.compute,
        )
        if is_rank_zero():
            replace_file(folder / "config.yaml", dump_config(config))
            status.running()
            with MetricsWriter(folder) as writer, ProgressDisplay(config.num_steps, columns=_COLUMNS) as progress:
                _train(policy, config, demonstrations, writer, progress)
        else:
            _train(policy, config, demonstrations, None, None)
        save_hf_checkpoint(policy, folder / "hf")
        status.completed_step = lambda: config.num_steps
        if is_rank_zero():
            status.finished()
        watch.forget_peers()
        dist.barrier(group=processes.control)
    stop_processes()


def _refuse_changes(config: SftConfig, folder: Path) -> None:
    """A finished folder of another configuration is not what was asked for."""
    if not (folder / "config.yaml").is_file():
        return
    saved = load_config(SftConfig, folder / "config.yaml").model_dump()
    given = config.model_dump()
    changed = sorted(name for name in given if given[name] != saved[name] and not may_change_at_resume(SftConfig, name))
    if changed:
        raise InputError(
            f"{folder} holds a model fine-tuned with another configuration (different: {', '.join(changed)}); give "
            f"another output_dir"
        )


def _train(
    policy: MegatronPolicy,
    config: SftConfig,
    demonstrations: Sequence[Demonstration],
    writer: MetricsWriter | None,
    progress: ProgressDisplay | None,
) -> None:
    cursor = PromptCursor(len(demonstrations), config.seed)
    for step in range(1, config.num_steps + 1):
        started = time.perf_counter()
        chosen = [demonstrations[i] for i in cursor.next(config.batch_samples)]
        metrics = policy.update(_micro_batches(policy, config, chosen), SupervisedLoss())
        num_tokens = sum(len(d.prompt_token_ids) + len(d.response_token_ids) for d in chosen)
        metrics["time/step_s"] = time.perf_counter() - started
        metrics["policy/tokens_per_s"] = num_tokens / metrics["time/step_s"]
        if writer and progress:
            writer.write(step, metrics)
            progress.update(step, metrics)


def _micro_batches(
    policy: MegatronPolicy, config: SftConfig, demonstrations: Sequence[Demonstration]
) -> list[TokenBatch]:
    batch = policy.pack(
        flatten([single_turn(d.prompt_token_ids, d.response_token_ids) for d in demonstrations]),
        token_budget=config.tokens_per_microbatch,
        aggregation="token_mean",
        max_response_tokens=config.data.max_tokens,
    )
    return [TokenBatch(micro_batch) for micro_batch in batch.mini_batches[0]]
