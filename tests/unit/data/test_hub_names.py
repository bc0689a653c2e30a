"""Names of the Hugging Face hub, read without a network from what `datasets` keeps of an earlier download."""

import json
import sys

import datasets
import pyarrow.parquet as pq
import pytest
from datasets.arrow_writer import ArrowWriter

from dapo_mega.commands import evaluate, prepare
from dapo_mega.errors import InputError

ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(3)]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The problems of AIME-2025, as if they had been downloaded before."""
    owner, name = "math-ai", "aime25"
    folder = tmp_path / "cache" / f"{owner}___{name}" / "default" / "0.0.0" / ("0" * 40)
    folder.mkdir(parents=True)
    features = datasets.Dataset.from_list(ROWS).features
    with ArrowWriter(path=str(folder / f"{name}-test.arrow"), features=features) as writer:
        for row in ROWS:
            writer.write(row)
        writer.finalize()
    named = {"builder_name": "parquet", "dataset_name": name, "config_name": "default", "version": "0.0.0"}
    split = {"name": "test", "num_examples": len(ROWS), "dataset_name": name}
    datasets.DatasetInfo(features=features, splits=[split], **named).write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return f"{owner}/{name}"


def test_a_prepared_dataset_comes_from_a_hub_name(kept, tmp_path):
    output = tmp_path / "prepared"
    columns = ["--prompt-column", "problem", "--answer-column", "answer"]
    prepare.main(["dataset", kept, "sources.aime25.split=test", *columns, "--output", str(output)])
    (file,) = output.glob("*.parquet")
    assert pq.read_metadata(file).num_rows == len(ROWS)
    assert f'"{kept}"' in (output / "card.json").read_text()


def test_a_benchmark_without_a_file_comes_from_the_hub(kept, tmp_path, monkeypatch):
    sizes = "--hidden-size 16 --layers 1 --heads 2 --kv-heads 1 --intermediate-size 16 --max-positions 512"
    prepare.main(["init-model", "--output", str(tmp_path / "m"), "--tokenizer", "byte", *sizes.split()])

    def start(benchmark):
        options = ["--k", "1", "--max-tokens", "4", "--output", str(tmp_path / benchmark)]
        monkeypatch.setattr(sys, "argv", ["evaluate", str(tmp_path / "m"), "--benchmarks", benchmark, *options])
        evaluate.main()
        return json.loads((tmp_path / benchmark / "results.json").read_text())["benchmarks"][benchmark]

    monkeypatch.setattr("dapo_mega.commands.evaluate.leave_at_sigterm", lambda message: None)
    assert start("aime25")["num_problems"] == len(ROWS)
    with pytest.raises(InputError, match=r"math-ai/amc23 is no local file .* could not be loaded .* download it where"):
        start("amc23")
