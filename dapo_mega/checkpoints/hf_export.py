"""Writes a model as a Hugging Face checkpoint that transformers and inference engines can load, and adapters as peft
does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from dapo_mega.errors import InputError
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.models.hf_checkpoint import mtp_copies, mtp_names
from dapo_mega.models.hf_writer import ShardWriter, copy_config_and_tokenizer, swap_in
from dapo_mega.models.peft_adapters import write_adapter
from dapo_mega.models.stored_model import has_trained_mtp, open_policy
from dapo_mega.types import NamedTensors

_BUCKET_BYTES = 512 * 2**20


def save_hf_checkpoint(model: TrainedModel, folder: Path) -> None:
    """Collective. Weights in sharded safetensors; configuration, tokenizer and layers of multi-token prediction that
    did not learn copied from the starting model. A value model becomes a token classifier with one label.

    Writes beside `folder` and renames, replacing an earlier export. Raises InputError on rank 0 if writing fails.
    """
    writing = model.processes.rank == 0
    partial = folder.with_name(f".{folder.name}.partial")
    shards = ShardWriter(partial)
    failure = None
    if writing:
        shutil.rmtree(partial, ignore_errors=True)
    for bucket in _exported(model):
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


def _exported(model: TrainedModel) -> Iterator[NamedTensors]:
    """Collective. All weights, and on rank 0 the tensors of multi-token prediction that did not learn, as the policy
    was started with; those that are copies of weights that did learn are copies again."""
    trained = model.selected("whole").weights(_BUCKET_BYTES)
    if model.processes.rank or not model.family.mtp or model.arch.has_value_head:
        yield from trained
        return
    trains_mtp = model.arch.trains_mtp or has_trained_mtp(model.path, model.family, model.arch)
    source = open_policy(model.path, trains_mtp=trains_mtp).source
    learned = {name for chunk in range(model.layout.num_chunks) for t in model.layout.tensors(chunk) for name in t.hf}
    kept = mtp_names(source.names() - learned, model.arch)
    copies = mtp_copies(kept, model.arch) if model.arch.trains_mtp else {}
    for bucket in trained:
        yield ((n, t) for own, t in bucket for n in (own, *(copy for copy in copies if copies[copy] == own)))
    yield from ([(name, source.tensor(name))] for name in kept if name not in copies)


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
