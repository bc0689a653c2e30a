"""tools/prepare_data.py: complete or absent outputs, right answers, held-out problems held out, loadable models."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dapo_mega.commands import prepare
from dapo_mega.config import DatasetConfig
from dapo_mega.data.prompts import load_demonstrations, load_prompts
from dapo_mega.data.tokenizer import load_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.preparation.folders import RECORD, prepare_folder

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "prepare_data.py"
AIME = ROOT.parent / "shared" / "data" / "aime-2024.parquet"
SMALL = ["--num-train", "60", "--num-eval", "20", "--num-demonstrations", "50"]
TINY = ["--hidden-size", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--intermediate-size", "24"]

Tool = Callable[..., int]


@pytest.fixture(scope="module")
def tool() -> Tool:
    def call(*arguments: object) -> int:
        try:
            prepare.main([str(argument) for argument in arguments])
        except (InputError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0

    return call


def _snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()
    }


def _contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in _snapshot(folder).items()}


def test_arithmetic_is_prepared_end_to_end(tool: Tool, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "arithmetic"
    assert tool("arithmetic", "--output", out, *SMALL, "--operators", "+", "-") == 0
    tokenizer = load_tokenizer(str(out / "tokenizer"))
    training, held_out = (
        load_prompts(DatasetConfig(path=str(out / f"{split}.parquet"), template="as_is"), tokenizer, 20).prompts
        for split in ("train", "eval")
    )
    demonstrations = load_demonstrations(
        DatasetConfig(path=str(out / "demonstrations.parquet"), template="as_is"), tokenizer, 200
    ).sequences
    assert (len(training), len(held_out), len(demonstrations)) == (60, 20, 50)
    forbidden = {prompt.text for prompt in held_out}
    assert not forbidden.intersection(prompt.text for prompt in training)
    assert not forbidden.intersection(tokenizer.decode(d.prompt_token_ids) for d in demonstrations)
    for prompt in training + held_out:
        left, right = prompt.text.rstrip("=").replace("-", "+-").split("+")
        assert int(prompt.ground_truth) == int(left) + int(right)
    assert list(out.parent.iterdir()) == [out], "no temporary folder stays behind"


def test_demonstrations_are_right_and_qualities_are_named(tool: Tool, tmp_path: Path) -> None:
    assert tool("arithmetic", "--output", tmp_path / "x", *SMALL) == 0
    rows = pq.read_table(tmp_path / "x" / "demonstrations.parquet").to_pylist()
    assert {row["quality"] for row in rows} == {"careful", "verbose", "careless"}
    for row in rows:
        left, right = row["prompt"].rstrip("=").split("+")
        right_answer = row["response"].endswith(f"Answer: {int(left) + int(right)}")
        assert right_answer or row["quality"] == "careless"


def test_the_schema_is_that_of_the_public_data(tool: Tool, tmp_path: Path) -> None:
    if not AIME.is_file():
        pytest.skip(f"public data file {AIME} is not there")
    assert tool("arithmetic", "--output", tmp_path / "x", *SMALL) == 0
    # pandas left its index behind in the public file.
    public = [field for field in pq.read_schema(AIME) if field.name != "__index_level_0__"]
    for split in ("train", "eval"):
        assert list(pq.read_schema(tmp_path / "x" / f"{split}.parquet")) == public


def test_the_same_call_changes_nothing_and_another_needs_force(
    tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x"
    assert tool("arithmetic", "--output", out, *SMALL) == 0
    before = _snapshot(out)
    assert tool("arithmetic", "--output", out, *SMALL) == 0
    assert "already there" in capsys.readouterr().out
    assert tool("arithmetic", "--output", out, *SMALL, "--seed", "1") == 2
    error = capsys.readouterr().err
    assert "seed=0 (now 1)" in error
    assert error.count("\n") == 1
    assert _snapshot(out) == before
    assert tool("arithmetic", "--output", out, *SMALL, "--seed", "1", "--force") == 0
    assert _contents(out)["train.parquet"] != before["train.parquet"][0]
    assert list(tmp_path.iterdir()) == [out]
    (out / "eval.parquet").unlink()
    assert tool("arithmetic", "--output", out, *SMALL, "--seed", "1") == 2
    assert "lacks eval.parquet" in capsys.readouterr().err


def test_the_output_depends_on_the_parameters_only(tool: Tool, tmp_path: Path) -> None:
    for name in ("x", "y"):
        assert tool("arithmetic", "--output", tmp_path / name, *SMALL) == 0
        assert tool("init-model", "--output", tmp_path / f"model-{name}", *TINY) == 0
    assert _contents(tmp_path / "x") == _contents(tmp_path / "y")
    assert _contents(tmp_path / "model-x") == _contents(tmp_path / "model-y")


@pytest.mark.parametrize(("kind", "untied"), [("character", False), ("byte", True)])
def test_a_random_model_loads_with_its_tokenizer(tool: Tool, kind: str, untied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    out = tmp_path / "model"
    assert tool("init-model", "--output", out, "--tokenizer", kind, *TINY, *["--untied"] * untied) == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), load_tokenizer(str(out))
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings is not untied
    shares_storage = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shares_storage is not untied
    assert GenerationConfig.from_pretrained(out).eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert 0 < float(model.model.embed_tokens.weight.detach().std()) < 0.05


def test_seeds_give_different_weights_and_leave_the_random_state_alone(tool: Tool, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for seed in (0, 1):
        assert tool("init-model", "--output", tmp_path / str(seed), *TINY, "--seed", seed) == 0
    assert torch.equal(torch.rand(3), expected)
    weights = [(tmp_path / str(seed) / "model.safetensors").read_bytes() for seed in (0, 1)]
    assert weights[0] != weights[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["arithmetic", "--max-digits", "1", "--num-train", "90"], "at most 27"),
        (["arithmetic", "--careful", "0.9"], "sum 1"),
        (["arithmetic", "--min-digits", "0"], "digits"),
        (["init-model", "--hidden-size", "30", "--heads", "4"], "nearest is 32"),
        (["init-model", "--heads", "4", "--kv-heads", "3"], "[1, 2, 4]"),
        (["init-model", "--layers", "0"], "--layers 0"),
    ],
)
def test_impossible_parameters_are_one_line_and_write_nothing(
    tool: Tool, arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool(*arguments, "--output", tmp_path / "x") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error
    assert not list(tmp_path.iterdir())


def test_inspect_shows_columns_rows_and_the_first_prompt(
    tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "1+1?", "meta": {"answer": 2}}\n' * 3)
    assert tool("inspect", path, "--prompt-column", "question", "--template", "Q: {problem}") == 0
    output = capsys.readouterr().out
    for expected in ("question: '1+1?'", "meta.answer: '2'", "rows: 3", "\nQ: 1+1?\n"):
        assert expected in output
    assert tool("inspect", path, "--prompt-column", "problem") == 2
    assert "no column 'problem'; it has question, meta.answer" in capsys.readouterr().err


def test_inspect_shows_a_row_also_where_prompts_have_another_name(
    tool: Tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n')
    assert tool("inspect", path) == 0
    output = capsys.readouterr()
    for expected in ("question: '1+1?'", "answer: '2'", "rows: 1", "add --prompt-column with one of the columns above"):
        assert expected in output.out
    assert not output.err
    path.write_text('{"prompt": "1+1?"}\n')
    assert tool("inspect", path) == 0
    assert capsys.readouterr().out.endswith("first prompt (prompt, template as_is):\n1+1?\n")


# Folders -------------------------------------------------------------------------------------------------------------


def _write(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "content.txt").write_text(text) and None


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        _write("half")(folder)
        raise OSError("disk full")

    out = tmp_path / "x"
    with pytest.raises(OSError, match="disk full"):
        prepare_folder(out, {"n": 1}, fail)
    assert not list(tmp_path.iterdir())
    assert prepare_folder(out, {"n": 1}, _write("first"))
    with pytest.raises(OSError, match="disk full"):
        prepare_folder(out, {"n": 2}, fail, force=True)
    assert (out / "content.txt").read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


def test_a_failed_swap_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x"
    prepare_folder(out, {"n": 1}, _write("first"))
    replace = os.replace

    def refuse_new(source: Path, target: Path) -> None:
        if Path(source).name == "new":
            raise OSError("busy")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_new)
    with pytest.raises(OSError, match="busy"):
        prepare_folder(out, {"n": 2}, _write("second"), force=True)
    assert (out / "content.txt").read_text() == "first"


def test_files_of_others_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for name, force in (("x", False), ("x", True), ("file", True)):
        with pytest.raises(InputError):
            prepare_folder(tmp_path / name, {}, _write("new"), force)
    assert (tmp_path / "x" / "mine.txt").read_text() == (tmp_path / "file").read_text() == "keep"


@pytest.mark.parametrize("record", ["", "{}", "[]", json.dumps({"parameters": {}})])
def test_a_damaged_record_needs_force(record: str, tmp_path: Path) -> None:
    out = tmp_path / "x"
    prepare_folder(out, {}, _write("first"))
    (out / RECORD).write_text(record)
    with pytest.raises(InputError, match="damaged"):
        prepare_folder(out, {}, _write("second"))
    assert prepare_folder(out, {}, _write("second"), force=True)
    assert (out / "content.txt").read_text() == "second"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert prepare_folder(tmp_path / "x", {}, _write("first"))
    assert (tmp_path / "x" / "content.txt").read_text() == "first"
