"""Checkpoints of a run: Megatron's distributed checkpoint of the policy, of the critic if there is one, and the loop's
own state, in one folder.

Files are written in the background from a snapshot while training continues. All ranks complete the checkpoint together
at the end of a later step; `folders.py` describes a complete checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dapo_mega.atomic_files import disk_refusal, read_json_object, replace_file
from dapo_mega.checkpoints.folders import MANIFEST_FILE, CheckpointFolders, find_changed_bytes, read_manifest
from dapo_mega.config import CheckpointConfig
from dapo_mega.distributed.processes import Processes
from dapo_mega.errors import InputError, is_lost_connection
from dapo_mega.megatron.core.checkpoint_files import (
    CHECKPOINT_ERRORS,
    CheckpointWriting,
    checked_layer_states,
    load_restricted,
    merge_layer_states,
    num_optimizers,
    random_states,
    set_random_states,
    sharded_optimizer,
    with_prefix,
    without_fp8,
)
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.models.hf_writer import copy_config_and_tokenizer, write_config
from dapo_mega.models.megatron_format.files import CRITIC_PREFIX, MTP_PREFIX
from dapo_mega.models.megatron_format.pickles import check_pickles, read_metadata
from dapo_mega.models.megatron_format.writing import write_vocabulary
from dapo_mega.models.stored_model import CRITIC_CONFIG_FILE

Arrays = Mapping[str, npt.NDArray[Any]]

_FULL_BYTES = 2**24
_LAYER_STATE = "_extra_state"

EVALUATION_UNDER_WAY = "evaluation_under_way"
"""The name in the loop's state of the step whose evaluation beside training was under way."""

HELD_OUT = "held_out"
"""The name in the loop's state of what fine-tuning knows of its evaluations."""


@dataclass(frozen=True)
class LoopState:
    """The loop's state beside the policy: JSON values and arrays; `step` is the last completed step."""

    step: int
    values: Mapping[str, Any]
    arrays: Arrays


