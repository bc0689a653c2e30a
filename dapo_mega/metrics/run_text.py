"""What a run writes besides numbers: its configuration, its versions, and samples of evaluations."""

import contextlib
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

EXAMPLES_TAG = "samples/evaluation"
"""The name under which samples of evaluations are shown."""

_MAX_CHARACTERS = 4000
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
# Control characters but newlines and tabs; markers of writing direction, with which a text can hide parts of itself;
# halves of surrogate pairs, which no file can hold.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class RunDescription:
    """Of a run's start: its name, the versions of its packages, its configuration as nested values and as text, the
    values of the configuration that decide what is learnt, by dotted name, and a text that shows prompts."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    hyper_parameters: Mapping[str, bool | float | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    prompts: str = ""


@dataclass(frozen=True)
class Example:
    """One response of an evaluation."""

    prompt: str
    response: str
    ground_truth: str
    is_correct: bool | None
    answer: str | None = None


def without_credentials(value: Any) -> Any:
    """The value, with `user:password@` of every address in it replaced by `***@`."""
    if isinstance(value, str):
        return _CREDENTIALS.sub("***@", value)
    if isinstance(value, Mapping):
        return {key: without_credentials(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(inner) for inner in value]
    return value


def code_block(text: str, limit: int | None = _MAX_CHARACTERS) -> str:
    """Any text as Markdown that shows it as it is: no line of it is taken for Markdown or HTML. `limit` as for
    `shortened`; None: show all of it."""
    shown = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text if limit is None else shortened(text, limit))
    return "\n".join(f"    {line}" for line in shown.splitlines()) or "    "


_VERDICTS = {True: ": correct", False: ": wrong", None: ""}


def examples_as_markdown(examples: Sequence[Example]) -> str:
    """The examples under one another, long texts cut in the middle."""
    return "\n\n".join(
        f"### {number}{_VERDICTS[example.is_correct]}\n\n"
        f"prompt\n\n{code_block(example.prompt)}\n\nresponse\n\n{code_block(example.response)}\n\n"
        f"answer found, ground truth\n\n{code_block(f'{example.answer}{chr(10)}{example.ground_truth}')}"
        for number, example in enumerate(examples, start=1)
    )


def shortened(text: str, limit: int = _MAX_CHARACTERS) -> str:
    """The text, its middle left out if it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide results, where they are installed."""
    names = ("dapo_mega", "torch", "megatron-core", "transformers", "transformer-engine", "numpy", "math-verify")
    return {"python": platform.python_version(), **installed_versions(names)}


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of these packages that are installed, by name."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
