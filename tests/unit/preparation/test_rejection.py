"""A model's own responses kept as a dataset: which, what the rows are, and that nothing is asked twice."""

import contextlib
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dapo_mega.commands import regrade, rejection_sample
from dapo_mega.config import DatasetConfig, RunConfig
from dapo_mega.config.preparation import DecontaminationConfig
from dapo_mega.data import load_tokenizer
from dapo_mega.data.prompts import load_demonstrations
from dapo_mega.engines.embedded.engine import EmbeddedEngine
from dapo_mega.errors import FleetError, InputError
from dapo_mega.preparation.contamination import EvaluationIndex, EvaluationProblem
from dapo_mega.preparation.output import new_dataset, read_dataset
from dapo_mega.preparation.rejection import KeepOptions, choose, responses_folder
from dapo_mega.preparation.rejection import rejection_sample as sample
from dapo_mega.samples.files import samples_folder
from dapo_mega.types import Prompt
from tests.distributed.launching import REPOSITORY, start_script
from tests.unit.engines.sglang.scripted_server import KEY, Servers, serve_model

from .test_difficulty import make_model

NUM_PROMPTS, K, ROWS = 12, 6, 8
REWARD = """
def score(records):
    ends = [r["response"][-1:] in list("02468") for r in records]
    return [{"score": 10.0 * right + len(r["response"]), "correct": right} for r, right in zip(records, ends)]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model that says digits until it ends, problems, and a reward for which an even last digit is right."""
    folder = tmp_path_factory.mktemp("made")
    make_model(folder / "model")
    with new_dataset(folder / "source") as writer:
        for number in range(NUM_PROMPTS):
            writer.keep({"prompt": f"{number}0", "reward_model": {"ground_truth": str(number)}})
        writer.finish("a test", settings={}, versions={})
    (folder / "mine.py").write_text(REWARD)
    return folder


def arguments(made, output, *more):
    keys = [f"rollout.max_batch_rows={ROWS}", f"reward.function={made / 'mine.py'}:score", "data.max_prompt_tokens=16"]
    asked = ["--model", made / "model", "--dtype", "fp32", "--template", "as_is", "--max-response-tokens", 24]
    given = [made / "source", "--output", output, "--samples", K, *asked, *more, "--set", *keys]
    return [str(value) for value in given]


def run(made, output, *more):
    rejection_sample.main(arguments(made, output, *more))
    return list(read_dataset(output)[1])


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out"
    run(made, output)
    return output


@pytest.fixture
def asked(monkeypatch):
    """The ids of all requests that the embedded engine gets in this process."""
    ids, generate = [], EmbeddedEngine.generate

    def noted(engine, requests):
        ids.extend(request.request_id for request in requests)
        return generate(engine, requests)

    monkeypatch.setattr(EmbeddedEngine, "generate", noted)
    return ids


def saved(output):
    (file,) = samples_folder(responses_folder(output)).glob("*.parquet")
    return pq.read_table(file).to_pylist()


def test_all_correct_responses_that_end_become_rows_to_fine_tune_on(made, whole):
    card, found = read_dataset(whole)
    rows, responses = list(found), saved(whole)
    assert len(responses) == NUM_PROMPTS * K
    ended = [r for r in responses if r["correct"] and r["finish_reason"] == "stop"]
    kept = list(dict.fromkeys((r["prompt_index"], r["response"]) for r in ended))
    assert [(int(row["ground_truth"]), row["response"]) for row in rows] == kept
    assert 0 < len(kept) < len(responses)
    for row in rows:
        question = {"role": "user", "content": f"{row['ground_truth']}0"}
        assert row["prompt"] == [question]
        assert row["messages"] == [question, {"role": "assistant", "content": row["response"]}]
        of_prompt = [r["correct"] for r in responses if r["prompt_index"] == int(row["ground_truth"])]
        assert row["pass_rate"] == sum(of_prompt) / K
    assert card.parent == read_dataset(made / "source")[0]
    assert card.num_rows_read == len(responses)
    assert card.dropped["wrong"] == sum(not r["correct"] for r in responses)
    demonstrations = load_demonstrations(
        DatasetConfig(path=str(whole), template="as_is"), load_tokenizer(str(made / "model")), 64
    ).sequences
    assert len(demonstrations) == len(rows)


def test_another_rule_chooses_again_without_asking(made, whole, asked, tmp_path):
    by_prompt: dict[int, list[dict]] = {}
    for row in read_dataset(whole)[1]:
        by_prompt.setdefault(int(row["ground_truth"]), []).append(row)
    asked.clear()
    expected = {
        "shortest": [min(found, key=lambda r: r["length"])["length"] for found in by_prompt.values()],
        "best": [max(found, key=lambda r: r["reward"])["length"] for found in by_prompt.values()],
    }
    assert expected["shortest"] != expected["best"]
    for rule, lengths in expected.items():
        assert [row["length"] for row in run(made, whole, "--keep", rule, "--force")] == lengths
    banded = run(made, whole, "--pass-rates", "0.5..1", "--force")
    assert {row["pass_rate"] for row in banded} == {
        row["pass_rate"] for found in by_prompt.values() for row in found if row["pass_rate"] >= 0.5
    }
    assert "too_hard" in read_dataset(whole)[0].dropped
    run(made, whole, "--force")
    assert asked == []


