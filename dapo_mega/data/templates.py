r"""Prompt templates, which turn a problem into the text of the prompt.

`dapo` is the paper's; `r1` and `qwen_math` are those compared by Dr. GRPO (arXiv 2503.20783). `qwen_math` holds the
instruction only: the chat markup around it comes from the tokenizer with `chat_template: true`. `as_is` adds
nothing; it is the one for datasets that bring their instruction along, such as DAPO-Math-17k, whose `prompt` column
already holds the `dapo` text (its bare problem is in `extra_info.raw_problem`). `bare` and `none` add nothing either,
and say that no instruction is wanted.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dapo_mega.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBLEM = "{problem}"

TEMPLATES: Mapping[str, str] = {
    "dapo": (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
    "qwen_math": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "r1": (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {problem}\nAssistant: <think>"
    ),
    "bare": PROBLEM,
    "as_is": PROBLEM,
    "none": PROBLEM,
}

Message = Mapping[str, str]
"""One turn of a conversation: `role` and `content`."""


def template_text(template: str) -> str:
    """The text of a named template, or `template` itself where it contains {problem}; else `InputError`."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    if PROBLEM in template:
        return template
    near = difflib.get_close_matches(template, TEMPLATES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(TEMPLATES)}"
    raise InputError(f"template {template!r} is neither a known name nor a text containing {PROBLEM}; {hint}")


def render(template: str, problem: str) -> str:
    """`problem` put into a template (a name or a text containing {problem}), every other brace left alone.

    Raises `InputError` for an unknown template and for a problem that already stands in this one, which would ask
    the policy with the instruction twice.
    """
    text = template_text(template)
    before, after = (part.strip() for part in (text.partition(PROBLEM)[0], text.rpartition(PROBLEM)[2]))
    stripped = problem.strip()
    if (before or after) and stripped.startswith(before) and stripped.endswith(after):
        raise InputError(
            f"the prompt already contains the text of template {template[:40]!r} and would be wrapped twice; "
            f"set template=as_is, or columns.prompt to the column with the bare problem"
        )
    return text.replace(PROBLEM, problem)


def as_messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt column's value as conversation turns: text is one user turn; lists hold {role, content} records.

    {from, value} records are read too. Raises `InputError` for anything else and for a conversation without a user.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise InputError(f"a prompt must be text or a list of messages, got {type(prompt).__name__}")
    messages = [_as_message(turn) for turn in prompt]
    if all(message["role"] != "user" for message in messages):
        raise InputError("the list of messages has no message with role user; add one")
    return messages


def render_prompt(prompt: Any, template: str, chat_tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """The text given to the policy for one value of the prompt column, see `render_messages`."""
    return render_messages(templated_messages(prompt, template)[1], chat_tokenizer)


def templated_messages(prompt: Any, template: str) -> tuple[str, list[dict[str, str]]]:
    """The problem, which is the last user turn of a prompt column's value, and all turns, that one in the template."""
    messages = as_messages(prompt)
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    problem = messages[last_user]["content"]
    messages[last_user]["content"] = render(template, problem)
    return problem, messages


def render_messages(messages: Sequence[Message], chat_tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """The text given to the policy for these turns.

    With `chat_tokenizer` they go through its chat template and end where the answer starts; without it their contents
    are joined by newlines.
    """
    if chat_tokenizer is None:
        return "\n".join(message["content"] for message in messages)
    if chat_tokenizer.chat_template is None:
        raise InputError("chat_template=true, but the tokenizer has no chat template; set it to false")
    return str(chat_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _as_message(turn: Any) -> dict[str, str]:
    if isinstance(turn, Mapping):
        for role, content in (("role", "content"), ("from", "value")):
            if isinstance(turn.get(role), str) and isinstance(turn.get(content), str):
                speaker = {"human": "user", "gpt": "assistant"}.get(turn[role], turn[role])
                return {"role": speaker, "content": turn[content]}
    raise InputError("a message must be a record with role and content (or from and value), both text")
