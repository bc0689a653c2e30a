"""Whatever a model writes costs the trainer's process no more than its length: every place where its text is read."""

import contextlib
from functools import partial

import numpy as np

from dapo_mega.config.components import JudgeComponent
from dapo_mega.engines.sglang.engine_client import one_line as engine_line
from dapo_mega.evaluation.voting import count_votes
from dapo_mega.metrics.run_text import Example, code_block, examples_as_markdown, without_credentials
from dapo_mega.preparation.answer_forms import integer_answer
from dapo_mega.preparation.filters import _COMMAND, _FORMULA, integer_of, multiple_choice, proof, true_or_false
from dapo_mega.preparation.normalization import normal_text
from dapo_mega.rewards.built_in import LanguageReward, R1FormatReward
from dapo_mega.rewards.chat import read_completion
from dapo_mega.rewards.code import extract_code
from dapo_mega.rewards.code_tests import prints_the_same
from dapo_mega.rewards.endpoints import one_line
from dapo_mega.rewards.extraction import extract_answer
from dapo_mega.rewards.grading import gold_answers
from dapo_mega.rewards.judge import DEFAULT_TEMPLATE, JudgeReward, filled
from dapo_mega.rewards.records import RewardRecord
from dapo_mega.rewards.thoughts import opened_thought
from tests.unit.rewards.growth import growing_too_fast

PIECES = (
    *(
        " ",
        "\n",
        "\t",
        "`",
        "```\n",
        "```python\n",
        "{",
        "}",
        "$",
        "$a",
        "\\(",
        "\\[",
        "\\boxed{",
        "\\boxed ",
        "\\boxed",
    ),
    *(
        "<think>",
        "</think>",
        "<answer>",
        "<",
        "7",
        "7,",
        "7.",
        "7 ",
        ",",
        "(",
        "(A) ",
        "\\frac",
        "\\frac{",
        "|",
        "'",
        '"',
    ),
    *(
        '{"score":',
        '{"score":1},',
        "\ud800",
        "\u0301",
        "a\u0301",
        "Answer:",
        "Answer: 1\n",
        "The answer is ",
        "#### ",
        "*",
    ),
    *(
        "_",
        "\\text{",
        "\\begin{matrix}",
        "\\",
        "&",
        "&#",
        "%",
        "a",
        "ab ",
        "not ",
        "or ",
        "。",
        "//a@",
        "\x1b[",
        "prove ",
    ),
)


def judged(verdict, head, text):
    judge = JudgeComponent(urls=("http://127.0.0.1:1/v1",), model="judge", verdict=verdict)
    with contextlib.suppress(ValueError):
        JudgeReward(judge)._verdict(head + text.replace("\n", " "))


def record(text):
    return RewardRecord("", (), text, np.arange(3), "stop", "7")


READERS = {
    **{f"style {style}": partial(extract_answer, style=style) for style in ("dapo", "boxed", "r1", "gsm8k", "auto")},
    "last number": partial(extract_answer, style="last_number"),
    "code": extract_code,
    "output of a program": lambda text: prints_the_same(text, text[::-1], 1e-6),
    "language": lambda text: LanguageReward("en").score([record(text)]),
    "format": lambda text: R1FormatReward().score([record(f"<think>{text}</think> <answer>{text}</answer>")]),
    "judge's line": partial(judged, "line", ""),
    "judge's score": partial(judged, "line", "**Score"),
    "judge's object": lambda text: judged("json", "", 3 * text),  # Of which the last 10,000 characters are read.
    "question to a judge": lambda text: filled(DEFAULT_TEMPLATE, record(text), text),
    "completion": lambda text: read_completion(None, {"choices": [{"message": {"content": text}}]}),
    "thoughts": opened_thought,
    "several answers": gold_answers,
    "endpoint's words": one_line,
    "engine's words": engine_line,
    "samples": lambda text: examples_as_markdown([Example(text, text, text, True, text)]),
    "page": partial(code_block, limit=None),
    "credentials": without_credentials,
    "votes": lambda text: count_votes([text, text + "x", None], [False] * 3),
    "language of a problem": lambda text: _COMMAND.sub(" ", _FORMULA.sub(" ", text)),
    "letters of a problem": lambda text: integer_answer("list", [1, 2], text),
    "whole number": integer_of,
    "choice": multiple_choice,
    "true or false": lambda text: true_or_false(text, text),
    "proof": proof,
    "normal text": normal_text,
}


def test_text_of_a_model_costs_at_most_in_proportion_to_its_length():
    cases = [(name, piece) for name in READERS for piece in PIECES]
    grown = growing_too_fast(
        lambda case, text: READERS[case[0]](text),
        cases,
        lambda case, length: case[1] * (length // len(case[1])) + "x",
        length=5_000,
    )
    assert grown == {}
