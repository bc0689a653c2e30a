"""Megatron's distributed checkpoint format (`torch_dist`), read without a Megatron model.

Every parameter is one global tensor, whatever the layout. Where all layers are alike they are stacked along a new
first axis, experts along the next one; gate and up projections follow each other; the vocabulary is padded to a
multiple of the tensor-parallel size. The layout only decides how tensors are cut into blocks, and in which files these
lie.
"""

from __future__ import annotations

import io
import logging
import os
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    TensorStorageMetadata,
)

# Megatron's writer fills the same private record: torch has no public one.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dapo_mega.atomic_files import check_regular, read_json_object
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture, ModelFamily, ShardRule, merge_shards
from dapo_mega.models.families import PlacedTensor
from dapo_mega.models.hf_checkpoint import HfCheckpoint, TensorSource, TensorSpec, check_count, mtp_copies, mtp_names
from dapo_mega.models.hf_shapes import hf_shape
from dapo_mega.models.hf_writer import shard_files
from dapo_mega.models.megatron_format.entries import DELTA_PARTS, stored_entries, stored_shape
from dapo_mega.models.megatron_format.pickles import (
    DAMAGED_PICKLE,
    METADATA_FILE,
    check_object,
    read_metadata,
    stored_bytes,
    stored_objects,
    unreadable,
)
from dapo_mega.models.megatron_format.writing import VOCABULARY_FILE

logger = logging.getLogger(__name__)

OPTIMIZER_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
"""The name of a piece of optimizer state, and the key of the parameter it belongs to."""

CRITIC_PREFIX = "critic."
"""What the names of a value model's tensors begin with that is stored beside a policy."""

MTP_PREFIX = "mtp."
"""What Megatron's names of layers of multi-token prediction begin with."""

MTP_STEM = "mtp"
"""How the names of the safetensors files begin that keep layers of multi-token prediction beside a model."""

ADAPTER_CONFIG_FILE = "adapter_config.json"
"""Peft's configuration, which a checkpoint of adapters alone has beside them."""

_BLOCK_FILES = "*.distcp"
# Megatron-LM pads the vocabulary to a multiple of this times the tensor-parallel size.
_MEGATRON_LM_MULTIPLE = 128
_DELTA_PART = re.compile(rf"(.+\.(?:in_proj|conv1d)\.weight)\.({'|'.join(DELTA_PARTS)})")
# Queries, keys and values share one.
_MOST_TENSORS_OF_A_BLOCK = 3


