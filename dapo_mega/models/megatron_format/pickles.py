"""The pickles in a folder of Megatron's format, read without running what they say.

`.metadata` is a plain pickle, `common.pt`, if there is one, and the entries of `.distcp` files are what `torch.save`
writes. A pickle may name any function and have it called. Here `.metadata` is read into records that do nothing, of a
few known names, and its values are checked before torch's classes are made of them; everything else goes through
torch's own restricted reader (`weights_only`).
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

# Megatron's writer fills the same private record: torch has no public one.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from dapo_mega.atomic_files import check_regular, inside
from dapo_mega.errors import InputError

METADATA_FILE = ".metadata"
COMMON_FILE, COMMON_STATE = "common.pt", "common_state"

_REMEDY = "nothing of it was run: take the checkpoint from a source that you trust"

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# What torch's and Megatron's writers put into `.metadata`. Those behind the line are skipped when it is read: how the
# writer shared its work out (Megatron keeps the plans for its next checkpoint), and where it wrote.
_METADATA_NAMES = {
    f"{_METADATA}.Metadata",
    f"{_METADATA}.MetadataIndex",
    f"{_METADATA}.TensorStorageMetadata",
    f"{_METADATA}.BytesStorageMetadata",
    f"{_METADATA}.ChunkStorageMetadata",
    f"{_METADATA}.TensorProperties",
    f"{_METADATA}._MEM_FORMAT_ENCODING",
    f"{_FILESYSTEM}._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    # ---
    f"{_METADATA}.StorageMeta",
    f"{_FILESYSTEM}._StoragePrefix",
    f"{_PLANNER}.SavePlan",
    f"{_PLANNER}.WriteItem",
    f"{_PLANNER}.WriteItemType",
    f"{_PLANNER}.TensorWriteData",
    f"{_MEGATRON}.MCoreMetadata",
    f"{_MEGATRON}.MCoreSavePlan",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "collections.OrderedDict",
}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# What the FP8 state of Transformer Engine's layers holds beside tensors: settings.
_RECIPES = "transformer_engine.common.recipe"
_FP8_NAMES = {
    "torch._utils._rebuild_tensor_v2",
    "collections.OrderedDict",
    "megatron.core.extensions.transformer_engine.TEDelayedScaling",
    *(
        f"{_RECIPES}.{name}"
        for name in (
            "_FormatHelper", "Format", "MMParams", "QParams", "Recipe", "DelayedScaling", "Float8CurrentScaling",
            "MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling",
        )
    ),
}  # fmt: skip
# The second is Megatron's restricted one, which it has put in the place of the first since 0.17.
_LOADS_FROM_BYTES = ("torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes")
# Python 3.11.0 to 3.11.3 pickles a member of an enumeration as a call of this with the class and the member's name.
_GETATTR = "builtins.getattr"
_ENUMERATIONS = {f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_PLANNER}.WriteItemType", f"{_RECIPES}.Format"}

# Python's pickler of protocol 2 to 5 writes no others for such values.
_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
}  # fmt: skip
# What unpickling changed bytes, and using what they made, can raise.
DAMAGED_PICKLE = (
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError, OverflowError,
    MemoryError, RuntimeError, AssertionError, struct.error,
)  # fmt: skip
_REFUSED_BY_TORCH = re.compile(r"(?:GLOBAL (\S+) was not an allowed|unsupported GLOBAL (\S+) whose module)")
_LARGEST = 2**62
_EXTRA_STATE = "_extra_state"
_ZIP = b"PK"


class _ForbiddenName(Exception):
    """A pickle names a class or function that does not belong into a checkpoint."""


class _Record:
    """Stands for an object of the pickle: keeps its arguments and does nothing.

    Its state is set once and before it is hashed, as Python's pickler does it: a state that changes later would give
    torch's classes, made by an ordinary reader, another value than what was checked here.
    """

    name = ""
    arguments: tuple[Any, ...]
    state: Any
    is_final: bool
    __slots__ = ("arguments", "is_final", "state")

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.arguments, record.state, record.is_final = arguments, None, False
        return record

    def __setstate__(self, state: Any) -> None:
        if self.is_final:
            raise pickle.UnpicklingError(f"the state of a {self.name} is set twice")
        self.state, self.is_final = dict(state) if type(state) is dict else state, True

    def __hash__(self) -> int:
        self.is_final = True
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _records(names: set[str]) -> dict[str, Any]:
    return {name: type("_Record", (_Record,), {"name": name, "__slots__": ()}) for name in names}


def _member(enumeration: Any, name: Any) -> _Record:
    """Replaces `getattr` in a pickle: gives a member of an enumeration."""
    is_record = isinstance(enumeration, type) and issubclass(enumeration, _Record)
    if not is_record or enumeration.name not in _ENUMERATIONS:
        raise _ForbiddenName(_GETATTR)
    if type(name) is not str or not name.isidentifier() or name.startswith("_"):
        raise _ForbiddenName(f"{enumeration.name}.{name}")
    member = enumeration(name)
    member.is_final = True
    return member


_GETATTRS = {_GETATTR: _member, "__builtin__.getattr": _member}  # The second in protocol 2.
_OF_METADATA = {**_records(_METADATA_NAMES), **_DTYPES, **_GETATTRS}


class _Unpickler(pickle.Unpickler):
    """Accepts exactly the names it is given, and no others."""

    def __init__(self, data: bytes, known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._known:
            raise _ForbiddenName(full)
        return self._known[full]


def _unpickled(data: bytes, known: Mapping[str, Any]) -> Any:
    """Raises _ForbiddenName, or one of DAMAGED_PICKLE."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise _ForbiddenName(f"the operation {opcode.name}")
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(data):
            raise pickle.UnpicklingError("a place of the memo is beyond the file")
    return _Unpickler(data, known).load()


