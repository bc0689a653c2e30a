"""Paths in configurations: relative to the file that holds them, and on a command line to the working folder."""

import re
from pathlib import Path

import pytest
import yaml

from dapo_mega.config import PreparationConfig, RunConfig, SftConfig, dump_config, load_config
from dapo_mega.config.base import flat
from dapo_mega.config.components import KINDS
from dapo_mega.config.files import configured, read_yaml
from dapo_mega.config.paths import kind_of_path, located, sections_in
from dapo_mega.errors import InputError

RUN = {"output_dir": "out", "num_steps": 1, "model": {"path": "in/m"}, "data": {"train": {"path": "in/d.jsonl"}}}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A run's file in one folder, while another one is the working folder."""
    for folder in ("files", "work", "home"):
        (tmp_path / folder / "in").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "files" / "run.yaml", RUN)
    return tmp_path / "files" / "run.yaml"


def write(path, values):
    path.write_text(yaml.safe_dump(values))
    return path


def with_every_path(section, found):
    """Values for all keys of a section whose value is a path, and for all that sound so; their names go to `found`."""
    values = {}
    for key, field in section.model_fields.items():
        kind = kind_of_path(field)
        if kind or re.search(r"(^|_)(path|file|dir|folder)$", key):
            found.append(key)
            values[key] = "in/x.py:f" if kind == "function" else "in/x.jsonl"
        elif key == "components":
            values[key] = [{"kind": name} | with_every_path(kind, found) for name, kind in KINDS.items()]
        elif inner := sections_in(field.annotation):
            below = with_every_path(inner[0], found)
            values[key] = {"a": below} if "dict" in str(field.annotation) else below
    return values


def test_every_key_that_holds_a_path_starts_at_the_folder_of_its_file(file):
    for section, count in ((RunConfig, 12), (SftConfig, 4), (PreparationConfig, 3)):
        given = with_every_path(section, found := [])
        assert len(found) >= count
        seen = flat(located(section, given, file.parent))
        parts = seen.pop("reward.components", ())
        seen |= {f"{part['kind']}.{key}": value for part in parts for key, value in part.items()}
        paths = {name: value for name, value in seen.items() if not name.endswith(".kind")}
        assert len(paths) == len(found)
        assert not {name: p for name, p in paths.items() if not p.startswith(f"{file.parent}/in/x.")}


def test_a_file_means_its_folder_and_a_command_line_the_working_folder(file, tmp_path):
    text = "~/ {problem}"
    write(file, RUN | {"critic": {"path": "~/v"}, "data": {"train": {"path": "../in/d", "template": text}}})
    run = load_config(RunConfig, file, ["weight_sync={folder: w}", "data.evaluation.path=~/e.csv"])
    assert (run.output_dir, run.model.path) == (f"{file.parent}/out", f"{file.parent}/in/m")
    assert (run.data.train.path, run.data.train.template) == (f"{tmp_path}/in/d", text)
    assert (run.weight_sync.folder, run.critic.path) == (f"{tmp_path}/work/w", f"{tmp_path}/home/v")
    assert run.data.evaluation.path == f"{tmp_path}/home/e.csv"
    judge = "{kind: judge, model: m, urls: [http://h], api_key_file: key}"
    components = f"[{{kind: function, path: own.py:score}}, {{kind: answer}}, {judge}]"
    parts = load_config(RunConfig, file, [f"reward.components={components}"]).reward.components
    assert (parts[0].path, parts[2].api_key_file) == (f"{tmp_path}/work/own.py:score", f"{tmp_path}/work/key")
    assert load_config(RunConfig, file, ["reward.function=my.rewards:score"]).reward.function == "my.rewards:score"


def test_names_on_the_hub_stay_unless_something_beside_the_file_has_them(file):
    (file.parent / "mine").mkdir()
    for name, seen in (("openai/gsm8k:main", "openai/gsm8k:main"), ("squad", "squad"), ("mine", f"{file.parent}/mine")):
        values = RUN | {"data": {"train": {"path": name}}}
        assert load_config(RunConfig, write(file, values)).data.train.path == seen
    for name in ("./squad", "../squad", "squad.jsonl", "a/b/c"):
        values = RUN | {"data": {"train": {"path": name}}}
        assert load_config(RunConfig, write(file, values)).data.train.path.startswith("/"), name


def test_an_output_that_is_meant_for_no_folder_here_is_refused(file):
    for path in ("s3://bucket/x", "~nobody-here/x", "$HOME/x", "${RUNS}/x"):
        with pytest.raises(InputError, match=r"^output_dir=.* would be a folder of that name"):
            load_config(RunConfig, file, [f"output_dir={path}"])
        with pytest.raises(InputError, match=r"^output_dir=.* would be a folder of that name"):
            load_config(RunConfig, write(file, RUN | {"output_dir": path}))
        write(file, RUN)
    assert load_config(RunConfig, file, ["output_dir=./$HOME/x"]).output_dir.endswith("/work/$HOME/x")


