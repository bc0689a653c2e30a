"""Describes a checkpoint of either format as text."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dapo_mega.atomic_files import check_regular, read_json_object
from dapo_mega.conversion.convert import Checkpoint
from dapo_mega.conversion.resumable_folder import RECORD_FILE
from dapo_mega.errors import InputError
from dapo_mega.models.megatron_format.files import MegatronCheckpoint
from dapo_mega.models.stored_model import CRITIC_CONFIG_FILE

_REMEDY = "copy or save it again"


def describe(checkpoint: Checkpoint, list_tensors: bool) -> Iterator[str]:
    """Lines on the model, its files and, for a Megatron checkpoint, its parallel layout."""
    arch, is_megatron = checkpoint.arch, isinstance(checkpoint.source, MegatronCheckpoint)
    specs = {name: checkpoint.source.spec(name) for name in checkpoint.names}
    num_parameters = sum(spec.numel for spec in specs.values())
    yield f"{'format':12s} {'Megatron (torch_dist)' if is_megatron else 'Hugging Face (safetensors)'}"
    yield f"{'family':12s} {arch.model_type}"
    yield (
        f"{'sizes':12s} {arch.num_layers} layers, hidden {arch.hidden_size}, {arch.num_attention_heads} heads in "
        f"{arch.num_query_groups} groups, vocabulary {arch.vocab_size}"
        + (f", {arch.experts.number} experts" if arch.experts else "")
        + (", tied embeddings" if arch.tied_embeddings else "")
        + (", a value head" if arch.has_value_head else "")
    )
    yield f"{'parameters':12s} {num_parameters:,}"
    yield f"{'dtype':12s} {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in checkpoint.dtypes))}"
    files = [checkpoint.path / name for name in checkpoint.source.weight_files()]
    yield f"{'files':12s} {len(files)} with {sum(file.stat().st_size for file in files):,} bytes"
    if is_megatron:
        yield from _megatron_lines(checkpoint.path)
    if list_tensors:
        for name, spec in specs.items():
            yield f"{name}  {list(spec.shape)}  {str(spec.dtype).removeprefix('torch.')}"


def _megatron_lines(path: Path) -> Iterator[str]:
    if os.path.lexists(path / RECORD_FILE):
        made_from = read_json_object(path / RECORD_FILE, _REMEDY).get("made_from")
        layout = made_from.get("layout") if isinstance(made_from, dict) else None
        if not isinstance(layout, dict):
            raise InputError(f"{path / RECORD_FILE} holds no layout; {_REMEDY}")
        yield f"{'layout':12s} {', '.join(f'{name}={size}' for name, size in layout.items() if size)}"
    if os.path.lexists(path / "loop.json"):
        step = read_json_object(path / "loop.json", _REMEDY).get("step")
        if type(step) is not int:
            raise InputError(f"{path / 'loop.json'} holds no step; {_REMEDY}")
        yield f"{'step':12s} {step}, with optimizer and loop state"
        if os.path.lexists(path / CRITIC_CONFIG_FILE):
            yield f"{'critic':12s} beside the policy; --critic describes it"
        file = path / "loop.npz"
        check_regular(file)
        try:
            with np.load(file) as arrays:
                layouts = sorted({name.split("/")[1] for name in arrays.files if name.startswith("rng/")})
        except (OSError, EOFError, ValueError, LookupError, zipfile.BadZipFile) as error:
            raise InputError(f"{file} cannot be read ({error}); {_REMEDY}") from error
        yield f"{'written by':12s} {', '.join(layouts)}"
