"""A checkpoint's pickles are read without running anything that they name."""

import copyreg
import enum
import io
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)

from dapo_mega.checkpoints import store as checkpoints
from dapo_mega.checkpoints.store import CheckpointStore, LoopState
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.conversion.convert import open_checkpoint, reshard, to_hf, to_megatron
from dapo_mega.errors import InputError
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.models.megatron_format.pickles import check_pickles, read_metadata
from tests.distributed.tiny import make_model

SENTINEL = "DAPO_MEGA_TEST_RAN"
COMMAND = f"import os; os.environ[{SENTINEL!r}] = '1'"


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


class Builds:
    """Pickles as an object of a class that belongs, whose state belongs to nothing."""

    def __reduce__(self):
        return Metadata, ({},), (None, {"__setstate__": exec})


def as_written(module, name, protocol):
    """A call of `module.name(COMMAND)` whose name is looked up by the reader, dots and all."""
    argument = b"X" + len(COMMAND).to_bytes(4, "little") + COMMAND.encode()
    if protocol >= 4:
        text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
        return b"\x80" + bytes([protocol]) + text + b"\x93(" + argument + b"tR."
    return f"c{module}\n{name}\n".encode() + b"(" + argument + b"tR."


def attacks():
    exec_it = Calls(exec, COMMAND)
    for protocol in range(6):
        yield f"exec, protocol {protocol}", pickle.dumps(exec_it, protocol)
        yield f"in a list, protocol {protocol}", pickle.dumps({"state_dict_metadata": [exec_it]}, protocol)
        yield f"eval, protocol {protocol}", pickle.dumps(Calls(eval, f"exec({COMMAND!r})"), protocol)
    yield "os.system", pickle.dumps(Calls(os.system, "true"))
    yield "INST", b"(S" + repr(COMMAND).encode() + b"\nibuiltins\nexec\n."
    yield "OBJ", b"(cbuiltins\nexec\nS" + repr(COMMAND).encode() + b"\no."
    yield "copyreg", pickle.dumps(Calls(copyreg._reconstructor, Calls, object, None), 2)
    yield "getattr", pickle.dumps(Calls(getattr, torch.Tensor, "numpy"))
    yield "getattr of what belongs", pickle.dumps(Calls(getattr, Metadata, "planner_data"))
    yield "getattr of an enumeration", pickle.dumps(Calls(getattr, _MEM_FORMAT_ENCODING, "__class__"))
    yield "a method of an enumeration", pickle.dumps(Calls(getattr, _MEM_FORMAT_ENCODING, "mro.__call__"))
    yield "a state", pickle.dumps(Builds())
    yield "through torch", as_written("torch", "serialization.os.system", 4)
    yield "through a class", as_written("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__", 4)
    yield "an imported module", as_written("torch.distributed.checkpoint.metadata", "os.system", 4)
    yield "torch.load", pickle.dumps(Calls(torch.load, "/dev/null"))
    yield "torch.hub", as_written("torch.hub", "load", 2)
    yield "storage", pickle.dumps(Calls(torch.storage._load_from_bytes, saved(exec_it)))
    yield "_rebuild_from_type_v2", pickle.dumps(Calls(torch._tensor._rebuild_from_type_v2, exec, Calls, (COMMAND,), {}))
    yield "an extension", b"\x80\x02\x82\x01."
    yield "a persistent id", b"\x80\x02X\x01\x00\x00\x00aQ."


def saved(value):
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_pickle(data):
    """A file as torch.save writes it with `data` as its pickle."""
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    writer.write_record("data.pkl", data, len(data))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return stream.getvalue()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    to_megatron(
        open_checkpoint(make_model(folder / "hf", tied=True, num_layers=2)), folder / "m", ParallelConfig(), 1 << 30
    )
    return folder / "m"


@pytest.fixture
def megatron(sound, tmp_path, monkeypatch):
    monkeypatch.delenv(SENTINEL, raising=False)
    # Otherwise torch's default is what keeps `common.pt` from being run.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    yield shutil.copytree(sound, tmp_path / "m")
    assert SENTINEL not in os.environ


def replace_object(folder, data):
    """Put `data` in place of the first layer's state; returns the name of its file."""
    metadata = FileSystemReader(folder).read_metadata()
    key = next(key for key, item in metadata.state_dict_metadata.items() if isinstance(item, BytesStorageMetadata))
    place = metadata.storage_data[MetadataIndex(key)]
    file = folder / place.relative_path
    place.offset, place.length = file.stat().st_size, len(data)
    with file.open("ab") as stream:
        stream.write(data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return file.name


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in attacks()])
def test_no_pickle_of_a_checkpoint_runs_what_it_names(megatron, data):
    whole = (megatron / ".metadata").read_bytes()
    (megatron / ".metadata").write_bytes(data)
    with pytest.raises(InputError, match=r"\.metadata (names|cannot be read)"):
        read_metadata(megatron)
    (megatron / ".metadata").write_bytes(whole)
    common = (megatron / "common.pt").read_bytes()
    for content in (with_pickle(data), data):
        (megatron / "common.pt").write_bytes(content)
        with pytest.raises(InputError, match=r"common\.pt (names|cannot be read)"):
            check_pickles(megatron)
    (megatron / "common.pt").write_bytes(common)
    for content in (with_pickle(data), saved([torch.frombuffer(bytearray(data), dtype=torch.uint8)])):
        name = replace_object(megatron, content)
        with pytest.raises(InputError, match=rf"_extra_state/\S+' in .*{name} (names|cannot be read)"):
            check_pickles(megatron)


