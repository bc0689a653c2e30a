"""The benchmarks: where they are found, which columns they have, and how their references are graded."""

import json
import re
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from dapo_mega.data import load_prompts
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.evaluation.benchmarks import BENCHMARKS, EXTRACTION, TEMPLATE, dataset_of, sources
from dapo_mega.rewards import AnswerVerifier

DATA = Path(__file__).parents[4] / "shared" / "data"
_PRESENT = {"aime24": 30, "amc23": 40, "math500": 500, "minerva": 272, "olympiadbench": 675, "gsm8k": 1319}


def prompts_of(name):
    (source,) = sources([name], DATA)
    return load_prompts(dataset_of(source, TEMPLATE, chat_template=False), build_byte_tokenizer(), 10_000).prompts


@pytest.fixture(scope="module")
def wrong():
    """`wrong(name, items)`: those whose response is not accepted; the workers that compare serve all tests."""
    with ExitStack() as stack:

        @cache
        def verifier(tolerance):
            return stack.enter_context(AnswerVerifier(2, 5.0, EXTRACTION, numeric_tolerance=tolerance))

        def wrong(name, items):
            verdicts = verifier(BENCHMARKS[name].numeric_tolerance).verify(items)
            return [item for item, verdict in zip(items, verdicts, strict=True) if not verdict.correct]

        yield wrong


@pytest.mark.skipif(not DATA.is_dir(), reason="no shared/data beside the repository")
def test_references_of_the_shared_benchmarks_are_graded_correct_in_every_form(wrong):
    forms = ("Thus.\n\nAnswer: {}", "It follows that $x = 1$ and so \\boxed{{{}}}.")
    # An equation within an answer line counts as the answer, and a comma between formulas as a list.
    known = {("olympiadbench", forms[0]): 2}
    found = {}
    for name, size in _PRESENT.items():
        prompts = prompts_of(name)
        assert len(prompts) == size, name
        for form in forms:
            refused = wrong(name, [(form.format(p.ground_truth), p.ground_truth) for p in prompts])
            if refused:
                found[name, form] = len(refused)
    assert found == known


@pytest.mark.skipif(not DATA.is_dir(), reason="no shared/data beside the repository")
def test_reference_solutions_are_graded_correct_as_they_are_written(wrong):
    columns = {"gsm8k": ("gsm8k-test.jsonl", "answer"), "minerva": ("minerva-math.jsonl", "solution")}
    for name, (file, column) in columns.items():
        solutions = [json.loads(line)[column] for line in (DATA / file).read_text().splitlines()]
        truths = [prompt.ground_truth for prompt in prompts_of(name)]
        assert wrong(name, list(zip(solutions, truths, strict=True))) == []


@pytest.mark.skipif(not DATA.is_dir(), reason="no shared/data beside the repository")
def test_the_reference_of_the_next_problem_is_graded_wrong(wrong):
    for name in ("aime24", "amc23", "math500", "gsm8k"):
        truths = [prompt.ground_truth for prompt in prompts_of(name)]
        items = [(f"Answer: {a}", b) for a, b in zip(truths[1:], truths, strict=False)]
        refused = set(wrong(name, items))
        accepted = [item for item in items if item not in refused]
        assert all(value(answer) == value(truth) for answer, truth in accepted), (name, accepted)
        assert len(accepted) <= 3 + 0.03 * len(items), name


def value(text):
    """The number that an answer is."""
    return float(re.sub(r"^.*[:=]|[\\$ ]", "", text))


def test_a_benchmark_is_found_by_the_usual_names_of_its_file(tmp_path):
    for name in ("AIME_2025.jsonl", "aime-2024.parquet", "aime2024.json", "gsm8k-train.jsonl", "gsm8k-test.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "MATH_500.csv").write_text("")
    found = [Path(source.path).name for source in sources(["gsm8k", "math500", "aime25", "aime24"], tmp_path)]
    assert found == ["aime2024.json", "AIME_2025.jsonl", "MATH_500.csv", "gsm8k-test.jsonl"]
    (named,) = sources([f"gsm8k={tmp_path / 'gsm8k-train.jsonl'}"], tmp_path)
    assert Path(named.path).name == "gsm8k-train.jsonl"
    assert [source.path for source in sources(["gsm8k"])] == ["openai/gsm8k:main"]


def test_what_is_wrong_with_a_choice_of_benchmarks_is_one_line(tmp_path):
    cases = [
        ([], None, "no benchmark is given; choose of aime24, aime25"),
        (["aime2024"], None, "there is no benchmark 'aime2024', only .*did you mean aime24"),
        (["aime24", "aime24"], None, "given twice"),
        (["math500=absent.json"], None, "absent.json does not exist"),
        (["math500"], tmp_path / "absent", "--data .*absent is no folder"),
        (["math500"], tmp_path, r"holds no file of MATH-500 \(looked for math500.jsonl, .*give math500=FILE"),
    ]
    for chosen, folder, message in cases:
        with pytest.raises(InputError, match=message):
            sources(chosen, folder)


def test_a_file_of_other_columns_is_refused_with_the_forms_that_are_known(tmp_path):
    file = tmp_path / "math500.jsonl"
    for content, message in (
        ('{"query": "1+1?", "answer": "2"}\n', "needs the columns problem and answer or .*the row has query, answer"),
        ("", "has no rows"),
    ):
        file.write_text(content)
        with pytest.raises(InputError, match=message):
            dataset_of(sources(["math500"], tmp_path)[0], TEMPLATE, chat_template=False)


def test_a_null_is_told_as_a_null_in_its_row(tmp_path):
    file = tmp_path / "math500.jsonl"
    tokenizer = build_byte_tokenizer()
    for nulls in ((0,), (1,), (0, 1)):
        for column, message in (
            ("answer", "the ground truth must be .* got null"),
            ("problem", "a prompt must .* null"),
        ):
            rows = [
                {"problem": f"{i}+1?", "answer": str(i + 1)} | ({column: None} if i in nulls else {}) for i in (0, 1)
            ]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            with pytest.raises(InputError, match=rf"math500.jsonl, line {nulls[0] + 1}: {message}"):
                load_prompts(
                    dataset_of(sources(["math500"], tmp_path)[0], TEMPLATE, chat_template=False), tokenizer, 999
                )