class CheckpointStore(CheckpointFolders):
    """The checkpoints of one run, `root/step_N`: what the folders offer is local, `save`, `finish` and `load` are
    collective over all ranks."""

    def __init__(
        self, root: Path, keep_last: int, keep_every: int | None = None, *, asynchronous: bool = False
    ) -> None:
        super().__init__(root, keep_last, keep_every)
        self._asynchronous = asynchronous
        self._writing = CheckpointWriting()
        self._unfinished_step: int | None = None
        self._checksums: dict[str, int] = {}

    @classmethod
    def of_run(cls, output_dir: str, config: CheckpointConfig) -> CheckpointStore:
        root = Path(output_dir) / "checkpoints"
        return cls(root, config.keep_last, config.keep_every, asynchronous=config.asynchronous)

    def newest_intact(
        self, seen: Sequence[Sequence[str]], find_damages: Callable[[Path], Sequence[str | None]]
    ) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose checksums are right, and a sentence for each skipped one. `seen` are the names of
        the complete ones, and `find_damages(folder)` what is damaged in one, as each rank finds it.

        Raises InputError if the ranks see different files.
        """
        if any(names != seen[0] for names in seen):
            differing = sorted({names[0] if names else "none" for names in seen})
            raise InputError(
                f"the processes see different checkpoints in {self.root} (the newest: {', '.join(differing)}); "
                f"output_dir must be on a file system that all machines share"
            )
        skipped = self.skipped()
        for folder in (self.root / name for name in seen[0]):
            damage = next((damage for damage in find_damages(folder) if damage), None)
            if damage is None:
                return folder, skipped
            skipped.append(f"skipping the damaged checkpoint {folder} ({damage})")
        return None, skipped

    def has_unrecorded_step(self, path: Path) -> bool:
        """Whether the step of this checkpoint had not been recorded when it was written."""
        return _loop_value(path, "unrecorded") is not None

    def evaluation_under_way(self, path: Path) -> int | None:
        """The step of the evaluation beside training that was under way, if there was one."""
        step: int | None = _loop_value(path, EVALUATION_UNDER_WAY)
        return step

    def evaluations_since_best(self, path: Path) -> int:
        """How many evaluations of fine-tuning in a row were not better than one before, when this was written."""
        return int((_loop_value(path, HELD_OUT) or {}).get("num_worse", 0))

    def save(
        self, policy: TrainedModel, state: LoopState | None, step: int, critic: TrainedModel | None = None
    ) -> None:
        """Write `step_{step}`; rank 0 has the loop's state. An asynchronous save returns once everything is copied and
        the models may change; `finish` completes the checkpoint. Raises InputError if writing fails.
        """
        self.finish(policy)
        rng = _gather_rng(policy)
        partial = self.partial(step)
        failure = None
        if policy.processes.rank == 0:
            failure = _attempt(lambda: self.begin(step))
        self._check(policy, failure, step)
        failure = _attempt(lambda: self._write_megatron(policy, critic, partial))
        if failure is not None:
            # The other ranks may be in Megatron's collectives: they learn of the failure when this process exits.
            raise self._refusal(policy, failure, step)
        if state and policy.processes.rank == 0:
            failure = _attempt(lambda: _write_beside(partial, policy, critic, state, rng))
        self._check(policy, failure, step)
        self._unfinished_step = step
        if not self._asynchronous:
            self.finish(policy)

    def finish(self, policy: TrainedModel, *, wait: bool = True) -> None:
        """Complete the pending checkpoint, if any. Without `wait`, do nothing if its files are not written yet. Raises
        InputError if writing failed."""
        step = self._unfinished_step
        if step is None:
            return
        failure = _attempt(lambda: self._writing.finalize(wait=wait))
        if failure is None and self._writing.is_pending:
            return
        self._unfinished_step = None
        checksums = self._check(policy, failure, step, self._checksums)
        if policy.processes.rank == 0:
            failure = _attempt(lambda: self.complete(step, checksums))
        self._check(policy, failure, step)

    def _write_megatron(self, policy: TrainedModel, critic: TrainedModel | None, folder: Path) -> None:
        """Start writing Megatron's files; `finish` waits for them."""
        content = _sharded_content(policy)
        if critic:
            content["critic"] = with_prefix(_sharded_content(critic), CRITIC_PREFIX)
        self._checksums = self._writing.start(content, folder, from_copy=self._asynchronous)

    def load(self, policy: TrainedModel, path: Path, critic: TrainedModel | None = None) -> LoopState:
        """Restore the policy, and the critic if one is given, in place, in any layout, and return the loop's state on
        every rank."""
        check_pickles(path)
        _check_optimizers(policy, path, "num_optimizers")
        if critic:
            if not (path / CRITIC_CONFIG_FILE).is_file():
                raise InputError(
                    f"checkpoint {path} holds no critic, which algorithm.advantage=gae needs; resume with the "
                    f"advantage that the run was started with, or start a run in another output_dir with its export "
                    f"as model.path"
                )
            _check_optimizers(critic, path, "num_critic_optimizers")
        saved = read_metadata(path).state_dict_metadata.keys()
        has_adapters = any(".lora." in key for key in saved)
        if has_adapters != bool(policy.lora):
            raise InputError(
                f"checkpoint {path} is of a run with{'' if has_adapters else 'out'} lora, unlike this one; resume with "
                f"the section lora as it was, or start a run in another output_dir with its export as model.path"
            )
        has_mtp = any(key.startswith(MTP_PREFIX) for key in saved)
        if has_mtp != policy.arch.trains_mtp:
            raise InputError(
                f"checkpoint {path} is of a run with model.train_mtp={str(has_mtp).lower()}, unlike this one; resume "
                f"with it, or start a run in another output_dir with its export as model.path"
            )
        if policy.lora and (left_out := policy.lora.left_out(saved)):
            raise InputError(
                f"checkpoint {path} holds adapters that lora.targets={list(policy.lora.config.targets)} leaves out "
                f"({left_out[0]} first); resume with the targets that the run was started with"
            )
        wanted = _wanted_content(policy, saved)
        if critic:
            wanted["critic"] = with_prefix(_wanted_content(critic, saved, CRITIC_PREFIX), CRITIC_PREFIX)
        try:
            loaded = load_restricted(wanted, path)
            values = read_json_object(path / "loop.json")
            step = int(values.pop("step"))
            for name in ("num_optimizers", "num_critic_optimizers"):
                values.pop(name, None)
            with np.load(path / "loop.npz") as file:
                arrays = {name: file[name] for name in file.files}
        except (*CHECKPOINT_ERRORS, OSError, ValueError, KeyError) as error:
            raise InputError(
                f"checkpoint {path} cannot be loaded into this model ({_one_line(error)}); resume with the model.path "
                f"{'and the section lora ' * bool(policy.lora)}the run was started with, remove the folder if it is "
                f"damaged, or give another output_dir"
            ) from error
        _restore(policy, loaded)
        if critic:
            _restore(critic, loaded["critic"])
        _restore_rng(policy, arrays)
        return LoopState(step, values, arrays)

    def _check(
        self, policy: TrainedModel, failure: str | None, step: int, checksums: Mapping[str, int] = MappingProxyType({})
    ) -> dict[str, int]:
        """Raise on all ranks if one failed, and remove the partial checkpoint. Returns the checksums of all ranks'
        files, each of which gives its own once they are written."""
        outcomes: list[Any] = [None] * policy.processes.world_size
        dist.all_gather_object(outcomes, (failure, dict(checksums)), group=policy.processes.control)
        reason = next((failure for failure, _ in outcomes if failure), None)
        if reason is not None:
            raise self._refusal(policy, reason, step)
        return {name: value for _, checksums in outcomes for name, value in checksums.items()}

    def _refusal(self, policy: TrainedModel, reason: str, step: int) -> InputError:
        is_full = self.root.exists() and shutil.disk_usage(self.root).free < _FULL_BYTES
        if is_full and (no_space := os.strerror(errno.ENOSPC)) not in reason:
            reason = f"{no_space}: {reason}"  # C++ writers of files do not raise OSError.
        if policy.processes.rank == 0:
            self.discard(step)
        return InputError(
            f"cannot write the checkpoint step_{step:08d} under {self.root} ({reason}); earlier checkpoints "
            f"are intact: free space or fix the permissions and start the same command again"
        )


