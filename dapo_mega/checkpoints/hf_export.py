"""Writes a model as a Hugging Face checkpoint that transformers and inference engines can load."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError

from dapo_mega.errors import InputError
from dapo_mega.megatron.trained_model import TrainedModel
from dapo_mega.models.hf_writer import ShardWriter, copy_config_and_tokenizer, swap_in

_BUCKET_BYTES = 512 * 2**20


def save_hf_checkpoint(model: TrainedModel, folder: Path) -> None:
    """Collective. Weights in sharded safetensors; configuration and tokenizer copied from the starting model. A value
    model becomes a token classifier with one label.

    Writes beside `folder` and renames, replacing an earlier export. Raises InputError on rank 0 if writing fails.
    """
    writing = model.processes.rank == 0
    partial = folder.with_name(f".{folder.name}.partial")
    shards = ShardWriter(partial)
    failure = None
    if writing:
        shutil.rmtree(partial, ignore_errors=True)
    for bucket in model.weights(_BUCKET_BYTES):
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
