"""Generated parts of the documentation: current, complete, and made by one command."""

import importlib.util
import sys
from pathlib import Path

import pytest
from pydantic import Field

from dapo_mega.config import Section

TOOL = Path(__file__).resolve().parents[2] / "tools" / "reference.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("reference", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module
    spec.loader.exec_module(module)
    return module


def test_the_generated_parts_are_current(tool):
    pages = [(part.name, part.page.read_text(), part) for part in tool.PARTS]
    assert [name for name, text, part in pages if part.inserted(text) != text] == []


def test_an_outdated_part_is_named_and_nothing_is_written(tool, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    part = tool.GeneratedPart(page, "table of nothing", lambda: "new")
    page.write_text(f"before\n{part.begin}\n\nold\n\n{part.end}\nafter\n")
    monkeypatch.setattr(tool, "PARTS", [part])
    monkeypatch.setattr(tool, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    with pytest.raises(SystemExit, match=r"outdated: the table of nothing in page\.md; run"):
        tool.main()
    assert "old" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["reference.py"])
    tool.main()
    assert page.read_text() == f"before\n{part.begin}\n\nnew\n\n{part.end}\nafter\n"


def test_a_page_without_a_place_for_its_part_is_named(tool, tmp_path):
    part = tool.GeneratedPart(tmp_path / "page.md", "table", lambda: "new")
    with pytest.raises(ValueError, match=r"page\.md has no lines"):
        part.inserted("text")


class Inner(Section):
    """Numbers."""

    silent: int = 1


class Described(Section):
    """Kinds of values."""

    needed: float = Field(gt=0, le=1, description="A share.")
    names: tuple[str, ...] = Field(default=("a", "b"), description="Some | names.")
    seed: int | None = Field(default=None, lt=2**63, description="A seed.")


def test_a_key_without_a_description_is_named(tool):
    with pytest.raises(ValueError, match=r"configuration key inner\.silent has no description; .* of Inner"):
        list(tool._rows(Inner, "inner", Inner))


def test_rows_say_type_default_and_limits(tool):
    assert list(tool._rows(Described, "", Described)) == [
        ["`needed`", "number", "required", "> 0, <= 1", "fixed", "A share."],
        ["`names`", "list of text", "`[a, b]`", "", "fixed", "Some | names."],
        ["`seed`", "integer or null", "`null`", "< 2^63", "fixed", "A seed."],
    ]
    assert "Some \\| names." in tool._table(list(tool._rows(Described, "", Described)))


def test_every_key_of_runs_and_of_supervised_training_has_a_row(tool):
    text = tool.configuration_keys()
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {"seed", "rollout.fleet.urls", "data.train.columns.prompt", "compute.fp8.scaling"} <= set(rows)
    own = text.partition("### Supervised training")[2]
    for key in ("batch_samples", "data.max_tokens", "tokens_per_microbatch"):
        assert f"| `{key}` |" in own
    assert "| `optimizer.learning_rate` | number | `1e-05` |" in own
    assert "`data.evaluation` has the same keys" in text
