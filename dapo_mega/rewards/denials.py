"""What takes a value in a text back: it is denied, doubted, or only a bound (`not 42`, `more than 42`, `42 or so`)."""

from __future__ import annotations

import re

_DENIAL = re.compile(
    r"(?i)(?-i:(?=[nNcCaApPrRiIbBнН不并ไ]))(?:n['’]t|(?<![^\W_])(?:not|never|cannot|nor|neither|anything but"
    r"|rather than|instead of|between(?:[ \t][0-9.]{1,12}[ \t]and)?|nicht|pas"
    r"|no es|não é|non è|не)|不是|并非|不等于|不会是|不可能是?|ไม่ใช่)"
    r"(?:[ \t]+(?:be|been|equal|to|the|a|exactly|simply|just|only)(?![a-z])){0,3}[\s$*({\[\\]*$"
)
_DENIED_AFTER = re.compile(
    r"[\s$)*]{0,5}(?:(?:is|was|are)(?:[ \t]+not|n['’]t"
    r"|[ \t]+(?:wrong|incorrect|impossible|invalid|too|extraneous)(?![a-z]))"
    r"|would[ \t]be[ \t](?:wrong|incorrect)|(?:cannot|can['’]t|fails|does[ \t]?n(?:ot|['’]t))(?![a-z])"
    r"|ではな|ではあり|이?\s?아니|이?\s?아닙|नहीं|değil)"
)
# What denies all that the sentence says behind it: `it is not the case that the answer is 42`.
_DOUBT = re.compile(
    r"(?i)(?:(?<![a-z])(?:not (?:the case|true|correct)|false|doubt)|(?:n['’]t|not) (?:think|believe))(?![a-z])"
    r"[^.,;:!?\n]{0,40}$"
)
# What makes a value in prose a bound, a guess, or what something else is compared with.
_COMPARED = re.compile(r"(?:more|less|fewer|[a-z]{3,8}er|other) than(?:[ \t]+[^\W\d_]+(?:['’]s?)?){0,3}$")
_BOUNDS = (
    *("≤", "≥", "≠", "<=", ">=", " at least", " at most", " over", " under", " above", " below", " nearly"),
    *(" almost", " close to", " maybe", " perhaps", " más de", " menos de", " más que", " menos que", " mais de"),
    *(" mais que", " plus de", " moins de", " plus que", " au moins", " au plus", " al menos", " pelo menos"),
    *(" ao menos", " mindestens", " höchstens", " mehr als", " weniger als", " più di", " meno di", " almeno"),
    *(" больше", " меньше", " более", " менее", " свыше", " أكثر من", " أقل من", " اكثر من", " اقل من"),
    *(" lebih dari", " kurang dari", " hơn", "大于", "小于", "多于", "少于", "超过", "不到", "不足", "至少", "至多"),
    *("不超过", "比", "มากกว่า", "น้อยกว่า"),
)
# No arrow, no end of a calculation (`<<12+30=42>>42`) or of a tag.
_SMALLER_OR_LARGER = re.compile(r"(?<![-=<>])[<>](?<!<[a-z]>)(?<!</[a-z]>)(?<!<[a-z]{2}>)(?<!</[a-z]{2}>)$")
_BOUND_AFTER = re.compile(
    r"[\s$)*]{0,5}(?:or[ \t](?:so|more|less|fewer|maybe|perhaps)|ish|से[ \t](?:अधिक|कम|ज़्यादा|ज्यादा))(?![a-z])"
    r"|[\s$)*]{0,5}[^\W\d_a-zA-Z]?[ \t]?(?:より|以上|以下|未満|이상|이하|보다|초과|미만)"
)
_GAVE_UP = re.compile(
    r"(?i)(?<![a-z])(?:(?:I|we)(?:[ \t](?:do|could|can|am|was|were)(?:[ \t]?not)?|[ \t](?:do|could|ca)n['’]t)?[ \t]"
    r"(?:not[ \t]|un)?(?:know|determine|solve|find|answer|able|sure|certain)"
    r"|I['’]m[ \t](?:not[ \t]|un)(?:sure|certain|able))(?![a-z])"
)
_NOT = re.compile(r"(?i)not|n['’]t|un(?:able|sure|certain)")
_LAST_WORDS = 120


def is_denied(text: str, start: int, end: int) -> bool:
    """Whether what stands there is said not to be the answer: `not 42`, `it can't be 42`, `42 is wrong`."""
    before = text[max(0, start - 70) : start]
    return bool(_DENIAL.search(before[-40:]) or is_doubted(before) or _DENIED_AFTER.match(text, end))


def is_doubted(before: str) -> bool:
    """Whether a text ends in a sentence that denies what follows."""
    return bool(_DOUBT.search(before))


def is_taken_back(text: str, start: int, end: int) -> bool:
    """Whether what stands there in prose is denied, or no more than a bound: `more than 42`, `42 or so`."""
    before = " " + text[max(0, start - 40) : start].rstrip(" \t\n$*({[\\").casefold()
    return (
        before.endswith(_BOUNDS)
        or bool(_SMALLER_OR_LARGER.search(before[-6:]))
        or (" than" in before and bool(_COMPARED.search(before)))
        or is_denied(text, start, end)
        or bool(_BOUND_AFTER.match(text, end))
    )


def is_denied_after(text: str, end: int) -> bool:
    """Whether what ends there is denied behind it: `42 is wrong`."""
    return bool(_DENIED_AFTER.match(text, end))


def gave_up(text: str) -> bool:
    """Whether a text ends in saying that it has no answer: `I cannot determine it`."""
    end = text[-_LAST_WORDS:]
    return any(mark in end for mark in ("not", "n't", "n’t", "un")) and any(
        _NOT.search(said.group()) for said in _GAVE_UP.finditer(end)
    )
