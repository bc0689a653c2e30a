r"""Prompt templates, which turn a problem into the text of the prompt.

`dapo` is the paper's; `r1` and `qwen_math` are those compared by Dr. GRPO (arXiv 2503.20783). `qwen_math` holds the
instruction only: the chat markup around it comes from the tokenizer with `chat_template: true`. `as_is` adds
nothing; it is the one for datasets that bring their instruction along, such as DAPO-Math-17k, whose `prompt` column
already holds the `dapo` text (its bare problem is in `extra_info.raw_problem`). `bare` and `none` add nothing either,
and say that no instruction is wanted.
"""

import ast
import contextlib
import copy
import difflib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dapo_mega.data.numbers import NOT_FINITE, NumberText
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

_BEGINS_AS_MESSAGES = re.compile(r"""[\s\ufeff]*(?:array\()?[\[{][\s\[{]*['"]\w+['"]\s*:""")
_MESSAGE_FIELDS = [(f"{q}{a}{q}", f"{q}{b}{q}") for q in "'\"" for a, b in (("role", "content"), ("from", "value"))]


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
    """A prompt column's value as conversation turns: text is one user turn; lists hold {role, content} records, also
    such a list that is written as JSON (or by Python's `str`) within a text.

    {from, value} records are read too. Raises `InputError` for anything else and for a conversation without a user.
    """
    if isinstance(prompt, NumberText) and prompt in NOT_FINITE:
        raise InputError(f"a prompt must be text or a list of messages, got {prompt}")
    turns = as_turns(prompt)
    if not isinstance(turns, Sequence) or not turns:
        kind = "null" if turns is None else type(turns).__name__
        raise InputError(f"a prompt must be text or a list of messages, got {kind}")
    messages = [as_message(turn) for turn in turns]
    if all(message["role"] != "user" for message in messages):
        raise InputError("the list of messages has no message with role user; add one")
    return messages


def as_turns(prompt: Any) -> Any:
    """The value of a prompt's column, where text is the list of one message that it stands for, or that it spells."""
    turns = written_messages(prompt) if isinstance(prompt, str) else prompt
    return [{"role": "user", "content": turns}] if isinstance(turns, str) else turns


def written_messages(text: str) -> Any:
    """The list of messages that a text spells, and the text if it spells none. Raises `InputError` for one that begins
    as such a list and cannot be read."""
    if text[:2] == '"[' and isinstance(inner := parsed(text), str):  # Written as JSON twice.
        return written_messages(inner) if _BEGINS_AS_MESSAGES.match(inner) else text
    if not (_BEGINS_AS_MESSAGES.match(text) and any(a in text and b in text for a, b in _MESSAGE_FIELDS)):
        return text
    bare = text.strip().strip("\ufeff").strip()
    if (found := parsed(bare)) is not None:
        return found if isinstance(found, list) else [found]
    if bare.startswith("{"):  # A problem about an object that looks so.
        return text
    raise InputError(
        f"the text begins as a list of messages ({text[:60]!r}), but it is neither JSON nor a Python list as a whole; "
        f"write the messages as JSON, or as a list in a JSON or parquet file"
    )


def refuse_shown_answer(messages: Sequence[Message]) -> None:
    """Raises `InputError` for turns after the last one of the user: a response that the policy would be shown."""
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for message in messages[last_user + 1 :]:
        if message["role"] not in ("system", "developer"):
            raise InputError(
                f"the messages go on after the last one of the user with one of role {message['role']!r} "
                f"({message['content'][:60]!r}), which would be shown to the policy as part of its prompt; end each "
                f"prompt with the user's message"
            )


