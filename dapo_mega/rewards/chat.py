"""Questions to a language model over OpenAI's chat completions: texts put into a template, and what came back."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dapo_mega.rewards.thoughts import split

CHAT_PATH = "/chat/completions"

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def fill(template: str, value: Callable[[str], str]) -> str:
    """The template with each `{name}` replaced by `value(name)`, all at once: what stands in a text that is put in
    stays as it is. `{{` and `}}` are braces, and braces around anything but a name are left alone."""
    return _PLACEHOLDER.sub(lambda found: found[0][0] if found[1] is None else value(found[1]), template)


def boundary(*texts: str) -> str:
    """A mark to put around texts of others: whoever writes one of them cannot know a mark that depends on all."""
    digest = hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:16]
    return f"=== {digest} ==="


@dataclass(frozen=True)
class Completion:
    """What a model said, without the thoughts before it and white space around it, and whether it ended at
    max_tokens."""

    text: str
    cut_off: bool


def read_completion(request: object, answer: Any) -> Completion:
    """The completion in a server's answer. Raises ValueError for what is no chat completion."""
    try:
        choice = answer["choices"][0]
        content = choice["message"]["content"]
        cut_off = choice.get("finish_reason") == "length"
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError(f"the answer is no chat completion: {answer!r}") from None
    if content is not None and not isinstance(content, str):
        raise ValueError("the content of the answer's message is not text")
    return Completion(split(content or "", at_start=True)[0].strip(), cut_off)
