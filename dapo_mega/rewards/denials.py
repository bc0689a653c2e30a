"""What takes a value in a text back: it is denied, doubted, or only a bound (`not 42`, `more than 42`, `42 or so`)."""

import re
from typing import Final

# Both look for small letters only, in what begins with a space. A pattern that heeds the case and begins with a set of
# characters, here what stands before a word, is searched for many times as fast.
_DENIAL = re.compile(
    r"[\W_不并ไ](?:(?:not|never|cannot|nor|neither|anything but|(?:wrong|incorrect) answer is|rather than|instead of"
    r"|between(?:[ \t][0-9.]{1,12}[ \t]and)?|nicht|pas|no es|não é|non è|не|(?<=n['’])t|(?<=不)(?:是|等于|会是|可能是?)"
    r"|(?<=并)非|(?<=ไ)ม่ใช่)"
    r"(?:[ \t]+(?:be|been|equals?|to|the|a|exactly|simply|just|only|possibly|really|actually|even|have)(?![a-z])){0,3}"
    r"[\s$*({\[\\]*$)"
)
_DENIED_AFTER = re.compile(
    r"[\s$)*]{0,5}(?:\((?:wrong|incorrect|rejected|not)(?![a-z])|(?:is|was|are)(?:[ \t]+not|n['’]t"
    r"|[ \t]+(?:wrong|incorrect|impossible|invalid|too|extraneous|excluded|rejected|ruled)(?![a-z]))"
    r"|would[ \t]be[ \t](?:wrong|incorrect)|(?:cannot|can['’]t|fails|does[ \t]?n(?:ot|['’]t))(?![a-z])"
    r"|(?:[a-z]{1,12}[ \t]){0,3}(?:this|it|that)[ \t]"
    r"(?:cannot|can['’]t|fails|(?:is|was)[ \t](?:not[ \t]|im)possible)(?![a-z])"
    r"|ではな|ではあり|이?\s?아니|이?\s?아닙|नहीं|değil)"
)
# What denies all that the sentence says behind it: `it is not the case that the answer is 42`.
_DOUBT = re.compile(
    r"[^a-z](?:(?:not (?:the case|true|correct)|false|(?<!no )doubt|impossible (?:that|to|for)|no way|no one|nobody"
    r"|none of|suppos\w{1,4}|assum(?:e|ed|es|ing)|imagine|pretend|any(?:thing|where)|somewhere"
    r"|if(?=[^.,;:!?\n]*(?<![a-z])(?:answer|were|was)(?![a-z]))|angenommen|supongamos"
    r"|(?:not|cannot|(?<=n['’])t) (?:think|believe))(?![a-z])[^.,;:!?\n]{0,40}$"
    r"|(?:(?<=假)[设如]|(?<=如)果|(?<=[若设]))[^.,;:!?\n，。；：]{0,20}$)"
)
_NEGATIVE: Final = (
    "no", "'t", "’t", "nev", "nei", "any", "rather", "instead", "betw", "nich", "pas", "não", "не", "不", "并非", "ไม่",
    "fals", "doubt", "impos", "suppos", "assum", "imagin", "pretend", "somewh", "if", "angenom", "supong", "假", "如果",
    "若", "设", "wrong", "incorrect",
)  # fmt: skip
# What a text concludes that finds no answer, behind all values: `so there is no solution`, `which is a contradiction`.
_CONCLUDED_NONE = re.compile(
    r"(?i)(?:^|[.,;:!?—\n]\s*|(?<![a-z])(?:but|so|hence|thus|therefore|and)\s)"
    r"(?:(?!(?:since|because|for|if|when|as|unless|otherwise|other|except)(?![a-z]))[a-z'’]{1,15},?\s){0,7}?"
    r"(?:(?P<solution>no\s(?:(?:such|real|integer|valid|possible|positive)\s){0,2}(?:solution|answer|root)s?)"
    r"(?:\s(?:exists?|works?|(?:to|in|of)\s[^.,;:!?0-9$\n]{1,40}))?|there\s(?:is|are)\snone"
    r"|no\ssuch\s\S{1,20}(?:\s(?:exists?|works?|is\spossible))?|(?P<absent>do(?:es)?(?:\snot|n['’]t)\sexist)"
    r"|(?:cannot|can['’]t)\s(?:exist|be\s(?:done|solved|achieved|right|true))|a\scontradiction|which\sis\sfalse"
    r"|(?:is|['’]s|are)\s(?:(?P<word>impossible|undefined)|absurd|inconsistent|not\s(?:possible|so|the\scase))"
    r"|(?:it|this|that)\s(?:fails|is\snot|isn['’]t|does\snot|doesn['’]t)(?:\swork)?)\W{0,5}$"
    r"|[?;]\s{1,3}(?:no|impossible)\W{0,5}$"
    r"|(?:^|[.,;:!?，。；：\n])[^.,;:!?0-9$，。；：\n]{0,40}(?:无解|无实数?解|没有(?:实数)?解|不存在|矛盾|不可能"
    r"|pas de solution|keine Lösung|no hay soluci[óo]n|não há solução|нет решени[йя])"
    r"[^.,;:!?0-9$，。；：\n]{0,20}\W{0,5}$"
)
_NO_MARKS: Final = (
    " no ", "\nno ", " no.", " no!", " not", "n't", "n’t", "cannot", "can't", "can’t", "impossib", "undefined",
    "absurd", "inconsisten", "contradict", "false", "fails", "none", "pas de", "keine", "não há", "нет", "无", "没有",
    "不", "矛盾",
)  # fmt: skip
# What makes a value in prose a bound, a guess, or what something else is compared with.
_COMPARED = re.compile(r"(?:more|less|fewer|[a-z]{3,8}er|other) than(?:[ \t]+[^\W\d_]+(?:['’]s?)?){0,3}$")
_BOUNDS = (
    *("≤", "≥", "≠", "<=", ">=", " at least", " at most", " over", " under", " above", " below", " nearly"),
    " not exceeding",
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
    r"[iIwW](?i:(?<![a-z][\s\S])(?:(?:(?<=i)|(?<=w)e)"
    r"(?:[ \t](?:do|could|can|am|was|were)(?:[ \t]?not)?|[ \t](?:do|could|ca)n['’]t)?[ \t]"
    r"(?:not[ \t]|un)?(?:know|determine|solve|find|answer|able|sure|certain)"
    r"|(?<=i)['’]m[ \t](?:not[ \t]|un)(?:sure|certain|able))(?![a-z]))"
)
_WITHDRAWN = re.compile(
    r"(?i)(?<![a-z])(?:wait|hold on|hmm+|actually|oops|no|sorry)[,.:!…—]*\s[^.!?\n]{0,30}"
    r"(?:this|that|it)(?:['’]s|\s(?:is|was))\s(?:also\s)?(?:wrong|incorrect|not\s(?:right|correct)|a\smistake)\W*(?:(?:so\s)?there\s(?:is|are)\sno\s(?:solution|answer)s?\W*)?$"
)
# The end of a response that was cut off in a sentence.
_CUT_OFF: Final = (
    " and", " or", " the", " of", " so", " we", " that", " with", " because", " if", " then", " is", " are", " to",
    " an", " but", " let me", " which", " since", " from", " by", " hence", " thus", " therefore",
    " =", " +", " -", " *", " /", " \u00d7",
)  # fmt: skip
_NOT = re.compile(r"(?i)not|n['’]t|un(?:able|sure|certain)")
_LAST_WORDS = 120


