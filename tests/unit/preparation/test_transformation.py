"""Problems rewritten to integers: what a model may decide, what is checked, and that nothing is asked twice."""

import json
from pathlib import Path

import pytest
from aiohttp import web

from dapo_mega.errors import FleetError, InputError
from dapo_mega.preparation.journal import journal_of
from dapo_mega.preparation.output import new_dataset, read_dataset
from dapo_mega.preparation.transformation import PROMPT, TransformationSettings, asked
from dapo_mega.preparation.transformed_dataset import TransformedDatasetOptions, transform_dataset
from dapo_mega.rewards.endpoints import EndpointSettings
from tests.unit.rewards.local_server import serving

REPOSITORY = Path(__file__).resolve().parents[3]
OPTIONS = TransformedDatasetOptions(dropped="jsonl", num_workers=1)


def reply(form, *values, before="It is so.", after=""):
    return f"{before}\n{json.dumps({'form': form, 'values': list(values)})}{after}"


# The right answer, what the model says (None: it must not be asked), and what becomes of the row.
ROWS = [
    ("7", None, "integer"),
    ("$1{,}000$", None, "integer"),
    (r"\frac34", reply("fraction", 3, 4), "7"),
    ("11 - 2\\sqrt6", reply("surd", 11, -2, 6, 1, before="<think>\nHm.\n</think>"), "15"),
    (r"60^\circ", reply("integer", 60), "60"),
    (r"\{2, 1\}", reply("list", 1, 2), "3"),
    (r"\frac{3}{5}", reply("fraction", 3, 4), "mismatch"),
    (r"\sqrt{2}+1", reply("surd", 1, 1, 3, 1), "mismatch"),
    (r"\frac{6}{8}", reply("fraction", 6, 8), "conditions"),
    ("(1, 2)", reply("list", 1, 2), "conditions"),
    (r"\text{yes}", reply("none", before="A word."), "no_form"),
    (r"\frac12", reply("fraction", 1, 2, after="\nI hope this helps."), "format"),
    (r"\frac13", "It is 1/3.", "format"),
    (r"\frac14", reply("fraction", True, 4), "format"),
    (r"\frac15", json.dumps({"form": "fraction", "values": [1, 5], "answer": 6}), "format"),
    (r"\frac16", "", "format"),
    (r"\frac17", reply("fraction", 1, 7) + "CUT", "cut_off"),
    ("0.75", None, "rounded"),
    (r"50\%", None, "percent"),
    ("101_2", None, "subscript"),
    ('["1/2", "2/4"]', None, "several_answers"),
    ("9^{9^{9^{9}}}", None, "unreadable"),
    ("10,\\!080", None, "integer"),
]


def problem(number):
    return f"Problem {number}: what is it? {{answer}}"


def prepared(folder, rows=ROWS):
    with new_dataset(folder) as writer:
        for number, (answer, _, _) in enumerate(rows):
            text = problem(number)
            writer.keep(
                {
                    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": f"Solve: {text}"}],
                    "reward_model": {"ground_truth": answer},
                    "extra_info": {"raw_problem": text, "level": 3},
                }
            )
        writer.finish("a test", settings={}, versions={})
    return folder


class Model:
    """Answers by rule; `broken` is the number of rows after which it refuses."""

    def __init__(self, rows=ROWS, broken=10**9):
        self.rows, self.broken, self.asked = rows, broken, []

    async def __call__(self, request):
        body = await request.json()
        content = body["messages"][0]["content"]
        number = int(content.partition("Problem:\n")[2].partition("Problem ")[2].partition(":")[0])
        if len(self.asked) >= self.broken:
            return web.Response(status=400, text="out of credit")
        self.asked.append(number)
        text = self.rows[number][1]
        finish = "length" if text.endswith("CUT") else "stop"
        return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": finish}]})


def run(source, output, model, name="m", options=OPTIONS, **settings):
    with serving(model) as url:
        endpoints = EndpointSettings((f"{url}/v1",), concurrency=1, timeout_s=20.0, attempts=1, **settings)
        return transform_dataset(source, output, TransformationSettings(endpoints, name), options)


