r"""Rules that tell problems that a comparison of answers cannot reward: choices, true or false, proofs, wrong types.

Every rule returns what it found, as evidence, or None.
"""

from __future__ import annotations

import re

from dapo_mega.preparation.normalization import DRAWING

_LABELS = "ABCDE"
_OPTION = re.compile(
    r"(?<![\w\\])\(\s*([A-E])\s*\)"  # (A)
    r"|\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?([A-E])\)?\s*[.:)]?\s*\}"  # \textbf{(A)}
    r"|(?:^|[\s$~])([A-E])(?:[.):](?=\s|\$|\\)|[\uff0e\uff1a\u3001])",  # A.  A)  A:
    re.MULTILINE,
)
_TRUE_FALSE_ANSWER = re.compile(r"\W*(?:\\(?:text|textbf|mathrm)\W*)?(true|false|yes|no)\W*", re.IGNORECASE)
_TRUE_FALSE_QUESTION = re.compile(
    r"\btrue\s+or\s+false\b|\b(?:say|state|decide|determine|answer)\s+(?:whether|if)\b[^.?!]{0,200}\b(?:true|false)\b",
    re.IGNORECASE,
)
_PROOF = re.compile(
    r"(?:^|[.!?:;,\n]|\b(?:and|then|also|please|\w\))\s)\s{0,20}(?:\W{0,4}|\(?\w\)\s{0,20})"
    r"((?:prove|show|demonstrate|verify|disprove)\s+(?:or\s+disprove\s+)?(?:that|the\s+(?:following|inequality|identity))\b)",
    re.IGNORECASE,
)
_PROOF_CHINESE = re.compile(r"证明|求证")
_ASKS = re.compile(
    r"\b(?:find|compute|calculate|evaluate|determine|solve|what|how\s+(?:many|much))\b|\?", re.IGNORECASE
)
_INTEGER = re.compile(r"[+-]?\d+(?:\.0+)?|[+-]?\d{1,3}(?:,\d{3})+")
_WRAPPED = re.compile(r"\\boxed\s*\{(.*)\}|\$+([^$]+)\$+|\\[(\[](.*)\\[)\]]", re.DOTALL)


def multiple_choice(problem: str) -> str | None:
    """The options, if at least three stand in the order of the alphabet, beginning with A."""
    expected = iter(_LABELS)
    wanted = next(expected)
    first = 0
    problem = DRAWING.sub(" ", problem)
    for option in _OPTION.finditer(problem):
        if next(group for group in option.groups() if group) == wanted:
            first = option.start() if wanted == "A" else first
            if wanted == "C":
                return _shown(problem[first:])
            wanted = next(expected)
    return None


def true_or_false(problem: str, answer: str) -> str | None:
    """The answer, if it is true, false, yes or no, or the sentence that asks for it."""
    if found := _TRUE_FALSE_ANSWER.fullmatch(answer):
        return f"the answer is {found[1]}"
    question = _TRUE_FALSE_QUESTION.search(problem)
    return _shown(question[0]) if question else None


def proof(problem: str) -> str | None:
    """The demand for a proof, if the problem asks for nothing else."""
    demand = _PROOF.search(problem)
    if demand and not _ASKS.search(problem):
        return _shown(problem[demand.start(1) :])
    chinese = _PROOF_CHINESE.search(problem)
    return _shown(problem[chinese.start() :]) if chinese else None


def integer_of(answer: str) -> str | None:
    """The whole number that an answer is, written with digits and a minus only: `27.0` and `27,000` are `27` and
    `27000`; None for any other answer."""
    text = answer.strip()
    while wrapped := _WRAPPED.fullmatch(text):
        text = next(group for group in wrapped.groups() if group is not None).strip()
    text = text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-").removesuffix(".")
    if not _INTEGER.fullmatch(text):
        return None
    sign = "-" if text.startswith("-") else ""
    digits = text.lstrip("+-").partition(".")[0].replace(",", "").lstrip("0") or "0"
    return "0" if digits == "0" else sign + digits


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:200] + " ..."