def read_metadata(folder: Path) -> Metadata:
    """What `.metadata` says of the tensors and objects in the folder and of where they lie.

    Raises InputError naming the file, and the class if one is named there that does not belong.
    """
    file = folder / METADATA_FILE
    try:
        check_regular(file)
        stored, places = _stored_and_places(file.read_bytes())
    except _ForbiddenName as error:
        raise InputError(f"{file} names {error}, which no checkpoint's metadata needs; {_REMEDY}") from None
    except InputError:
        raise
    except (OSError, *DAMAGED_PICKLE) as error:
        raise InputError(f"{file} cannot be read ({_reason(error)}); copy or save it again") from error
    return Metadata(dict(stored), storage_data=dict(places))


@lru_cache(maxsize=1)  # A checkpoint's is asked for six times as it is loaded.
def _stored_and_places(data: bytes) -> tuple[dict[str, Any], dict[MetadataIndex, _StorageInfo]]:
    state = _state(_unpickled(data, _OF_METADATA), f"{_METADATA}.Metadata")
    stored = {_text(key): _stored(item) for key, item in _dict(state["state_dict_metadata"]).items()}
    return stored, {_index(key): _place(item) for key, item in _dict(state["storage_data"]).items()}


def _state(record: Any, *names: str) -> dict[str, Any]:
    """The fields of a record with one of these names."""
    if not isinstance(record, _Record) or record.name not in names or record.arguments:
        raise TypeError(f"no {names[0].rpartition('.')[2]}")
    return _dict(record.state)


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError("no dictionary where one belongs")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text where a name belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise TypeError("no size where one belongs")
    return value


def _size(record: Any) -> torch.Size:
    if not isinstance(record, _Record) or record.name != "torch.Size" or record.is_final:
        raise TypeError("no torch.Size where one belongs")
    (sizes,) = record.arguments
    if type(sizes) is not tuple:
        raise TypeError("a torch.Size of something else than a tuple")
    return torch.Size([_count(size) for size in sizes])


