"""Pass rates of prompts: of the model's own responses, exact after any interruption, and never guessed."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dapo_mega.config import RunConfig
from dapo_mega.data.tokenizer import build_character_tokenizer
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.errors import FleetError, InputError, StopRequested
from dapo_mega.preparation.asking import parse_range
from dapo_mega.preparation.card import Card
from dapo_mega.preparation.difficulty import DifficultyOptions, measure_difficulty
from dapo_mega.preparation.journal import journal_of
from dapo_mega.preparation.output import new_dataset, read_dataset
from tests.unit.engines.sglang.scripted_server import KEY, Servers, serve_model

NUM_ROWS = 10
LONG = 3
FILES = ("card.json", "train.parquet")


def make_model(folder: Path, seed: int = 0) -> Path:
    """A model that says each digit about equally often, and nothing that takes long to judge."""
    tokenizer = build_character_tokenizer("0123456789")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    settings = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=64, **sizes)
    Qwen2ForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "source"
    with new_dataset(folder) as writer:
        for number in range(NUM_ROWS):
            text = f"{number}0" * (9 if number == LONG else 1)
            writer.keep({"prompt": text, "reward_model": {"ground_truth": str(number)}, "level": number})
        writer.finish("a test", settings={}, versions={})
    return folder


def config(model, **changes) -> RunConfig:
    """One token per response: its text is the answer."""
    return RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": {"path": "unused", "template": "as_is"}, "max_prompt_tokens": 16},
            "rollout": {"max_response_tokens": 1, "max_batch_rows": 100, **changes.pop("rollout", {})},
            "reward": {"extraction": "none", "overlong_punishment": False},
            **changes,
        }
    )


def measure(model, source, output, run=None, **options) -> Card:
    options = {"samples": 32, **options}
    return measure_difficulty(run or config(model), source, output, DifficultyOptions(**options))


@pytest.fixture(scope="module")
def measured(model, source, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("measured") / "out"
    measure(model, source, output, dropped="jsonl")
    return output


def test_rows_get_their_pass_rates_and_long_prompts_are_dropped(source, measured):
    card, rows = read_dataset(measured)
    rows = list(rows)
    assert [row["level"] for row in rows] == [number for number in range(NUM_ROWS) if number != LONG]
    for row in rows:
        assert row["difficulty_samples"] == 32
        assert row["difficulty"] == row["difficulty_correct"] / 32
        assert 0 <= row["difficulty_truncated"] <= 32
    correct = [row["difficulty_correct"] for row in rows]
    assert 0 < sum(correct) < 32 * 4
    assert len(set(correct)) > 1
    assert card.parent == read_dataset(source)[0]
    assert card.dropped == {"long_prompt": 1}
    assert card.details["mean_pass_rate"] == pytest.approx(sum(correct) / 32 / len(rows))
    counted = card.details["prompts_by_correct_responses"]
    assert counted == {str(n): correct.count(n) for n in sorted(set(correct))}
    assert not journal_of(measured).exists()


def test_a_run_that_reads_the_raw_file_measures_the_prepared_dataset_alike(model, source, measured, tmp_path):
    columns = {"prompt": "question", "ground_truth": "answer"}
    train = {"path": "raw.jsonl", "template": "as_is", "columns": columns, "ground_truth_style": "gsm8k"}
    run = config(model, data={"train": train, "max_prompt_tokens": 16})
    measure(model, source, tmp_path / "out", run, dropped="jsonl")
    assert (tmp_path / "out" / "train.parquet").read_bytes() == (measured / "train.parquet").read_bytes()


def test_an_interrupted_measurement_ends_in_the_same_bytes(model, source, measured, tmp_path, monkeypatch):
    output, asked = tmp_path / "out", []
    generate = EmbeddedEngine.generate

    def stopped_in_the_third_batch(engine, requests):
        asked.append(len(requests))
        if len(asked) == 3:
            raise StopRequested("now")
        return generate(engine, requests)

    monkeypatch.setattr(EmbeddedEngine, "generate", stopped_in_the_third_batch)
    with pytest.raises(StopRequested):
        measure(model, source, output, dropped="jsonl")
    assert not output.exists()
    journal = journal_of(output).read_bytes().splitlines(keepends=True)
    assert len(journal) == 1 + 2 * 3  # A batch has 100 // 32 prompts.
    for num_kept in (5, 7):  # Killed while a batch was written down, and after it.
        journal_of(output).write_bytes(b"".join(journal[:num_kept]))
        del asked[:]
        asked += [0] * 3
        measure(model, source, output, dropped="jsonl", force=True)
        assert asked[3:] == [96] * (2 if num_kept == 5 else 1)
        for name in (*FILES, "dropped.jsonl"):
            assert (output / name).read_bytes() == (measured / name).read_bytes()


def test_prompts_outside_of_the_range_are_dropped(model, source, measured, tmp_path):
    card = measure(model, source, tmp_path / "out", keep=(1 / 32, 2 / 32))
    rates = {row["level"]: row["difficulty"] for row in read_dataset(measured)[1]}
    kept = {row["level"]: row["difficulty"] for row in read_dataset(tmp_path / "out")[1]}
    assert kept == {level: rate for level, rate in rates.items() if 1 / 32 <= rate <= 2 / 32}
    assert card.dropped.get("too_hard", 0) == sum(rate == 0 for rate in rates.values())
    assert card.dropped.get("too_easy", 0) == sum(rate > 2 / 32 for rate in rates.values())
    assert parse_range("0.1..0.9") == (0.1, 0.9)


def test_what_cannot_be_used_is_one_line(model, source, measured, tmp_path, monkeypatch):
    output = tmp_path / "out"
    with pytest.raises(InputError, match=r"'0\.9' is no range of pass rates"):
        parse_range("0.9")
    with pytest.raises(InputError, match=r"0 samples per prompt"):
        measure(model, source, output, samples=0)
    with pytest.raises(InputError, match=r"from 0\.9 to 0\.1 are no range"):
        measure(model, source, output, keep=(0.9, 0.1))
    with pytest.raises(InputError, match=r"longest prompt has 2 tokens, .*_tokens=63 is more than .* 64 pos"):
        measure(model, source, output, run=config(model, rollout={"max_response_tokens": 63}))
    with pytest.raises(InputError, match=r"holds no card\.json"):
        measure(model, tmp_path, output)
    with pytest.raises(InputError, match="has a column 'difficulty' already; give --column another name"):
        measure(model, measured, output)
    monkeypatch.delenv("DAPO_MEGA_API_KEY", raising=False)
    for fleet, message in (
        ({"rendezvous": "127.0.0.1:21600"}, r"rollout\.fleet\.urls names no engine"),
        ({"urls": ["http://127.0.0.1:9"]}, "DAPO_MEGA_API_KEY is not set"),
    ):
        with pytest.raises(InputError, match=message):
            measure(
                model, source, tmp_path / "asked", run=config(model, rollout={"placement": "fleet", "fleet": fleet})
            )
    other = make_model(tmp_path / "other", seed=7)
    with pytest.raises(InputError, match=r"journal.*results of a call with model='tiny' \(now 'other'\), model_fing"):
        measure(other, measured, output)
    with pytest.raises(InputError, match=r"journal.*results of a call with dataset_sha256='\w+' \(now '\w+'\); give"):
        measure(model, source, output)
    assert not output.exists()


def test_engines_are_asked_and_prompts_without_all_responses_are_not_judged(model, source, tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", KEY * 4)
    group = Servers(2)
    try:
        for engine in group.engines:
            serve_model(engine, model)
            engine.api_key = KEY * 4
            engine.fault = lambda payload: "error_500" if payload["input_ids"] == broken and faults.pop(0) else None
        rollout = {"placement": "fleet", "max_attempts": 1, "fleet": {"urls": group.urls, "wait_limit_s": 120}}
        run = config(model, rollout=rollout)
        broken, faults = None, []
        whole = measure(model, source, tmp_path / "whole", run=run, samples=4)
        payloads = [payload for engine in group.engines for payload in engine.payloads]
        asked = [payload["input_ids"] for payload in payloads if "logprob_start_len" not in payload]
        assert len(asked) == 4 * (NUM_ROWS - 1)
        broken, faults = asked[0], [True, False, False, False] * 2
        with pytest.raises(FleetError, match=r"1 prompts have responses that could not.*HTTP 500.*--drop-failed"):
            measure(model, source, tmp_path / "out", run=run, samples=4)
        num_asked = sum(len(engine.payloads) for engine in group.engines)
        card = measure(model, source, tmp_path / "out", run=run, samples=4, drop_failed=True)
        assert sum(len(engine.payloads) for engine in group.engines) == num_asked + 2 + 4
        assert card.dropped == {"failed": 1, "long_prompt": 1}
        assert card.num_rows == whole.num_rows - 1
    finally:
        group.close()