class MegatronFiles:
    """The tensors and objects of one model in a folder of Megatron's format, read in blocks. Errors name the file or
    the tensor.

    With `is_critic` the model is the value model that is stored beside a policy; keys are without its prefix.
    """

    def __init__(self, path: Path, *, is_critic: bool = False) -> None:
        self.path = path
        self._is_critic = is_critic
        if (path / ADAPTER_CONFIG_FILE).exists():
            raise InputError(
                f"{path} holds LoRA adapters and not the model that they belong to; give the export of its run, the "
                f"folder hf, in which they are merged"
            )
        if not os.path.lexists(path / METADATA_FILE):
            raise InputError(
                f"{path} holds {_BLOCK_FILES} files but no {METADATA_FILE}, which is written last; copy or "
                f"save it again"
            )
        self._reader = FileSystemReader(path)
        self._metadata = read_metadata(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        stored = self._metadata.state_dict_metadata
        self.tensors = {
            key.removeprefix(self._prefix): item
            for key, item in stored.items()
            if isinstance(item, TensorStorageMetadata) and self._is_own(key)
        }
        self._parts = self._join_parts()
        self._intact: set[MetadataIndex] = set()
        self._check_files()

    def _join_parts(self) -> dict[str, dict[str, TensorStorageMetadata]]:
        """Makes the tensors that are stored in parts one each; returns the parts by their names."""
        found: dict[str, dict[str, TensorStorageMetadata]] = {}
        for key in [key for key in self.tensors if _DELTA_PART.fullmatch(key)]:
            whole, _, name = key.rpartition(".")
            found.setdefault(whole, {})[name] = self.tensors.pop(key)
        joined = {}
        for whole, by_name in found.items():
            joined[whole] = {f"{whole}.{name}": by_name[name] for name in DELTA_PARTS if name in by_name}
            parts = list(joined[whole].values())
            size = torch.Size((sum(part.size[0] for part in parts), *parts[0].size[1:]))
            chunks = [chunk for part in parts for chunk in part.chunks]
            self.tensors[whole] = TensorStorageMetadata(parts[0].properties, size, chunks=chunks)
        return joined

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A block of the tensor `key`; reads only the stored blocks that overlap it."""
        if key not in self._parts:
            return self._read(key, self.tensors[key], offsets, sizes)
        blocks, start = [], 0
        for name, part in self._parts[key].items():
            first, last = max(offsets[0], start), min(offsets[0] + sizes[0], start + part.size[0])
            if first < last:
                blocks.append(self._read(name, part, (first - start, *offsets[1:]), (last - first, *sizes[1:])))
            start += part.size[0]
        return torch.cat(blocks)

    def _read(self, key: str, stored: TensorStorageMetadata, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        block = torch.empty(tuple(sizes), dtype=stored.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(self._prefix + key, stored, [wanted])
        if sum(item.lengths.numel() for item in items) != block.numel():
            raise InputError(f"{self.path} does not hold all of {key!r}; copy or save it again")
        for item in items:
            try:
                self._check_sums(item.storage_index)
                self._reader.read_data(LoadPlan([item]), _Into(block)).wait()
            except InputError:
                raise
            except (OSError, zipfile.BadZipFile, *DAMAGED_PICKLE) as error:
                file = self.path / self._location(item.storage_index).relative_path
                raise unreadable(f"{key!r} cannot be read from {file}", error) from error
        return block

    @property
    def _prefix(self) -> str:
        return CRITIC_PREFIX if self._is_critic else ""

    def _is_own(self, key: str) -> bool:
        return key.startswith(CRITIC_PREFIX) == self._is_critic

    @property
    def num_blocks(self) -> int:
        """Stored blocks of all tensors together."""
        return sum(len(tensor.chunks) for tensor in self.tensors.values())

    def block_files(self) -> set[str]:
        """The files of all tensors and objects that `.metadata` lists, relative to the folder."""
        return {place.relative_path for place in self._metadata.storage_data.values()}

    def read_objects(self) -> dict[str, bytes]:
        """The serialized bytes of the objects that are not tensors. Raises InputError for one that may run code."""
        objects = {}
        for key, what, read in stored_objects(self.path, self._metadata):
            if self._is_own(key):
                data = objects[key.removeprefix(self._prefix)] = read()
                check_object(key, data, what)
        return objects

    def _check_sums(self, index: MetadataIndex) -> None:
        """Raise BadZipFile if a stored block was changed: torch writes checksums and does not compare them."""
        if index in self._intact:
            return
        place = self._location(index)
        with zipfile.ZipFile(io.BytesIO(stored_bytes(self.path / place.relative_path, place))) as block:
            if block.testzip() is not None:
                raise zipfile.BadZipFile("its data does not fit its checksum")
        self._intact.add(index)

    def _location(self, index: MetadataIndex) -> _StorageInfo:
        place: _StorageInfo = self._reader.storage_data[index]
        return place

    def _check_files(self) -> None:
        """Raise InputError for a file that has not the bytes to hold its blocks."""
        sizes: dict[Path, int] = {}
        for place in self._reader.storage_data.values():
            file = self.path / place.relative_path
            sizes[file] = max(sizes.get(file, 0), place.offset + place.length)
        for file, expected in sizes.items():
            check_regular(file)
            size = file.stat().st_size
            if size < expected:
                raise InputError(f"{file} has {size} bytes instead of {expected}; copy or save it again")


class _Into(DefaultLoadPlanner):
    """Reads everything into one tensor."""

    def __init__(self, block: Tensor) -> None:
        super().__init__()
        self._block = block

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._block


class MegatronCheckpoint:
    """A model in Megatron's format as a source of tensors under their Hugging Face names; with `is_critic` the value
    model beside a policy."""

    def __init__(self, path: Path, family: ModelFamily, arch: Architecture, *, is_critic: bool = False) -> None:
        self.path = path
        self.files = MegatronFiles(path, is_critic=is_critic)
        self._arch = arch
        # Every layer and expert has blocks of its own.
        check_count(path, family, arch, _MOST_TENSORS_OF_A_BLOCK * self.files.num_blocks)
        entries = stored_entries(family, arch)
        self._known = {entry.key for entry in entries.values()}
        self._places = {name: (placed, entry) for placed, entry in entries.items() for name in placed.hf}
        # The file is the policy's.
        self._recorded_vocab_size = arch.vocab_size if is_critic else _recorded_vocab_size(path)
        if self._recorded_vocab_size is None:
            for placed, entry in entries.items():
                if placed.layout is ShardRule.VOCAB and entry.key in self.files.tensors:
                    self._check_padding(entry.key)
        beside = {key for key in self.files.tensors if family.mtp and key.startswith(MTP_PREFIX)} - self._known
        self._known |= beside
        if beside and not stores_mtp(self.files, family, arch):
            logger.warning("%s: its %d tensors of multi-token prediction are left out", path, len(beside))
        self.mtp = None if is_critic else mtp_source(path, arch)
        """What holds the layers of multi-token prediction, if there are any."""
        # A parameter that is made of several tensors is asked for once per tensor.
        self._last: tuple[PlacedTensor | None, list[Tensor]] = (None, [])

    def names(self) -> set[str]:
        found = {name for name, (_, entry) in self._places.items() if entry.key in self.files.tensors}
        weights = {key for key in self.files.tensors if not OPTIMIZER_KEY.fullmatch(key)}
        beside = mtp_names(self.mtp.names(), self._arch) if self.mtp else []
        return found | (weights - self._known) | set(beside)

    def weight_files(self) -> set[str]:
        return self.files.block_files()

    def spec(self, name: str) -> TensorSpec:
        name = self._copied(name)
        if self.mtp and not self._holds(name):
            return self.mtp.spec(name)
        placed, entry = self._places[name]
        stored = self.files.tensors[entry.key]
        shape = tuple(stored.size)
        if placed.layout is ShardRule.VOCAB:
            shape = (self._num_tokens(stored), *shape[1:])
        if shape == (*entry.stack, *stored_shape(placed, self._arch)):
            shape = hf_shape(name, self._arch)
        return TensorSpec(shape, stored.properties.dtype)

    def tensor(self, name: str) -> Tensor:
        name = self._copied(name)
        if self.mtp and not self._holds(name):
            return self.mtp.tensor(name)
        if name not in self._places:
            raise InputError(f"{self.path} lacks the tensor {name!r}; is it a checkpoint of another model?")
        placed, entry = self._places[name]
        if self._last[0] != placed:
            axes = len(entry.stack)
            shape = self.files.tensors[entry.key].size[axes:]
            stored = self.files.read(entry.key, (*entry.index, *[0] * len(shape)), (*[1] * axes, *shape))
            self._last = (placed, merge_shards([stored.reshape(shape)], placed.layout, self._arch))
        return self._last[1][placed.hf.index(name)]

    def _holds(self, name: str) -> bool:
        return name in self._places and self._places[name][1].key in self.files.tensors

    def _copied(self, name: str) -> str:
        """The tensor that `name` is a copy of, where layers of multi-token prediction have one of what was trained."""
        copied = mtp_copies([name], self._arch) if self._arch.trains_mtp else {}
        return copied.get(name, name)

    def _num_tokens(self, stored: TensorStorageMetadata) -> int:
        """Rows of a tensor over the vocabulary that are not padding; all, where they do not fit the configuration."""
        if self._recorded_vocab_size is not None:
            return min(self._recorded_vocab_size, stored.size[0])
        return self._arch.vocab_size if _is_padded(stored, self._arch.vocab_size) else stored.size[0]

    def _check_padding(self, key: str) -> None:
        """Refuse rows beyond the vocabulary that were trained: the configuration's vocabulary is too small for them."""
        stored, vocab_size = self.files.tensors[key], self._arch.vocab_size
        rows, *others = stored.size
        if rows == vocab_size or not _is_padded(stored, vocab_size):
            return
        if self.files.read(key, (vocab_size, *[0] * len(others)), (rows - vocab_size, *others)).any():
            raise InputError(
                f"{self.path}: {key!r} has {rows} rows, and those beyond vocab_size={vocab_size} of config.json are "
                f"not zero as padding is; correct vocab_size, or if they are padding write "
                f'{{"vocab_size": {vocab_size}}} to {self.path / VOCABULARY_FILE}'
            )


def _is_padded(stored: TensorStorageMetadata, vocab_size: int) -> bool:
    """Whether the rows of `stored` are the vocabulary, padded as its number of tensor-parallel blocks demands."""
    blocks = len({chunk.offsets[0] for chunk in stored.chunks})
    return stored.size[0] in {
        -(-vocab_size // multiple) * multiple for multiple in (blocks, blocks * _MEGATRON_LM_MULTIPLE)
    }


def _recorded_vocab_size(path: Path) -> int | None:
    """The `vocab_size` given to `write_metadata`; None in folders of other writers."""
    file = path / VOCABULARY_FILE
    if not file.exists():
        return None
    size = read_json_object(file, "copy it again").get("vocab_size")
    if type(size) is not int or size < 1:
        raise InputError(f'{file} is not {{"vocab_size": ROWS}}; copy it again')
    return size


def is_megatron_folder(path: Path) -> bool:
    """Whether the folder has any file of Megatron's format, even an incomplete checkpoint."""
    return os.path.lexists(path / METADATA_FILE) or any(path.glob(_BLOCK_FILES))


def mtp_source(path: Path, arch: Architecture) -> HfCheckpoint | None:
    """The files with the layers of multi-token prediction of the model in a folder, if it has any: with all others of a
    Hugging Face checkpoint, or beside one in Megatron's format."""
    if not is_megatron_folder(path):
        return HfCheckpoint(path, splits_mtp=arch.trains_mtp)
    files = sorted(file.name for file in path.glob(f"{MTP_STEM}*.safetensors"))
    if files and files != shard_files(len(files), MTP_STEM):
        raise InputError(f"{path} has only some of the files {MTP_STEM}-*.safetensors: {files}; copy it again")
    return HfCheckpoint(path, files, splits_mtp=arch.trains_mtp) if files else None


def stores_mtp(files: MegatronFiles, family: ModelFamily, arch: Architecture) -> bool:
    """Whether a policy in Megatron's format has a trained layer of multi-token prediction as this package reads it."""
    if family.mtp is None or arch.has_value_head:
        return False
    entries = stored_entries(family, family.with_mtp(arch)).values()
    return {entry.key for entry in entries if entry.key.startswith(MTP_PREFIX)} <= files.tensors.keys()


def open_source(path: Path, family: ModelFamily, arch: Architecture) -> TensorSource:
    """The checkpoint in folder `path`, Hugging Face's or Megatron's."""
    if is_megatron_folder(path):
        return MegatronCheckpoint(path, family, arch)
    return HfCheckpoint(path, splits_mtp=arch.trains_mtp)
