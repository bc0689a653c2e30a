"""Whether an answer equals the ground truth or another answer, and what a ground truth may be.

Model text is never given to `eval`, `exec`, `sympify` or `parse_expr`: math-verify is called with its LaTeX
grammar only, and only on text that `bounds` lets pass.
"""

import json
import re
from typing import Final

from dapo_mega.rewards.bounds import MAX_ANSWER_CHARACTERS, bound_violation
from dapo_mega.rewards.grading import Grader, gold_answers
from dapo_mega.rewards.normalization import canonical_latex

_PLAIN_INTEGER = re.compile(r"[+-]?[0-9]{1,100}")
_GRADER: Final = Grader()


def same_answer(first: str, second: str) -> bool:
    r"""Whether two answers of a model are the same: `1/2` and `0.5` are, and `(x+1)^2` and `x^2+2x+1`.

    Compares what the answers are (`grading`), either of them as the truth. What only computer algebra could decide,
    such as `\log_2 8` and `3`, counts as different, and so does an answer beyond `bounds` unless it is spelt alike: the
    answers of a whole evaluation are compared in the calling process, where nothing would end a slow comparison.
    """
    if first == second:
        return True
    if _PLAIN_INTEGER.fullmatch(first) and _PLAIN_INTEGER.fullmatch(second):
        return int(first) == int(second)
    if bound_violation(first) or bound_violation(second):
        return False
    return _GRADER.grade(first, second) is True or _GRADER.grade(second, first) is True


def validate_ground_truth(text: str) -> str:
    r"""The ground truth without surrounding white space, if answers can be compared with it; each one of a JSON list.

    Raises ValueError, with the text and the reason, for one that is empty or without letter or digit, has
    unbalanced braces, or exceeds `bounds`.
    """
    golds = gold_answers(text)
    if golds != (text,):
        return json.dumps([validate_ground_truth(gold) for gold in golds])
    stripped = text.strip()
    problem = bound_violation(stripped)
    if not stripped:
        problem = "it is empty"
    elif problem is None and not any(character.isalnum() for character in canonical_latex(stripped)):
        problem = "it holds no number, symbol or word"
    elif problem is None and not _is_balanced(stripped):
        problem = "its braces are not balanced"
    if problem is not None:
        shown = text if len(text) <= MAX_ANSWER_CHARACTERS else text[:MAX_ANSWER_CHARACTERS] + "..."
        raise ValueError(
            f"ground truth {shown!r} cannot be compared with answers: {problem}; allowed are integers, "
            f"decimals, fractions, LaTeX expressions and words of at most {MAX_ANSWER_CHARACTERS} characters"
        )
    return stripped


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in re.sub(r"\\[\\{}]", "", text):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    return depth == 0