def test_a_killed_command_continues_and_asks_nothing_twice(made, whole, asked, tmp_path):
    output = tmp_path / "out"
    process = start_script(REPOSITORY / "tools" / "rejection_sample.py", arguments(made, output), tmp_path / "log")
    parts, deadline = samples_folder(responses_folder(output)) / "parts", time.monotonic() + 120
    while len(list(parts.glob("*.parquet"))) < 2 and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.join()
    there = [i for part in parts.glob("*.parquet") for i in pq.read_table(part)["request_id"].to_pylist()]
    assert ROWS <= len(there) < NUM_PROMPTS * K, (tmp_path / "log").read_text()
    assert not output.exists()
    run(made, output)
    assert sorted(there + asked) == sorted(row["request_id"] for row in saved(whole))
    for name in ("card.json", "train.parquet"):
        assert (output / name).read_bytes() == (whole / name).read_bytes(), name


def test_engines_are_asked_and_what_failed_is_asked_again(made, tmp_path, monkeypatch):
    monkeypatch.setenv("DAPO_MEGA_API_KEY", KEY * 4)
    group = Servers(1)
    try:
        (engine,) = group.engines
        serve_model(engine, made / "model")
        engine.api_key = KEY * 4
        faults = ["error_500"]
        engine.fault = lambda payload: faults.pop() if faults and "logprob_start_len" not in payload else None
        more = ["--urls", group.urls[0], "--keep", "best", "--extraction", "none"]
        given = arguments(made, tmp_path / "out", *more, "--samples", 2)
        given[given.index("--set") :] = ["--set", "rollout.max_attempts=1", "rollout.fleet.wait_limit_s=120"]
        with pytest.raises(FleetError, match="lacks responses that could not be had; the same command asks for these"):
            rejection_sample.main(given)
        num_asked = len(engine.payloads)
        with contextlib.suppress(InputError):  # Whether any is right is not the question.
            rejection_sample.main(given)
        assert len(saved(tmp_path / "out")) == 2 * NUM_PROMPTS
        again = [payload for payload in engine.payloads[num_asked:] if "logprob_start_len" not in payload]
        assert len(again) == 1
    finally:
        group.close()


def test_the_saved_responses_are_regraded_and_more_are_drawn(made, asked, tmp_path, capsys):
    output = tmp_path / "out"
    run(made, output)
    asked.clear()
    rejection_sample.main(arguments(made, output, "--force", "--samples", K + 2))
    assert len(asked) == 2 * NUM_PROMPTS
    assert len(saved(output)) == (K + 2) * NUM_PROMPTS
    asked.clear()
    capsys.readouterr()
    regrade.main([str(responses_folder(output)), "--extraction", "none", "--examples", "0"])
    assert f"{(K + 2) * NUM_PROMPTS} responses" in capsys.readouterr().out
    again = pq.read_table(tmp_path / "out.responses-regraded" / "samples" / "evaluation_00000000.parquet").to_pylist()
    for row in again:
        assert not row["correct"] or int(row["response"]) == int(row["ground_truth"])
    assert asked == []


def judged(texts, lengths=None, index=None, **options):
    """What becomes of correct responses with these texts: reason by text."""
    rows = [
        {"request_id": i, "response": text, "correct": True, "reward": 1.0, "length": (lengths or [9] * len(texts))[i]}
        for i, text in enumerate(texts)
    ]
    found = choose(
        Prompt(0, "?", None, "g", problem="What is it?"),
        [{**row, "finish_reason": "stop"} for row in rows],
        1.0,
        KeepOptions(len(texts), **options),
        index or EvaluationIndex([], 8, 5, 0.6),
    )
    return {response["request_id"]: reason for response, reason, _ in found}


def test_diverse_ones_are_far_apart_and_near_duplicates_are_left_out():
    texts = [
        "we add the two numbers and get seven",
        "we add the two numbers and get seven now",
        "by counting on fingers the answer is seven",
        "We add the  two numbers and get seven ",
    ]
    lengths = [8, 9, 10, 11]
    found = judged(texts, lengths, rule="diverse", per_prompt=2)
    assert found == {0: "", 1: "not chosen", 2: "", 3: "not chosen"}
    near = judged(texts[:3], lengths, rule="all", min_distance=0.5)
    assert near == {0: "", 1: "near duplicate", 2: ""}
    spaced = judged([texts[0], texts[0].replace(" two ", "  two ")])
    assert spaced == {0: "", 1: "exact duplicate"}


def test_a_response_that_holds_a_problem_of_an_evaluation_set_is_left_out(made, tmp_path):
    problem = "How many marbles does Ann have after she gives three of her twelve marbles away?"
    index = EvaluationIndex([EvaluationProblem("held out", problem)], 8, 5, 0.6)
    assert judged(["It is nine.", f"As in: {problem} Nine."], index=index) == {0: "", 1: "contaminated"}


def test_what_cannot_be_used_is_one_line(made, whole, tmp_path):
    run_file = RunConfig.model_validate(
        {
            **{"output_dir": "o", "num_steps": 1, "model": {"path": str(made / "model")}},
            "data": {"train": {"path": "unused"}},
            "reward": {"components": [{"kind": "repetition"}]},
            "algorithm": {"dynamic_sampling": False},
        }
    )
    options = KeepOptions(2, decontamination=DecontaminationConfig())
    with pytest.raises(InputError, match="does not say which responses are correct; only --keep best"):
        sample(run_file, made / "source", tmp_path / "out", options)
    with pytest.raises(InputError, match="holds a prepared dataset already; use --force"):
        run(made, whole)
    with pytest.raises(InputError, match="an n-gram distance is from 0 to 1, and 2 is given"):
        run(made, tmp_path / "out", "--min-distance", 2)
    with pytest.raises(InputError, match=r"temperature was 1\.0 and is 0\.5"):
        run(made, whole, "--force", "--temperature", 0.5)
    assert not Path(tmp_path / "out").exists()
