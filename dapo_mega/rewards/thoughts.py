"""The tags that enclose a model's thoughts, and what a text says outside of them.

Everything that reads tags asks here, with the tag that the prompt has opened in front of the response.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

_NAMES: Final = (
    *("think", "thinking", "thought", "thoughts", "reasoning", "reason", "scratchpad"),
    *("seed:think", "mm:think", "longcat_think", "ifm|think", "ifm|think_fast", "ifm|think_faster"),
)
# Opening tag: what ends the thought. Tags of SGLang's reasoning parsers, and those of Solar, OpenThinker and TRL's
# examples. In gpt-oss' format every channel but the last, `final`, is thought or tools.
_ENDS: Final[dict[str, tuple[str, ...]]] = {
    **{f"<{name}>": (f"</{name}>",) for name in _NAMES},
    "[think]": ("[/think]",),
    "◁think▷": ("◁/think▷",),
    "<|think|>": ("<|/think|>", "</|think|>", "<|content|>"),
    "<|begin_of_thought|>": ("<|end_of_thought|>",),
    "<|start_thinking|>": ("<|end_thinking|>",),
    "<|inner_prefix|>": ("<|inner_suffix|>",),
    "<|channel>thought": ("<channel|>",),
    "<|channel|>analysis<|message|>": ("<|channel|>final<|message|>",),
    "<|channel|>commentary<|message|>": ("<|channel|>final<|message|>",),
}
CLOSING: Final = tuple({end for ends in _ENDS.values() for end in ends})


def _any_of(tags: Sequence[str]) -> str:
    return "|".join(map(re.escape, sorted(tags, key=len, reverse=True)))


_TAG: Final = re.compile(_any_of([*_ENDS, *CLOSING]), re.IGNORECASE)
# In text that may speak of tags, one opens a thought where a line or a speaker's words begin, or where the text ends.
_BEGINS: Final = re.compile(
    rf"(?:^|[\n:>\]|｜▷])[ \t]*(?P<first>{_any_of(list(_ENDS))})|(?P<last>{_any_of(list(_ENDS))})\s*\Z", re.IGNORECASE
)


def split(text: str, opening: str = "", *, at_start: bool = False) -> tuple[str, str, bool]:
    """What is said after the last thought that ended; the opening tag of the thought that the text ends in, which hides
    all that follows it; and whether a thought ended in the text.

    `opening` is the tag of a thought that the text begins in. A closing tag without an opening one ends a thought that
    began before the text. With `at_start` a thought begins only where nothing was said before it: elsewhere the text
    may speak of tags. Linear in the text.
    """
    start, end, closed, is_said = 0, 0 if opening else len(text), False, False
    for tag in _TAG.finditer(text):
        name = tag[0].lower()
        if name in CLOSING:
            if not opening or name in _ENDS[opening.lower()]:
                opening, start, end, closed, is_said = "", tag.end(), len(text), True, False
        elif not opening and not is_said:
            is_said = at_start and bool(text[start : tag.start()].strip())
            if not is_said:
                opening, end = tag[0], tag.start()
    return text[start:end], opening, closed


def spoken(response: str) -> str:
    """The response after its thoughts; of a thought that never ends, what comes before it."""
    return split(response)[0] if any(map(response.__contains__, "<[\u25c1")) else response


def opened_thought(prompt: str, messages: Sequence[Mapping[str, str]] = (), problem: str = "") -> str:
    """The opening tag of the thought that a prompt's text ends in; empty where it opens none.

    What counts is what the template has put behind the last of `messages`, or without such behind the `problem`: a
    user may speak of tags.
    """
    after, is_last_found = 0, False
    for message in messages:
        content = message["content"].strip()
        found = prompt.find(content, after)
        is_last_found = found >= 0
        after = found + len(content) if is_last_found else after
    if is_last_found and prompt[after:].strip():
        return split(prompt[after:])[1]
    text, problem = prompt, problem.strip()
    if problem and problem != prompt.strip():
        text = text[text.find(problem) + len(problem) :] if problem in text else text
    ends = [tag.end() for tag in _TAG.finditer(text) if tag[0].lower() in CLOSING]
    begins = _BEGINS.search(text, ends[-1] if ends else 0)
    return (begins["first"] or begins["last"]) if begins else ""


def is_part_of_tag(token: str) -> bool:
    """Whether a token that tokenizers leave out of text belongs to a tag, as Magistral's and gpt-oss' do."""
    return any(token.lower() in tag for tag in (*_ENDS, *CLOSING))
