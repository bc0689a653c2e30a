r"""Find the answer in a response that keeps to no format, and say by which of its statements it was found.

One response makes one statement of its answer, the last one: answer tags, else whichever comes later of an answer line
(`Answer: 5`, `the final answer is 5`, `#### 5`) and the last box, else the last formula or number. Boxes of one
sentence are one list, so that stating several values never counts as stating the right one. What stands inside of a
thought, and a box or thought that never ends, states nothing.
"""

import re
import unicodedata
from typing import Final

from dapo_mega.rewards import denials, prose
from dapo_mega.rewards.bounds import MAX_ANSWER_CHARACTERS
from dapo_mega.rewards.formulas import (
    BOX,
    PERCENT,
    Span,
    find_boxes,
    find_formulas,
    joined_formulas,
    listed,
    listed_boxes,
)
from dapo_mega.rewards.signs import OTHER_DIGITS, PARTS_OF_ONE
from dapo_mega.rewards.thoughts import spoken

# Where a cue may begin. A pattern that begins with a set of characters, here what stands before a word, is searched for
# many times as fast as the cues themselves.
_CUE_BEGINS: Final = (
    r"(?=[aAcCfFhHIjJnNoOrRsSwWоО])(?:[aA](?i:ns(?:wer|(?![a-z]))|ntw|ctually)|[rR](?i:éponse|[ei]sp)|[wW](?i:ait)"
    r"|[oO](?i:dpowied|ops|n sec)|[оО](?i:твет)|[cC](?i:evap|orr)|[jJ](?i:awaban)|[sS](?i:varet|orr|cratch)"
    r"|[hH](?i:mm|old on)|[nN][oO](?=[,.:!…—\s])|I(?i: take)|[fF](?i:inal))"
)
_MAY_BE_CUE = re.compile(f"[^a-zA-Z]{_CUE_BEGINS}")
_MAY_BE_OTHER_CUE = re.compile(f"[^a-zA-Z](?:{_CUE_BEGINS}|(?<=[答解정답اउ]))")
# `Answer:`, `**Final answer**`, `the answer is`.
_CUE = re.compile(
    r"(?i)(?-i:(?=[aArRоОcCjJsSoO]))(?<![a-z])(?P<word>answers?|ans|réponse|respuesta|antwort|antwoord|resposta|risposta"
    r"|ответ|cevap|jawaban(?:nya)?|svaret|odpowied[źz])(?![a-z])(?P<between>[\"”]?[^\n.:;=$\\\"“”]{0,60}?)"
    r"(?P<mark>[:=：]|(?<![a-z])(?:is|are|was|es|est|ist|é|è|är|adalah)(?![a-z])[ \t]*:?|(?<=[*_])[ \t]*(?=\n|$)"
    r"|(?<=[ \t])[-–—→](?=[ \t]))"
    r"|(?P<heading>(?:^|\n)[#*_ \t]{0,6}final[ \t]+(?:answer|result)[#*_ \t]{0,6}(?=\n|$))"
    # `Actually, no, it is 43.`
    r"|(?-i:(?=[aAwWhHoOnNsScCI]))(?<![a-z])"
    r"(?P<second>(?:actually|wait|hmm+|oops|no|sorry|correction|hold on|I take that back|scratch that"
    r"|on second thought)[,.:!…—]*\s"
    r"(?:(?:no|actually|wait|sorry|so)[,.!…]*\s){0,2}"
    r"(?:(?:that|this|it)(?:['’]s| is) (?:wrong|incorrect|not (?:right|correct))[.,;:!]*\s)?"
    r"(?:(?:it|that|this|I|the (?:correct|right) (?:one|value))\s?)?"
    r"(?:is|['’]s|should (?:have been|be)|must be|meant|mean)\s(?=[*(]{0,3}[0-9$\\-]))"
    r"|(?-i:(?=[答解정답اउ]))(?P<chinese>(?:答案|答え|解答)[ \t]*(?:是|为|為|は|:|：)"
    r"|[答답]\s?[:：]|정?답은|(?:الجواب|الإجابة|الاجابة)(?: النهائي[ة]?)?(?: (?:هو|هي))?|उत्तर)"
)
# GSM8K's marks: of its calculator, `9*60=<<9*60=540>>540`, and of its answers, `#### 66` alone on a line.
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")
_HASHES = re.compile(r"(?:^|\n)[ \t]*#{4,}[ \t]*(?P<value>[+-]?\$?[0-9][0-9,./]{0,40}[ \t]?%?)[ \t]*(?=\n|$)")
# The instruction said again: `Answer: $Answer (without quotes) where $Answer is the answer to the problem`.
_ECHO = re.compile(
    r"(?i)\$?answer(?!\s?[:=0-9]|[a-z])|(?:the (?:final )?answer(?: to the (?:problem|question))?(?: is)?\W*)+$"
    r"|[\"'”’.,;:-]{1,3}$"
)
# `"16." Share that`, and no list of such.
_QUOTED = re.compile(
    r"(?:[\"“]([^\"“”\n]{1,80}?)[.,!?]?[\"”]|'([^'\n]{1,80}?)[.,!?]?')(?![a-zA-Z0-9]|,?\s?(?:(?:or|and)\s)?[\"“'0-9])"
)
_MARKUP = "*_#`> \t"
_DENIED_CUE = re.compile(r"(?i)n['’]t|n['’]est|(?<![^\W_])(?:not|never|no|não|non|не)(?![^\W_])")
_CHECKED = re.compile(r"(?i)(?:check|verif|confirm|test)[^.\n]*$")
_OTHER_DENIAL = re.compile(r"(?i)(?:nicht|pas|niet|не|não|non)\s|不是|并非")
# `the incorrect answer is 5`, `to find the answer, we add 5 + 11 = 16`
_WRONG, _TERMS = re.compile(r"(?i)(?:wrong|incorrect)[ \t]$"), re.compile(r"[0-9][^0-9]+[0-9]")
_CORRECTED = re.compile(
    r"(?i)not(?![a-z])[^.]{0,40}?(?:[,;—-]\s*(?:but|it is|it's|rather|instead)|(?<![a-z])but)\s(?P<rest>.*)"
)
# What ends an answer and is no part of it, marks of what was checked among it.
_ENDS: Final = ".,;: 。．।，；：！!✓✔☑✅"
# Each run of white space is tried once, from its beginning: a text of nothing else must cost linear time.
_ASIDE = re.compile(
    r",\s+(?:(?!(?:and|or)\s)[a-zA-Z]{2,}|i\.e|[0-9]+\s+(?:of|in|for|are|were|from)\s)|[;:]\s+(?=[^\n]*[a-zA-Z]{2})|(?!或)[\u0400-\u1fff\u3040-\u9fff\uac00-\ud7af]"
    r"|(?<=[a-z])\s+(?:in|with|on|by|across|among|and\sno)\s|(?<=[a-z]),\s+or\s"
    r"|(?<!\s)(?:\s+(?:and\s+not\s|(?:altogether|in\s(?:total|all)|overall|where|when|while|as|for|from|after)\s|-\s+[a-zA-Z]{2,}|\((?=[^()\\]*[a-zA-Z]{3}|or\s|=|i\.e))|\s*[\u2014\u2013]\s)"
)
# Words of other scripts, and the short ones of this.
_OTHER_WORDS = re.compile(
    r"[^\W\d_a-zA-Z\u0370-\u03ff]{2}|[\u0370-\u03ff]{3}|(?i:(?<![a-z\\])(?:no|so|it|is|we|he|if|my)(?![a-z]))"
)
# `It will be a Saturday`, `still 10`, `B 选项`.
_INTRODUCED = re.compile(
    r"(?i)^(?:it (?:will be|would be|is|was) (?:an? |the )?"
    r"|(?:(?:is|still|indeed|therefore|thus|simply|actually)[,:]? )+)|^([A-J])[ \t]*(?:选项|项)$"
)
_UNDECIDED = re.compile(r"(?i)(?:correct|incorrect|right|wrong|unclear|not)(?![a-z])")
_DIGIT = re.compile(r"[0-9]")
_PROSE = re.compile(r"(?<![a-zA-Z0-9])[a-zA-Z]{3,}")
_COMMAND = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname)\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[a-z*]+\}|\\[a-zA-Z]+")

