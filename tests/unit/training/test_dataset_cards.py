"""A run's record names the cards of its datasets, and rows that do not fit their card are refused before anything."""

import json
from pathlib import Path

import pytest

from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.preparation.output import new_dataset
from dapo_mega.training.build import read_inputs
from dapo_mega.training.run_records import dataset_cards, write_run_record

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"


def test_the_run_names_the_card_and_refuses_other_rows(tmp_path: Path) -> None:
    with new_dataset(tmp_path / "data") as writer:
        writer.keep({"prompt": "1+1=", "reward_model": {"ground_truth": "2"}})
        card = writer.finish("a test", settings={}, versions={})
    rows = tmp_path / "data" / "train.parquet"
    (tmp_path / "plain.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    paths = [f"data.train.path={rows}", f"data.evaluation.path={tmp_path / 'plain.jsonl'}"]
    config = load_config(RunConfig, QUICKSTART, [f"output_dir={tmp_path / 'run'}", "model.path=absent", *paths])
    write_run_record(config, dataset_cards(config))
    record = json.loads((tmp_path / "run" / "datasets.json").read_text())
    assert list(record) == ["data.train"]
    assert record["data.train"]["path"] == str(tmp_path / "data" / "card.json")
    assert (record["data.train"]["data_sha256"], record["data.train"]["num_rows"]) == (card.data.sha256, 1)
    rows.write_bytes(rows.read_bytes() + b" ")
    with pytest.raises(InputError, match="is not the file that its card describes"):
        read_inputs(config)