def test_every_command_refuses_them(megatron, tmp_path):
    call = Calls(exec, COMMAND)
    damages = {
        "common.pt": lambda: (megatron / "common.pt").write_bytes(saved(call)),
        "distcp": lambda: replace_object(megatron, saved([call])),
        ".metadata": lambda: (megatron / ".metadata").write_bytes(pickle.dumps(call)),
    }
    for name, damage in damages.items():
        whole = (megatron / name).read_bytes() if name == "common.pt" else b""
        damage()
        with pytest.raises(InputError, match=rf"{name} names (builtins\.)?exec"):
            reshard(open_checkpoint(megatron), tmp_path / "again", ParallelConfig(), 1 << 30)
        if name == "common.pt":
            (megatron / name).write_bytes(whole)
    assert not list(tmp_path.glob("*again*"))


def test_a_weight_whose_block_names_a_function_is_refused(megatron, tmp_path):
    metadata = FileSystemReader(megatron).read_metadata()
    place = next(place for index, place in metadata.storage_data.items() if "final_layernorm" in index.fqn)
    data = saved(Calls(exec, COMMAND))
    file = megatron / place.relative_path
    place.offset, place.length = file.stat().st_size, len(data)
    with file.open("ab") as stream:
        stream.write(data)
    (megatron / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(InputError, match=rf"final_layernorm\.weight' cannot be read from .*{file.name} names exec"):
        to_hf(open_checkpoint(megatron), tmp_path / "hf", 1 << 30)


def test_a_place_of_the_memo_far_beyond_the_file_takes_no_memory(megatron):
    (megatron / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(InputError, match=r"\.metadata cannot be read \(a place of the memo"):
        read_metadata(megatron)


def test_the_class_and_what_to_do_are_named(megatron):
    (megatron / ".metadata").write_bytes(pickle.dumps(Calls(exec, COMMAND)))
    with pytest.raises(InputError, match=r"\.metadata names builtins\.exec, .* from a source that you trust"):
        read_metadata(megatron)
    (megatron / ".metadata").write_bytes(as_written("collections", "OrderedDict.fromkeys", 4))
    with pytest.raises(InputError, match=r"names collections\.OrderedDict\.fromkeys"):
        read_metadata(megatron)


def change_metadata(folder, change):
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class EarlyPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.parametrize("pickler", [pickle.Pickler, EarlyPickler])
@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_means_what_it_means_to_torch_whatever_the_protocol(megatron, protocol, pickler):
    expected = FileSystemReader(megatron).read_metadata()
    expected.planner_data = {"a": ("b", 1)}
    with (megatron / ".metadata").open("wb") as file:
        pickler(file, protocol).dump(expected)
    found = read_metadata(megatron)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    check_pickles(megatron)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "", "a/../../b", "a\0b"])
def test_blocks_outside_of_the_folder_are_refused(megatron, name):
    def lead_out(metadata):
        next(iter(metadata.storage_data.values())).relative_path = name

    change_metadata(megatron, lead_out)
    with pytest.raises(InputError, match=r"\.metadata cannot be read \(.* is no file of the folder"):
        open_checkpoint(megatron)


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: vars(metadata).update(storage_data=None),
        lambda metadata: vars(metadata).update(state_dict_metadata=[1]),
        lambda metadata: metadata.storage_data.update({"key": "place"}),
        lambda metadata: metadata.state_dict_metadata.update(key=3),
        lambda metadata: vars(next(iter(metadata.storage_data.values()))).update(offset=-1),
        lambda metadata: vars(next(iter(metadata.storage_data.values()))).update(length=2**70),
        lambda metadata: vars(metadata).pop("state_dict_metadata"),
    ],
)
def test_metadata_of_another_shape_is_one_line(megatron, change):
    change_metadata(megatron, change)
    with pytest.raises(InputError, match=r"\.metadata cannot be read"):
        open_checkpoint(megatron)


def test_scales_of_transformer_engine_belong(megatron):
    scales = {"scale_fwd": torch.ones(3), "extra_fp8_variables": {"fp8_max": 448.0, "names": ("a", True)}}
    state = torch.frombuffer(bytearray(pickle.dumps(scales)), dtype=torch.uint8)
    for content in ([state], [None], [torch.empty(0, dtype=torch.uint8)], [io.BytesIO(saved(None))], state):
        replace_object(megatron, saved(content))
        check_pickles(megatron)


def test_a_run_is_not_continued_from_a_checkpoint_that_may_run_code(tmp_path, monkeypatch):
    """Neither does the check before Megatron gets it let it through, nor Megatron where the file changed after that."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    processes = start_processes(ParallelConfig(), 0)
    try:
        path = make_model(tmp_path / "model", tied=True, num_layers=2)
        model = ModelConfig(path=str(path), dtype="fp32")
        policy = MegatronPolicy(
            model, ParallelConfig(), OptimizerConfig(), processes, temperature=1.0, updates_per_step=1, num_steps=10
        )
        store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
        store.save(policy, LoopState(1, {}, {}), 1)
        folder = store.latest()
        check_pickles(folder)
        for damage in (
            lambda copy: (copy / ".metadata").write_bytes(pickle.dumps(Calls(exec, COMMAND))),
            lambda copy: (copy / "common.pt").write_bytes(saved(Calls(exec, COMMAND))),
            lambda copy: replace_object(copy, saved([Calls(exec, COMMAND)])),
        ):
            damage(copy := shutil.copytree(folder, tmp_path / "copy"))
            with pytest.raises(InputError, match=r"names (builtins\.)?exec"):
                store.load(policy, copy)
            with monkeypatch.context() as patch:
                patch.setattr(checkpoints, "check_pickles", lambda _: None)
                with pytest.raises(InputError, match=r"names (builtins\.)?exec|cannot be loaded into this model"):
                    store.load(policy, copy)
            assert SENTINEL not in os.environ
            shutil.rmtree(copy)
        assert store.load(policy, folder).step == 1
    finally:
        stop_processes()