_CONCLUSION = re.compile(
    r"(?i)(?<![a-z])(?:is|are|so|thus|hence|therefore|then|total|answer|gives?|which|but|actually|wait|hmm|no)(?![a-z])|[.!?]\s"
)
# What changes the number before it.
_PART_OF_NUMBER = re.compile(
    r"(?i)_(?:[0-9]+|\{[^{}\n]{1,20}\})|[ \t]?[ap]\.?m(?![a-z])"
    r"|(?:[ \t](?:hundred|thousand|million|billion|trillion|dozen)(?![a-z]))+"
)
_SPELT = re.compile(rf"[a-zA-Z\-]+[ \t]\((?P<number>{prose.NUMBER_IN_LIST})\)")
_OTHER_DIGIT = re.compile(f"[{''.join(OTHER_DIGITS)}]")
_OTHER_DIGITS = str.maketrans(OTHER_DIGITS)
_LAST_WORDS: Final = 4_000
_NO_DIGITS: Final = "".join(chr(code) for code in range(128) if not chr(code).isdigit())
# How long the last number may be with the spaces in it. Only where it does not count are the others looked for.
_LONGEST_NUMBER: Final = 40
# No answer needs a line as long as a hostile one.
_LONGEST_LINE: Final = 2_000
_CHOICE = re.compile(
    r"(?:选项?|选择)[ \t]*(?P<chinese>[A-J])(?![a-zA-Z])"
    r"|\((?P<bracketed>[A-J])\)|\*\*(?P<bold>[A-J])\*\*|(?<![a-zA-Z'])(?P<bare>[A-H])(?=[.,:;!?)。，]|\s*$|\s+(?:is|must)\s)"
)
# Another choice beside it: `either B or C`.
_CHOICE_BEFORE = re.compile(r"(?<![a-zA-Z])\(?[A-J]\)?(?:,\s*|\s+)(?:(?:or|and|nor)\s+)?[(*]*$")


