"""Writes Hugging Face checkpoints: safetensors shards with their index, configuration and tokenizer beside them."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dapo_mega.atomic_files import errors_naming, replace_file
from dapo_mega.models.families import read_config
from dapo_mega.models.hf_checkpoint import INDEX_FILE

SHARD_BYTES = 4 * 2**30

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".distcp", ".pt", ".pth", ".gguf"}
_CHECKPOINT_FILES = {
    INDEX_FILE,
    "pytorch_model.bin.index.json",
    ".metadata",
    "metadata.json",
    "conversion.json",
    "manifest.json",
    "vocabulary.json",
    "loop.json",
    "loop.npz",
    "critic_config.json",
}


class ShardWriter:
    """Collects tensors and writes them out in files of bounded size with the index transformers expects."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._size = 0
        self._total = 0
        self._files: list[list[str]] = []

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            if self._pending and self._size + tensor.nbytes > SHARD_BYTES:
                self._flush()
            self._pending[name] = tensor.detach().cpu().contiguous().clone()
            self._size += tensor.nbytes

    def finish(self) -> None:
        """Write the pending tensors, and name the files, whose number is known now."""
        if self._pending:
            self._flush()
        for index, file in enumerate(shard_files(len(self._files))):
            self._part(index).rename(self._folder / file)
        write_index(self._folder, self._files, self._total)

    def _flush(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        save_shard(self._pending, self._part(len(self._files)))
        self._files.append(list(self._pending))
        self._total += self._size
        self._pending, self._size = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"


def save_shard(tensors: Mapping[str, Tensor], file: Path) -> None:
    """One safetensors file, marked as transformers expects it, with the permissions of any new file."""
    with errors_naming(file):
        save_file(dict(tensors), file, metadata={"format": "pt"})
        set_usual_permissions(file)


def set_usual_permissions(file: Path) -> None:
    """Give a file the permissions that the process gives new ones here; safetensors lets only the owner read its own,
    whatever the umask."""
    sample = file.with_name(f".{file.name}.permissions")
    sample.touch()
    mode = stat.S_IMODE(sample.stat().st_mode)
    sample.unlink()
    if stat.S_IMODE(file.stat().st_mode) != mode:
        file.chmod(mode)


def shard_files(count: int, stem: str = "model") -> list[str]:
    """File names of a checkpoint of `count` shards, in order."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_index(folder: Path, shards: Sequence[Sequence[str]], total_bytes: int) -> None:
    """The index of the shards' tensor names; a single file needs none."""
    if len(shards) == 1:
        return
    files = shard_files(len(shards))
    weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    replace_file(folder / INDEX_FILE, json.dumps(index, indent=2))


def copy_config_and_tokenizer(
    source: Path, folder: Path, dtypes: Iterable[torch.dtype], config: Mapping[str, Any] | None = None
) -> None:
    """Copy the files besides the weights: generation config, tokenizer, and config.json (or `config` in its place) with
    the weights' dtype; of a vision model the language model's config.json.

    For weights in several dtypes config.json names the narrowest, as transformers does: the others are exceptions such
    as a router's float32 bias.
    """
    for file in source.iterdir():
        if file.is_file() and file.name not in _CHECKPOINT_FILES and file.suffix not in _WEIGHT_SUFFIXES:
            with errors_naming(folder / file.name):
                shutil.copyfile(file, folder / file.name)
    write_config(folder / "config.json", config or read_config(folder), dtypes)


def write_config(file: Path, config: Mapping[str, Any], dtypes: Iterable[torch.dtype]) -> None:
    """Write a model's configuration with the dtype of its weights, which are not quantized."""
    dtype = min(dtypes, key=lambda dtype: dtype.itemsize)
    # transformers 4 writes torch_dtype, transformers 5 dtype.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    replace_file(file, json.dumps({**config, key: str(dtype).removeprefix("torch.")}, indent=2))


def swap_in(partial: Path, folder: Path) -> None:
    """Put the new folder in place; the old one is deleted only after that."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