def _loop_value(path: Path, name: str) -> Any:
    """A value of the loop's state in a checkpoint; None if it is not there or the file is damaged."""
    try:
        return read_json_object(path / "loop.json").get(name)
    except (OSError, ValueError):
        return None


def find_damage_in_share(folder: Path, processes: Processes) -> str | None:
    """See `find_changed_bytes`, of this rank's share of a checkpoint's files. Large files are spread evenly."""
    try:
        records = read_manifest(folder)
        names = sorted(records, key=lambda name: records[name].size, reverse=True)
        return find_changed_bytes(folder, names[processes.rank :: processes.world_size])
    except (OSError, ValueError) as error:
        return f"{MANIFEST_FILE} {_one_line(error)}"


def _attempt(action: Callable[[], object]) -> str | None:
    """None, or why the file system failed. Re-raises other errors, such as the end of another process."""
    try:
        action()
    except (*CHECKPOINT_ERRORS, OSError, RuntimeError) as error:
        if is_lost_connection(error):
            raise
        return disk_refusal(error) or _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    """The last line of an error; errors gathered from several ranks are whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _sharded_content(model: TrainedModel) -> dict[str, Any]:
    """Megatron's sharded state dict of a model and its optimizer."""
    model.finish_param_gather()
    chunks = _sharded_chunks(model)
    # The float32 weights of FP8 parameters are among the optimizer's tensors.
    return without_fp8(
        {
            **chunks,
            "optimizer": sharded_optimizer(model.optimizer, chunks),
            "scheduler": model.schedule_state(),
            "fp8": model.fp8_settings,
        }
    )


def _wanted_content(model: TrainedModel, saved: Collection[str], prefix: str = "") -> dict[str, Any]:
    """What Megatron is to load of a model and its optimizer, whose keys in the checkpoint begin with `prefix`. Of the
    layers' states only those that were `saved`: norms of Transformer Engine have one, those of Megatron have none."""
    chunks = _sharded_chunks(model)
    for chunk in chunks.values():
        for key in [key for key in chunk if _LAYER_STATE in key]:
            if prefix + chunk[key].unique_key not in saved:
                del chunk[key]
    optimizer = sharded_optimizer(model.optimizer, chunks, is_loading=True)
    # Megatron-Core 0.19 would round what it reads with the scales that FP8 parameters have before the layers' states
    # are loaded. Can go when it reads into tensors of its own again.
    return without_fp8({**chunks, "optimizer": optimizer, "scheduler": {}})


def _restore(model: TrainedModel, loaded: Mapping[str, Any]) -> None:
    for name, chunk in _named_chunks(model).items():
        state = loaded.get(name, {})  # Megatron leaves out chunks without adapters: those without layers.
        layers = {key: value for key, value in state.items() if _LAYER_STATE in key}
        weights = {key: value for key, value in state.items() if key not in layers}
        if loaded.get("fp8", model.fp8_settings) != model.fp8_settings:  # Checkpoints of earlier versions lack them.
            layers = {}  # Their FP8 states bring number formats with them, and scales that other layers lack.
        if model.lora:
            model.lora.load(weights)
            weights = {}
        state = weights | layers
        merge_layer_states(unwrapped(chunk), state)
        with checked_layer_states():
            missing, unexpected = unwrapped(chunk).load_state_dict(state, strict=False)
        assert not unexpected
        assert model.lora or all(key.endswith(_LAYER_STATE) for key in missing), missing
    model.load_optimizer(loaded["optimizer"], loaded["scheduler"])