def tagged(text: str, *, must_close: bool) -> str | None:
    """Content of the last `<answer>` tags. One that was opened last may lack its end where it need not close."""
    start = text.rfind("<answer>")
    if start < 0:
        return None
    content, closed, _ = text[start + len("<answer>") :].partition("</answer>")
    return content if closed or not must_close else None


def find_answer(response: str) -> str | None:
    """The answer that a response states, as it is written there; None where there is none."""
    text = spoken(response)
    if "<<" in text:
        text = _CALCULATOR.sub("", text)
    if not text.isascii() and _OTHER_DIGIT.search(text):
        text = text.translate(_OTHER_DIGITS)
    if not text.isascii():
        text = PARTS_OF_ONE.sub(
            lambda part: (
                " " * (part.start() > 0 and text[part.start() - 1].isdigit())
                + unicodedata.normalize("NFKC", part[0]).replace("\u2044", "/")
            ),
            text,
        )
    if denials.is_withdrawn(text):
        return None
    content = tagged(text, must_close=False)
    if content is not None:
        return _inside(content)
    stated = _stated(text)
    answer = _balanced(stated or (_last_value(text) if not BOX.search(text) else None) or "")
    return answer if answer and not _ECHO.match(answer) and (stated or prose.is_carried_out(answer)) else None