def is_denied(text: str, start: int, end: int) -> bool:
    """Whether what stands there is said not to be the answer: `not 42`, `it can't be 42`, `42 is wrong`."""
    before = text[max(0, start - 70) : start].casefold()
    # The searches cost more than all the rest, so parts of what they find are looked for first.
    if any(map(before.__contains__, _NEGATIVE)) and (_DENIAL.search(" " + before[-40:]) or is_doubted(before)):
        return True
    return is_denied_after(text, end)


def is_doubted(before: str) -> bool:
    """Whether a text ends in a sentence that denies what follows."""
    return bool(_DOUBT.search(" " + before.casefold()))


def is_taken_back(text: str, start: int, end: int) -> bool:
    """Whether what stands there in prose is denied, or no more than a bound: `more than 42`, `42 or so`."""
    before = " " + text[max(0, start - 40) : start].rstrip(" \t\n$*({[\\为是有").casefold()
    return (
        before.endswith(_BOUNDS)
        or (before[-1] in "<>" and bool(_SMALLER_OR_LARGER.search(before[-6:])))
        or (" than" in before and bool(_COMPARED.search(before)))
        or is_denied(text, start, end)
        or bool(_BOUND_AFTER.match(text, end))
    )


def is_denied_after(text: str, end: int) -> bool:
    """Whether what ends there is denied behind it: `42 is wrong`."""
    return bool(_DENIED_AFTER.match(text, end))


def is_withdrawn(text: str) -> bool:
    """Whether a text ends in taking back what it said: `hmm, wait, this is wrong`."""
    end = text[-_LAST_WORDS:]
    return any(map(end.__contains__, ("wrong", "correct", "right", "mistake"))) and bool(_WITHDRAWN.search(end))


def concluded_none(text: str) -> str | None:
    """What a text concludes at its end that finds no answer, in few words: `no solution`; None where it does not."""
    end = text[-_LAST_WORDS:]
    # The search costs more than all the others, so what every conclusion holds is looked for first.
    found = _CONCLUDED_NONE.search(end) if any(map((" " + end[-60:].casefold()).__contains__, _NO_MARKS)) else None
    if found is None:
        return None
    return found["solution"] or ("does not exist" if found["absent"] else found["word"] or "none")


def gave_up(text: str) -> bool:
    """Whether a text ends in saying that it has no answer, `I cannot determine it`, or in the middle of a sentence."""
    end = text[-_LAST_WORDS:]
    return end.rstrip(" \n\t$*").endswith(_CUT_OFF) or (
        any(map(end.__contains__, ("not", "n't", "n’t", "un")))
        and any(_NOT.search(said.group()) for said in _GAVE_UP.finditer(end))
    )