def _stored(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    kind = f"{_METADATA}.BytesStorageMetadata"
    if isinstance(record, _Record) and record.name == kind:
        return BytesStorageMetadata()
    state = _state(record, f"{_METADATA}.TensorStorageMetadata")
    size = _size(state["size"])
    if type(state["chunks"]) is not list:
        raise TypeError("no list of blocks where one belongs")
    chunks = [_chunk(chunk, size) for chunk in state["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(state["properties"])), size, chunks)


def _dtype(record: Any) -> torch.dtype:
    if not isinstance(record, _Record) or record.name != f"{_METADATA}.TensorProperties":
        raise TypeError("no TensorProperties where they belong")
    dtype = record.state[0] if type(record.state) is tuple else _dict(record.state)["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype where one belongs")
    return dtype


def _chunk(record: Any, size: torch.Size) -> ChunkStorageMetadata:
    state = _state(record, f"{_METADATA}.ChunkStorageMetadata")
    chunk = ChunkStorageMetadata(_size(state["offsets"]), _size(state["sizes"]))
    ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
    if len(ends) != len(size) or any(end > whole for end, whole in zip(ends, size, strict=True)):
        raise ValueError("a block reaches beyond its tensor")
    return chunk


def _index(record: Any) -> MetadataIndex:
    state = _state(record, f"{_METADATA}.MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset))


def _place(record: Any) -> _StorageInfo:
    state = _state(record, f"{_FILESYSTEM}._StorageInfo")
    if state.get("transform_descriptors"):
        raise ValueError("blocks are compressed, which is not supported")
    name = _text(state["relative_path"])
    if not inside(name):
        raise ValueError(f"{name!r} is no file of the folder")
    return _StorageInfo(name, _count(state["offset"]), _count(state["length"]))


def load_saved(stream: Any, what: str) -> Any:
    """What `torch.save` wrote to a file or stream; only classes that torch and Megatron declare harmless.

    Raises InputError naming `what` for others, and one of DAMAGED_PICKLE or OSError for damage.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if refused := _refused(error):
            raise InputError(f"{what} names {refused}, which a checkpoint must not hold; {_REMEDY}") from None
        raise


def _refused(error: BaseException) -> str | None:
    """The class that torch's restricted reader would not make."""
    found = _REFUSED_BY_TORCH.search(str(error))
    if found is None:
        return None
    return (found[1] or found[2]).rstrip(".")


def _reason(error: BaseException) -> str:
    """The first sentence: torch's errors go on with advice to read the file without restrictions."""
    reason = str(error).split("\n")[0].split(". ")[0]
    return reason or type(error).__name__


def unreadable(what: str, error: BaseException) -> InputError:
    """The error for a block or file that reading failed on, which names a class that was refused."""
    if refused := _refused(error):
        return InputError(f"{what} names {refused}, which a checkpoint must not hold; {_REMEDY}")
    return InputError(f"{what} ({_reason(error)}); copy or save it again")


def read_common(folder: Path) -> dict[str, Any]:
    """The values that Megatron stores besides tensors. Raises InputError for a damaged file."""
    file = folder / COMMON_FILE
    try:
        if file.exists():
            check_regular(file)
            common = load_saved(file, str(file))
        else:
            common = _common_object(folder)
    except InputError:
        raise
    except (OSError, *DAMAGED_PICKLE) as error:
        raise unreadable(f"{file} cannot be read", error) from error
    if type(common) is not dict:
        raise InputError(f"{file} holds no dictionary; copy or save it again")
    return common


def _common_object(folder: Path) -> Any:
    """Since 0.19 Megatron stores these values in a `.distcp` file."""
    for key, what, read in stored_objects(folder, read_metadata(folder)):
        if key.startswith(f"{COMMON_STATE}/"):
            return load_saved(io.BytesIO(read()), what)[0]
    raise FileNotFoundError(f"there is none, nor {COMMON_STATE} in another file")


def check_object(key: str, data: bytes, what: str) -> None:
    """Refuse an object of a `.distcp` file that may run code when Megatron or Transformer Engine reads it."""
    try:
        found = load_saved(io.BytesIO(data), what)
        if _EXTRA_STATE in key:
            for part in found if type(found) is list else [found]:
                _check_extra_state(part)
    except InputError:
        raise
    except _ForbiddenName as error:
        raise InputError(f"{what} names {error}, which no layer's state needs; {_REMEDY}") from None
    except DAMAGED_PICKLE as error:
        raise unreadable(f"{what} cannot be read", error) from error


def _check_extra_state(part: Any) -> None:
    """The FP8 scales of Transformer Engine's layers are bytes that it unpickles without restrictions."""
    if isinstance(part, io.BytesIO):
        data = part.getvalue()
    elif isinstance(part, torch.Tensor):
        data = part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    else:
        return
    if data.startswith(_ZIP):
        _load_restricted(data)
    elif data:
        loaders = dict.fromkeys(_LOADS_FROM_BYTES, _load_restricted)
        _unpickled(data, {**_records(_FP8_NAMES), **_DTYPES, **_GETATTRS, **loaders})


def _load_restricted(data: bytes) -> None:
    torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def check_pickles(folder: Path) -> None:
    """Read every pickle in a folder of Megatron's format that Megatron would read without restrictions.

    Raises InputError naming the file and the class where one may run code or is damaged. To be called before the folder
    is handed to Megatron.
    """
    metadata = read_metadata(folder)
    read_common(folder)
    for key, what, read in stored_objects(folder, metadata):
        check_object(key, read(), what)


def stored_objects(folder: Path, metadata: Metadata) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """The objects that are not tensors: key, name for errors, and a function that reads the bytes."""
    objects = {key for key, item in metadata.state_dict_metadata.items() if isinstance(item, BytesStorageMetadata)}
    for index, place in metadata.storage_data.items():
        if index.fqn in objects:
            file = folder / place.relative_path
            yield index.fqn, f"{index.fqn!r} in {file}", partial(stored_bytes, file, place)


def stored_bytes(file: Path, place: _StorageInfo) -> bytes:
    """The bytes at `place` in a `.distcp` file. Raises InputError naming the file if it cannot be read."""
    check_regular(file)
    try:
        with file.open("rb") as stream:
            stream.seek(place.offset)
            return stream.read(place.length)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); copy the checkpoint again") from error
