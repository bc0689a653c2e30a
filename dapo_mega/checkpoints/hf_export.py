"""Writes a model as a Hugging Face checkpoint that transformers and inference engines can load, and adapters as peft
does."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from dapo_mega.errors import InputError
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.models.hf_checkpoint import mtp_names
from dapo_mega.models.hf_writer import ShardWriter, copy_config_and_tokenizer, swap_in
from dapo_mega.models.megatron_format.files import mtp_source
from dapo_mega.models.peft_adapters import write_adapter
from dapo_mega.types import NamedTensors

_BUCKET_BYTES = 512 * 2**20


def save_hf_checkpoint(model: TrainedModel, folder: Path) -> None:
    """Collective. Weights in sharded safetensors; configuration, tokenizer and layers of multi-token prediction
    copied from the starting model. A value model becomes a token classifier with one label.

    Writes beside `folder` and renames, replacing an earlier export. Raises InputError on rank 0 if writing fails.
    """
    writing = model.processes.rank == 0
    partial = folder.with_name(f".{folder.name}.partial")
    shards = ShardWriter(partial)
    failure = None
    if writing:
        shutil.rmtree(partial, ignore_errors=True)
    for bucket in itertools.chain[NamedTensors](model.weights(_BUCKET_BYTES), _mtp_tensors(model)):
        if writing and failure is None:
            try:
                shards.add(bucket)
            except (OSError, SafetensorError) as error:
                failure = str(error)
    if writing and failure is None:
        try:
            shards.finish()
            copy_config_and_tokenizer(model.path, partial, {model.config.params_dtype}, model.export_config)
            swap_in(partial, folder)
        except (OSError, SafetensorError) as error:
            failure = str(error)
    if failure:
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"cannot write the Hugging Face checkpoint {folder} ({failure}); free space and run again")


def _mtp_tensors(model: TrainedModel) -> Iterator[NamedTensors]:
    """The layers of multi-token prediction as the policy was started with, on rank 0."""
    if model.processes.rank or not model.family.has_mtp_layers or model.arch.has_value_head:
        return
    if source := mtp_source(model.path):
        yield from ([(name, source.tensor(name))] for name in mtp_names(source.names(), model.arch))


def save_adapter(model: TrainedModel, folder: Path) -> None:
    """Collective. The adapters of a model with LoRA in peft's format. Raises InputError on rank 0 if writing fails."""
    assert model.lora
    names, partial = model.lora.names, folder.with_name(f".{folder.name}.partial")
    buckets = model.selected("adapters").weights(_BUCKET_BYTES)
    found = [(name, tensor.cpu()) for bucket in buckets for name, tensor in bucket]
    if model.processes.rank:
        return
    shutil.rmtree(partial, ignore_errors=True)
    try:
        tensors = {name: tensor for name, tensor in found if name in names}
        write_adapter(partial, model.lora.config, tensors, model.path)
        swap_in(partial, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"cannot write the adapter {folder} ({error}); free space and run again") from error