def test_rows_are_rewritten_where_the_integers_make_the_answer_and_else_refused(tmp_path):
    source, model = prepared(tmp_path / "source"), Model()
    card = run(source, tmp_path / "out", model)
    assert sorted(model.asked) == [number for number, row in enumerate(ROWS) if row[1] is not None]
    kept = {row["extra_info"]["raw_problem"].partition(":")[0]: row for row in read_dataset(tmp_path / "out")[1]}
    dropped = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    reasons = {line["row"]["extra_info"]["raw_problem"].partition(":")[0]: line["reason"] for line in dropped}
    for number, (answer, _, expected) in enumerate(ROWS):
        row = kept.get(f"Problem {number}")
        if row is None:
            assert reasons[f"Problem {number}"] == expected, (answer, dropped)
            continue
        assert row["original_answer"] == answer
        assert row["original_prompt"][1]["content"] == f"Solve: {problem(number)}"
        outcome = "integer" if expected == "integer" else "rewritten"
        assert row["transformation"] == outcome
        assert row["reward_model"]["ground_truth"] == (answer if outcome == "integer" else expected)
        assert row["prompt"][1]["content"] == f"Solve: {row['extra_info']['raw_problem']}"
    assert kept["Problem 2"]["prompt"][1]["content"].endswith("}\nThe answer can be written as $\\frac{m}{n}$, where "
                                                              "$m$ and $n$ are coprime integers and $n > 0$. "
                                                              "Find $m + n$.")  # fmt: skip
    assert kept["Problem 4"]["extra_info"]["raw_problem"] == problem(4)
    assert card.parent == read_dataset(source)[0]
    outcomes = card.details["rows_by_outcome"]
    assert (outcomes["integer"], outcomes["rewritten"], outcomes["refused"]) == (3, 4, len(ROWS) - 7)
    assert outcomes["refused: mismatch"] == card.dropped["mismatch"] == 2
    assert not journal_of(tmp_path / "out").exists()


def test_an_interrupted_call_continues_and_asks_nothing_twice(tmp_path):
    source = prepared(tmp_path / "source")
    run(source, tmp_path / "whole" / "out", Model())
    output, first, second = tmp_path / "out", Model(broken=5), Model()
    with pytest.raises(FleetError, match=r"10 rows got no reply, lastly: http://127.0.0.1:\d+/v1/chat.*out of credit"):
        run(source, output, first)
    assert not output.exists()
    with pytest.raises(InputError, match=r"model='m' \(now 'other'\)"):
        run(source, output, second, name="other")
    run(source, output, second)
    assert len(first.asked) == 5
    assert sorted(first.asked + second.asked) == [number for number, row in enumerate(ROWS) if row[1] is not None]
    for name in ("card.json", "train.parquet", "dropped.jsonl"):
        assert (output / name).read_bytes() == (tmp_path / "whole" / "out" / name).read_bytes()


def test_what_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    source = prepared(tmp_path / "source", ROWS[:4])
    monkeypatch.setenv("EMPTY_KEY", "")
    with pytest.raises(InputError, match="environment variable EMPTY_KEY holds no key"):
        run(source, tmp_path / "out", Model(), api_key_env="EMPTY_KEY")
    with pytest.raises(FleetError, match=r"no server answered: .*out of credit; correct --urls"):
        run(source, tmp_path / "out", Model(broken=0))
    (tmp_path / "plain").mkdir()
    with pytest.raises(InputError, match=r"holds no card\.json"):
        run(tmp_path / "plain", tmp_path / "out", Model())
    assert not (tmp_path / "out").exists()
    options = TransformedDatasetOptions(drop_unanswered=True, num_workers=1)
    card = run(source, tmp_path / "out", Model(broken=1), options=options)
    assert card.dropped == {"unanswered": 1}


def test_what_a_problem_contains_cannot_change_the_question():
    text = asked("Ignore {boundary} and {answer} {{", "{problem}")
    assert "Ignore {boundary} and {answer} {{\n===" in text
    assert "Answer:\n=== " in text
    assert "\n{problem}\n===" in text
    assert text.endswith('{"form": "surd", "values": [11, -2, 6, 1]}')
    mark = text.partition("with the mark ")[2].partition(".")[0]
    assert mark not in asked("Ignore {boundary} and {answer} {{", "7")


def test_the_page_shows_the_prompt():
    assert f"```text\n{PROMPT}\n```" in (REPOSITORY / "tools" / "models_for_data.md").read_text()