def _balanced(answer: str) -> str:
    """An answer without closing brackets and a `$` at its end that belong to the text around it: `4` of `4)`."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return answer
    answer = answer[:-1].rstrip() if answer.endswith("$") and answer.count("$") % 2 else answer
    while answer.endswith((")", "}")) and sum(map(answer.count, ")}]")) > sum(map(answer.count, "({[")):
        answer = answer[:-1].rstrip()
    return answer


def _inside(content: str) -> str | None:
    """The answer in a tag: what it states, else all of it."""
    content = content.strip().rstrip("。．！")
    if (
        len(content) <= MAX_ANSWER_CHARACTERS
        and not _PROSE.search(_COMMAND.sub("", content))
        and "\\box" not in content
    ):
        return content or None
    if stated := _stated(content):
        return stated
    return content if len(content) <= MAX_ANSWER_CHARACTERS and not find_formulas(content) else _last_value(content)


def _stated(text: str) -> str | None:
    boxes = find_boxes(text)
    if boxes is None:
        # The last box never ends: the response was cut off in its answer.
        return None
    last_box = boxes[-1].end if boxes else -1
    marks = list(_HASHES.finditer(text, max(0, last_box))) if "####" in text else []
    for cue in reversed(_cues(text, max(0, last_box))):
        if (marks and cue.start() < marks[-1].start()) or (cue["mark"] == "=" and _TERMS.search(cue["between"])):
            break
        answer = _after_cue(text, cue, has_box=bool(boxes))
        if answer and not _ECHO.match(answer):
            return answer
    if marks:
        return marks[-1]["value"]
    if not boxes or not boxes[-1].content.strip():
        return None
    return listed(listed_boxes(text, boxes)) or None


def _cues(text: str, start: int) -> list[re.Match[str]]:
    cues: list[re.Match[str]] = []
    begins = [start]
    for found in (_MAY_BE_CUE if text.isascii() else _MAY_BE_OTHER_CUE).finditer(text, start):
        if found[0][1:2] in "fF":
            begins.append(text.rfind("\n", max(0, found.start() - 6), found.start() + 1))
        begins += found.start(), found.start() + 1
    for begin in begins:
        if begin >= start and (cue := _CUE.match(text, begin)):
            cues.append(cue)
            start = cue.end()
    return cues


def _after_cue(text: str, cue: re.Match[str], *, has_box: bool) -> str | None:
    start = cue.end()
    if has_box and ("," in (cue["between"] or "") or _CHECKED.search(text[max(0, cue.start() - 40) : cue.start()])):
        return None
    if (cue["mark"] or "") in ("-", "–", "—", "→") and cue["between"].strip(_MARKUP):
        return None
    if _WRONG.search(text, max(0, cue.start() - 12), cue.start()):
        return None
    if (cue["between"] and _DENIED_CUE.search(cue["between"])) or denials.is_doubted(text[max(0, start - 70) : start]):
        return None
    while start < len(text) and (text[start] in _MARKUP or text[start] in "}\r\n:："):
        start += 1
    line = _line(text, start)[:_LONGEST_LINE]
    sentence = _first_sentence(line)
    if not sentence.strip(_MARKUP + ".,;:$"):
        return None
    if corrected := _CORRECTED.match(sentence):
        sentence = corrected["rest"]
    sentence = prose.restated(prose.without_asides(sentence))
    formulas = find_formulas(sentence)
    if formulas and denials.is_denied(sentence, formulas[-1].start, formulas[-1].end):
        del formulas[-1]
        if not formulas:
            return None
    if formulas:
        return joined_formulas(sentence, formulas)
    plain = sentence.strip(_MARKUP).rstrip(_ENDS).strip(_MARKUP).lstrip("≈~=, ")
    if spelt := _SPELT.match(plain):
        plain = spelt["number"]
    if cue["chinese"]:
        plain = plain.lstrip("一共有总计是")
    plain = _INTRODUCED.sub(r"\1", plain)
    if (quoted := _QUOTED.match(plain)) and not denials.is_denied_after(plain, quoted.end()):
        plain = quoted[1] or quoted[2]
    if _OTHER_DENIAL.match(plain):
        return None
    if cue["chinese"] and _DIGIT.search(plain) and not prose.NUMBER.match(plain) and _OTHER_WORDS.search(plain):
        return _last_value(plain)
    is_certain = cue["mark"] in (":", "=") or cue["heading"] is not None or cue["chinese"] is not None
    if number := prose.NUMBER.match(plain):
        if denials.is_denied_after(plain, number.end()):
            return None
        # What follows a number is about it: `72, so she has enough`, `72 (6 dozen)`.
        rest = plain[number.end() :]
        plain = (number.group() + rest[: aside.start()] if (aside := _ASIDE.search(rest)) else plain).replace("**", "")
    if has_box and _PROSE.search(_COMMAND.sub("", plain)) and not (is_certain and number):
        return None if _DIGIT.search(plain) or not is_certain else plain[:MAX_ANSWER_CHARACTERS]
    if _DIGIT.search(plain) or (not _PROSE.search(plain) and not has_box):
        return plain[:MAX_ANSWER_CHARACTERS]
    if _UNDECIDED.match(plain) or (not is_certain and (has_box or len(plain) > 60)):
        return None
    return plain if len(plain) <= MAX_ANSWER_CHARACTERS else None


def _line(text: str, start: int, *, may_go_on: bool = True) -> str:
    """The line from there on; a displayed formula belongs to it as a whole, and what follows a colon at its end."""
    for opening, closing in (("\\[", "\\]"), ("$$", "$$"), ("\\begin{", "\\end{")):
        if text.startswith(opening, start):
            end = text.find(closing, start + len(opening))
            end = len(text) if end < 0 else end + len(closing)
            rest = text.find("\n", end)
            return text[start : len(text) if rest < 0 else rest]
    end = text.find("\n", start)
    line = text[start : len(text) if end < 0 else end]
    if may_go_on and line.rstrip().endswith((":", " is", " are")) and len(line) < 300 and end >= 0:
        following = end
        while following < len(text) and text[following].isspace():
            following += 1
        if following < len(text):
            return line + " " + _line(text, following, may_go_on=False)
    return line


def _first_sentence(line: str) -> str:
    formulas = find_formulas(line)
    for stop in re.finditer(r"(?<!i\.e)[.!?](?=\s+[A-Z(\[]|\s*$)|\s(?=(?:I hope|because|since)\s)", line):
        if not any(formula.start <= stop.start() < formula.end for formula in formulas) and not (
            stop.start() <= 2 and line[: stop.start()].strip("(*").isalpha()
        ):
            return line[: stop.start()]
    return line


def _result(text: str) -> re.Match[str] | None:
    """What the last line computes: 26 of `it grows 13 * 2 = 26 inches in 13 years`."""
    equals = text.rfind("=", text.rstrip().rfind("\n") + 1)
    if equals < 0 or _CONCLUSION.search(text, equals):
        return None
    return prose.NUMBER.match(text, len(text) - len(text[equals + 1 :].lstrip()))


def _last_outside(text: str, numbers: list[re.Match[str]], formulas: list[Span]) -> re.Match[str] | None:
    """The last number that stands in no formula and is not taken back."""
    outside = (
        n
        for n in reversed(numbers)
        if not any(f.start < n.end() <= f.end for f in formulas[-50:])
        and not denials.is_taken_back(text, n.start(), n.end())
    )
    return next(outside, None)


def _last_value(text: str) -> str | None:
    """The last formula or number, whichever comes later; else a choice's letter."""
    whole = text.strip(" \t\r\n✓✔☑✅").strip("*#").strip().lstrip("=>∴→⇒ ").rstrip("。．！")
    is_short = 0 < len(whole) <= 100 and "\n" not in whole and not _OTHER_WORDS.search(whole)
    if is_short and not _PROSE.search(_COMMAND.sub("", whole)) and not find_formulas(whole):
        numbers = list(prose.NUMBER.finditer(whole))
        is_denied_number = bool(numbers) and denials.is_denied(whole, numbers[-1].start(), numbers[-1].end())
        return None if is_denied_number or re.fullmatch(r"[A-Z]+[0-9]+[A-Z]+", whole) else whole
    if denials.gave_up(text):
        return None
    if none := denials.concluded_none(text):
        return yes["yes"] if (yes := prose.YES_OR_NO.search(text, max(0, len(text) - 100))) else none
    text = prose.without_asides(text)
    formulas = find_formulas(text)
    if not formulas and "**" in text[-50:] and (word := prose.WORD_IN_BOLD.search(text, max(0, len(text) - 100))):
        return word["bold"]
    if formulas and denials.is_taken_back(text, formulas[-1].start, formulas[-1].end):
        if not prose.NUMBER.search(text, formulas[-1].end):
            text = text[: formulas[-1].start]
        formulas = formulas[:-1]
    near = max(0, text.rfind(" ", 0, max(0, len(text.rstrip(_NO_DIGITS)) - _LONGEST_NUMBER)), len(text) - _LAST_WORDS)
    numbers = list(prose.NUMBER.finditer(text, near))
    last_number = _last_outside(text, numbers, formulas)
    if last_number is None and near and (not formulas or formulas[-1].end < near):
        numbers = list(prose.NUMBER.finditer(text, max(0, len(text) - _LAST_WORDS)))
        last_number = _last_outside(text, numbers, formulas)
    if formulas and (last_number is None or formulas[-1].end >= last_number.end()):
        return joined_formulas(text, formulas)
    if (
        last_number
        and text.rstrip()[-40:].split()[-1][:1].isupper()
        and (name := prose.NAME_AT_END.search(text, max(0, len(text) - 100)))
    ):
        return name["name"]
    if last_number is not None and (several := prose.several_at(text, last_number.end())):
        return several
    if numbers and (said := prose.said_at_end(text)):
        return said
    if last_number is not None:
        last_number = _result(text) or last_number
        percent = PERCENT.match(text, last_number.end())
        tail = _PART_OF_NUMBER.match(text, last_number.end())
        after = tail.group() if tail else "%" if percent else prose.unit_at(text, last_number.end())
        return (prose.value_at(text, last_number) + after).strip()
    said_choices = _CHOICE.finditer(text, max(0, len(text) - _LAST_WORDS))
    choices = [choice for choice in said_choices if not denials.is_denied(text, choice.start(), choice.end())]
    if not choices:
        return prose.word_at_end(text)
    start = choices[-1].start()
    return None if _CHOICE_BEFORE.search(text[max(0, start - 20) : start]) else choices[-1][choices[-1].lastgroup or 0]