def test_two_dots_are_the_folder_above_as_it_is_named_and_behind_a_link_that_of_its_target(file, tmp_path):
    (tmp_path / "work" / "link").symlink_to(file.parent / "in")
    (tmp_path / "work" / "files").symlink_to(file.parent)
    assert load_config(RunConfig, file, ["model.path=link/../m"]).model.path == f"{file.parent}/m"
    write(file, RUN | {"output_dir": "../out"})
    for name, above in (("files/run.yaml", "work"), ("../files/run.yaml", "."), ("../work/files/run.yaml", "work")):
        assert load_config(RunConfig, Path(name)).output_dir == str(tmp_path / above / "out")


@pytest.mark.parametrize(
    ("file_has", "work_has", "values", "override", "advice"),
    [
        ("", "d.jsonl", {}, "", r"data.train.path=in/d.jsonl is relative to the file in which it is written, and /"),
        ("", "train/", {"data": {"train": {"path": "in/train"}}}, "", r"write \.\./work/in/train or /"),
        ("", "m/", {}, "", r"model.path=in/m .*files/in/m does not exist, but .*work/in/m does; .* \.\./work/in/m"),
        ("", "o/", {"output_dir": "in/o"}, "", r"output_dir=in/o .*; for that one write \.\./work/in/o or /"),
        ("", "r.py", {"reward": {"function": "in/r.py:f"}}, "", r"reward.function=.* write \.\./work/in/r.py:f or /"),
        ("r.py", "", {}, "reward.function=in/r.py:f", r"relative to the working folder.* write \.\./files/in/r.py:f"),
        ("r.py", "", {}, "reward.components=[{kind: function, path: in/r.py:f}]", r"^reward.components.0.path="),
        ("m/", "m/", {}, "", None),
        ("", "m/", {}, "model.path=other", None),
        ("o/", "", {}, "output_dir=in/o", None),
    ],
)  # fmt: skip
def test_who_relied_on_the_other_folder_is_told_what_to_write(file, file_has, work_has, values, override, advice):
    for folder, name in ((file.parent, file_has), (file.parents[1] / "work", work_has)):
        if name.endswith("/"):
            (folder / "in" / name).mkdir()
        elif name:
            (folder / "in" / name).touch()
    write(file, RUN | values)
    overrides = [override] if override else []
    if advice is None:
        load_config(RunConfig, file, overrides)
        return
    with pytest.raises(InputError) as told:
        load_config(RunConfig, file, overrides)
    assert re.search(advice, str(told.value)), told.value
    # What it says to write is what was meant.
    place = r"write \.\./(\S+) or (\S+?)(:f)?$"
    relative, whole, _ = re.search(place, str(told.value)).groups()
    assert (file.parents[1] / relative.removesuffix(":f")).samefile(whole)


def test_the_record_of_a_run_is_read_alike_from_everywhere(file, tmp_path, monkeypatch):
    run = load_config(RunConfig, file, ["reward.components=[{kind: function, path: in/r.py:f, name: a}]"])
    (tmp_path / "home" / "config.yaml").write_text(dump_config(run))
    monkeypatch.chdir("/")
    assert load_config(RunConfig, tmp_path / "home" / "config.yaml") == run


def test_the_record_of_an_earlier_version_means_the_folder_that_its_run_was_begun_in(file, tmp_path, monkeypatch):
    run = tmp_path / "files" / "out"
    run.mkdir()
    (tmp_path / "home" / "link").symlink_to(run)
    (run / "versions.json").touch()
    for output_dir, named, began_in in (
        ("out", "files/out", "files"),
        ("files/out", "work/../files/out", "."),
        ("./out", "home/link", "files"),
        ("moved", "files/out", "work"),
        ("../files/out", "files/out", "work"),
        (f"{run}", "files/out", "work"),
    ):
        write(run / "config.yaml", RUN | {"output_dir": output_dir})
        record = load_config(RunConfig, tmp_path / named / "config.yaml")
        assert Path(record.model.path) == (tmp_path / began_in / "in/m").resolve(), output_dir
    monkeypatch.chdir(run)
    write(run / "config.yaml", RUN)
    assert load_config(RunConfig, Path("config.yaml")).model.path == f"{tmp_path}/files/in/m"
    assert configured(RunConfig, read_yaml(run / "config.yaml"), []).output_dir == f"{run}/out"
