"""Writes the policy as a Hugging Face checkpoint that transformers and inference engines load as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dapo_mega.errors import InputError
from dapo_mega.policy.megatron_policy import MegatronPolicy

_SHARD_BYTES = 4 * 2**30
_BUCKET_BYTES = 512 * 2**20
_NOT_COPIED = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"}


def save_hf_checkpoint(policy: MegatronPolicy, folder: Path) -> None:
    """Collective. Weights in sharded safetensors; configuration and tokenizer copied from the starting model.

    Written beside `folder` and renamed, replacing an earlier export. Raises InputError when the disk refuses.
    """
    writing = policy.processes.rank == 0
    partial = folder.with_name(f".{folder.name}.partial")
    shards = _ShardWriter(partial)
    failure = None
    if writing:
        shutil.rmtree(partial, ignore_errors=True)
    for bucket in policy.weights(_BUCKET_BYTES):
        if writing and failure is None:
            try:
                shards.add(bucket)
            except (OSError, SafetensorError) as error:
                failure = str(error)
    if writing and failure is None:
        try:
            shards.finish()
            _copy_companions(policy, partial)
            _swap_in(partial, folder)
        except (OSError, SafetensorError) as error:
            failure = str(error)
    outcome = [failure]
    dist.broadcast_object_list(outcome, src=0, group=policy.processes.control)
    if outcome[0]:
        if writing:
            shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"cannot write the Hugging Face checkpoint {folder} ({outcome[0]}); free space and run again")


def _swap_in(partial: Path, folder: Path) -> None:
    """Put the new folder in place; the old one goes only when the new one is there."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


class _ShardWriter:
    """Collects tensors and writes them out in files of bounded size with the index transformers expects."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._size = 0
        self._total = 0
        self._files: list[list[str]] = []

    def add(self, bucket: list[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            if self._pending and self._size + tensor.nbytes > _SHARD_BYTES:
                self._flush()
            self._pending[name] = tensor.detach().cpu().contiguous().clone()
            self._size += tensor.nbytes

    def _flush(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file(self._pending, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._total += self._size
        self._pending, self._size = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"

    def finish(self) -> None:
        """Write what is pending and name the files now that their number is known."""
        if self._pending:
            self._flush()
        count = len(self._files)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._part(i).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _copy_companions(policy: MegatronPolicy, folder: Path) -> None:
    """config.json with the weights' dtype, generation config and tokenizer of the starting model."""
    for file in policy.path.iterdir():
        if file.is_file() and file.name not in _NOT_COPIED and file.suffix not in {".safetensors", ".bin"}:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    dtype = "bfloat16" if policy.config.params_dtype is torch.bfloat16 else "float32"
    # transformers 4 writes torch_dtype, transformers 5 dtype.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2))