def parsed(text: str) -> Any:
    """What a text says as JSON, or as Python writes values; None where it is neither."""
    for parse in (partial(json.loads, strict=False), ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return parse(text)
    return None


def response_text(value: Any) -> str:
    """The text to imitate: a response column's text, or what the assistant says in a list of one message."""
    turns = written_messages(value) if isinstance(value, str) else value
    if isinstance(turns, list) and turns and all(isinstance(turn, Mapping) for turn in turns):
        messages = [as_message(turn) for turn in turns]
        if [message["role"] for message in messages] != ["assistant"]:
            roles = ", ".join(message["role"] for message in messages) or "none"
            raise InputError(
                f"a response must be text or one message of role assistant, got messages of roles {roles}; put what "
                f"comes before the last one into the prompt"
            )
        turns = messages[0]["content"]
    if not isinstance(turns, str) or not turns or (isinstance(turns, NumberText) and turns in NOT_FINITE):
        given = "null" if turns is None else f"{turns!r:.80}"
        raise InputError(f"the response must be text and not empty, got {given}; correct or remove the row")
    return turns


def templated_messages(prompt: Any, template: str) -> tuple[str, list[dict[str, str]]]:
    """The problem, which is the last user turn of a prompt column's value, and all turns, that one in the template."""
    messages = as_messages(prompt)
    refuse_shown_answer(messages)
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    problem = messages[last_user]["content"]
    messages[last_user]["content"] = render(template, problem)
    return problem, messages


def render_messages(
    messages: Sequence[Mapping[str, Any]],
    chat_tokenizer: "PreTrainedTokenizerBase | None" = None,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """The text given to the policy for these turns.

    With `chat_tokenizer` they go through its chat template, with the schemas of `tools`, and end where the answer
    starts, or without the generation prompt behind the last turn; without it their contents are joined by newlines.
    Raises `InputError` where the template refuses them or does not show the tools.
    """
    if chat_tokenizer is None:
        return "\n".join(message["content"] for message in messages)
    if chat_tokenizer.chat_template is None:
        raise InputError("chat_template=true, but the tokenizer has no chat template; set it to false")
    text = chat_text(messages, chat_tokenizer, tools, add_generation_prompt)
    if tools and text == chat_text(messages, chat_tokenizer, [*tools, *tools], add_generation_prompt):
        raise InputError(
            f"the chat template of {chat_tokenizer.name_or_path} does not show tools: it writes the same prompt "
            f"for others; use a template that takes tools, or an environment without"
        )
    return text


def with_template_arguments(
    tokenizer: "PreTrainedTokenizerBase", arguments: Mapping[str, Any]
) -> "PreTrainedTokenizerBase":
    """The tokenizer, whose chat template is given these arguments wherever it is used; itself where there are none.

    Raises `InputError` for one that is set otherwise (messages, tools, tokenize), and for one that the template does
    not read, where its text says what it reads.
    """
    if not arguments or tokenizer.chat_template is None:
        return tokenizer
    own = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"} - {"documents"}
    if taken := sorted(own & arguments.keys()):
        raise InputError(f"template_arguments: {taken[0]} is not for you to set; remove it")
    read = _arguments_read(str(tokenizer.chat_template))
    if read is not None and (unknown := sorted(arguments.keys() - read)):
        known = ", ".join(sorted(read - own - {*tokenizer.special_tokens_map, "raise_exception", "strftime_now"}))
        raise InputError(
            f"template_arguments: the chat template of {tokenizer.name_or_path} does not read {unknown[0]}, but "
            f"{known or 'no arguments at all'}; correct or remove it"
        )
    other = copy.copy(tokenizer)
    setattr(other, "apply_chat_template", partial(tokenizer.apply_chat_template, **arguments))  # noqa: B010
    return other


def _arguments_read(template: str) -> set[str] | None:
    """The variables that a chat template reads and does not set; None where that cannot be told."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # A tag of transformers.
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)  # It renders nothing.
    try:
        return meta.find_undeclared_variables(environment.parse(plain))
    except TemplateSyntaxError:
        return None


def chat_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    tools: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
) -> str:
    """What the chat template makes of these turns. Raises `InputError` where it refuses them."""
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        roles, reason = ", ".join(message["role"] for message in messages), " ".join(str(error).split())[:200]
        raise InputError(
            f"the tokenizer's chat template refuses messages of the roles {roles} ({reason}); change the messages or "
            f"the template, or set chat_template=false"
        ) from error


def as_message(turn: Any) -> dict[str, str]:
    """A record of role and content, or of from and value, as a message. Raises `InputError` for anything else."""
    if isinstance(turn, Mapping):
        for role, content in (("role", "content"), ("from", "value")):
            if isinstance(turn.get(role), str) and isinstance(turn.get(content), str):
                speaker = {"human": "user", "gpt": "assistant"}.get(turn[role], turn[role])
                return {"role": speaker, "content": turn[content]}
    raise InputError("a message must be a record with role and content (or from and value), both text")
