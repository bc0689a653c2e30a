"""Finds the model that is to be evaluated: a Hugging Face folder, a checkpoint of Megatron-Core, or a run's folder."""

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from dapo_mega.atomic_files import refuse_special_files
from dapo_mega.checkpoints.folders import CheckpointFolders, step_of
from dapo_mega.errors import InputError
from dapo_mega.models.families import families, load_architecture, read_config
from dapo_mega.models.hf_checkpoint import HfCheckpoint, all_tensors, check_source
from dapo_mega.models.layouts import stacked, stacks
from dapo_mega.models.megatron_format.files import ADAPTER_CONFIG_FILE, is_megatron_folder
from dapo_mega.models.stored_model import stored_value_head
from dapo_mega.types import NamedTensors

_SHARD_BYTES = 4 * 2**30
_DECIDING = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")


@dataclass(frozen=True)
class EvaluatedModel:
    """`folder` has the model in Hugging Face's format; `origin` is the checkpoint that it was converted from, None if
    it was not."""

    folder: Path
    origin: Path | None = None

    @property
    def path(self) -> Path:
        """Where the weights are that the user named."""
        return self.origin or self.folder

    def remove_conversion(self) -> None:
        """Remove the folder if it was made for the evaluation only."""
        if self.origin:
            shutil.rmtree(self.folder, ignore_errors=True)


def open_model(path: Path, step: int | None, work_folder: Path) -> EvaluatedModel:
    """The model in `path`. Of a run's folder the checkpoint of `step` is taken, by default the newest; without
    checkpoints, or with those of adapters only, the export in `hf`. What is in Megatron's format is converted into a
    folder in `work_folder`; an interrupted conversion continues. Raises InputError."""
    if not path.is_dir():
        raise InputError(
            f"{path} is not a folder; give a Hugging Face checkpoint, a run's folder, or one of its checkpoints"
        )
    is_megatron = is_megatron_folder(path)
    if is_megatron or (path / "config.json").exists():
        if step is not None:
            raise InputError(
                f"--step is for a run's folder, and {path} is one checkpoint; leave it out, or give the run"
            )
        return _converted(path, work_folder) if is_megatron else _checked(path)
    if not (path / "checkpoints").is_dir() and not (path / "hf").is_dir():
        raise InputError(
            f"{path} holds neither config.json nor checkpoints; give a Hugging Face checkpoint, a run's folder, or one "
            f"of its checkpoints"
        )
    found = list(CheckpointFolders(path / "checkpoints", 1).complete_ones())
    has_model = found and not (found[0] / ADAPTER_CONFIG_FILE).exists()
    if step is None and not has_model and (path / "hf" / "config.json").exists():
        return _checked(path / "hf")
    chosen = [folder for folder in found if step in (None, step_of(folder))]
    if not chosen:
        steps = ", ".join(str(step_of(folder)) for folder in reversed(found)) or "no step"
        wanted = "" if step is None else f" of step {step}"
        raise InputError(f"{path} holds no complete checkpoint{wanted}, only of {steps}; give one of them with --step")
    return _converted(chosen[0], work_folder)


def model_hash(folder: Path) -> str:
    """SHA-256 of what decides the responses: weights, configuration, tokenizer. Reads all of it."""
    total = hashlib.sha256()
    files = sorted({file for pattern in _DECIDING for file in folder.glob(pattern)})
    for file in files:
        # Records of how the folder came to be are not the model.
        if file.name in ("preparation.json", "conversion.json"):
            continue
        with file.open("rb") as opened:
            total.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def model_weights(folder: Path, dtype: torch.dtype) -> Iterable[NamedTensors]:
    """The model's tensors by their names on disk, one at a time for the families that can be trained."""
    if read_config(folder).get("model_type") in families():
        family, arch = load_architecture(folder)
        source = HfCheckpoint(folder)
        parts = stacks(name for placed in all_tensors(family, arch) for name in placed.hf)
        return (
            [(name, tensor) for tensor in stacked(((part, source.tensor(part)) for part in of), len(of))]
            for name, of in parts.items()
        )
    from transformers import AutoModelForCausalLM

    try:
        return [list(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict().items())]
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{folder} cannot be loaded ({reason}); copy the checkpoint again") from error


def context_length(folder: Path) -> int:
    """The longest prompt and response together that the model takes, in tokens."""
    found = read_config(folder).get("max_position_embeddings")
    if not isinstance(found, int) or found < 2:
        raise InputError(f"{folder / 'config.json'} has no max_position_embeddings; add the model's context length")
    return found


def _checked(path: Path) -> EvaluatedModel:
    """Raises InputError for a folder that lacks tensors, or has damaged ones or a value model."""
    refuse_special_files(path)
    if read_config(path).get("model_type") in families():
        family, arch = load_architecture(path)
        if stored_value_head(path):
            raise InputError(f"{path} holds a value model, which says nothing; give the policy")
        check_source(HfCheckpoint(path), family, arch)
    return EvaluatedModel(path)


def _converted(checkpoint: Path, work_folder: Path) -> EvaluatedModel:
    from dapo_mega.megatron.core.repairs import cpu_accelerator

    cpu_accelerator.install()
    from dapo_mega.conversion.convert import open_checkpoint, to_hf

    opened = open_checkpoint(checkpoint)
    if opened.arch.has_value_head:
        raise InputError(f"{checkpoint} holds a value model, which says nothing; give the policy")
    folder = (work_folder / f"converted_model_{checkpoint.name}").absolute()
    work_folder.mkdir(parents=True, exist_ok=True)
    to_hf(opened, folder, _SHARD_BYTES)
    return EvaluatedModel(folder, checkpoint)