def _named_chunks(model: TrainedModel) -> dict[str, Any]:
    """The model chunks under Megatron's names for them."""
    names = ["model"] if len(model.chunks) == 1 else [f"model{index}" for index in range(len(model.chunks))]
    return dict(zip(names, model.chunks, strict=True))


def _sharded_chunks(model: TrainedModel) -> dict[str, Any]:
    """Megatron's sharded state dict of each model chunk; with LoRA of its adapters, and of its layers' states, which
    are FP8 scales of earlier updates."""
    chunks: dict[str, Any] = {}
    for number, (name, chunk) in enumerate(_named_chunks(model).items()):
        is_whole = not model.lora or model.fp8_settings["scaling"] == "delayed"
        chunks[name] = unwrapped(chunk).sharded_state_dict() if is_whole else {}
        if model.lora:
            layers = {key: state for key, state in chunks[name].items() if _LAYER_STATE in key}
            chunks[name] = model.lora.sharded_state(number) | layers
    return chunks


def _check_optimizers(model: TrainedModel, path: Path, key: str) -> None:
    """Raises InputError for a checkpoint with or without expert parallelism, unlike this run: with it, Megatron saves a
    separate optimizer for experts."""
    here = num_optimizers(model.optimizer)
    try:
        there = read_json_object(path / "loop.json").get(key, here)
    except (OSError, ValueError):
        return  # Loading reports what is wrong with the file.
    if here != there:
        raise InputError(
            f"checkpoint {path} was written {'with' if there > 1 else 'without'} expert parallelism and cannot be "
            f"loaded {'with' if here > 1 else 'without'} it; resume with parallel.expert "
            f"{'of 2 or more' if there > 1 else '= 1'}, or replace it by the output of tools/convert_checkpoint.py "
            f"reshard"
        )


def _write_beside(
    folder: Path, policy: TrainedModel, critic: TrainedModel | None, state: LoopState, rng: Arrays
) -> None:
    """Write rank 0's files beside Megatron's: the loop's state, and the models' configurations and tokenizer for other
    programs."""
    copy_config_and_tokenizer(policy.path, folder, {policy.config.params_dtype})
    write_vocabulary(folder, policy.arch.vocab_size)
    if policy.lora:
        policy.lora.write_config(folder, policy.path)
    with (folder / "loop.npz").open("wb") as file:
        contents: dict[str, Any] = {**state.arrays, **rng}
        np.savez(file, **contents)
        file.flush()
        os.fsync(file.fileno())
    values = {"step": state.step, "num_optimizers": num_optimizers(policy.optimizer)}
    if critic:
        assert critic.export_config
        write_config(folder / CRITIC_CONFIG_FILE, critic.export_config, {critic.config.params_dtype})
        values["num_critic_optimizers"] = num_optimizers(critic.optimizer)
    replace_file(folder / "loop.json", json.dumps({**values, **state.values}))


def _gather_rng(policy: TrainedModel) -> Arrays:
    """Every rank's random-number states, which have the same names and sizes. Collective."""
    processes = policy.processes
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, state in random_states().items():
        states = [torch.empty_like(state, device="cpu") for _ in range(processes.world_size)]
        dist.all_gather(states, state.cpu(), group=processes.control)
        arrays |= {f"rng/{_layout(policy)}/{rank}/{name}": found.numpy() for rank, found in enumerate(states)}
    return arrays


def _restore_rng(policy: TrainedModel, arrays: Arrays) -> None:
    """Restore this rank's random-number states. In another layout there are none for this rank, and the seeded ones
    stay.

    Without the dropout of adapters no result depends on these states; sampling uses seeds of its own per request.
    """
    prefix = f"rng/{_layout(policy)}/{policy.processes.rank}/"
    mine = {name.removeprefix(prefix): torch.from_numpy(s) for name, s in arrays.items() if name.startswith(prefix)}
    if mine:
        set_random_states(mine)


def _layout(policy: TrainedModel) -> str:
    p = policy.processes
    layout = f"tp{p.tensor_size}-pp{p.pipeline_size}-dp{p.data_size}"
    return f"{layout}-cp{p.context_size}" if p.context_size > 1 else layout
