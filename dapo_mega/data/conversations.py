"""Conversations to imitate: their messages as the chat template writes them, and which of the tokens are to be learnt.

A turn is learnt behind the prompt that the model would be given for it. A template that writes earlier turns otherwise
than they were said (Qwen3's drops their thinking) makes several sequences of a conversation; each turn is learnt once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from dapo_mega.data.inert_text import CUT, cut_ids, cut_special
from dapo_mega.data.numbers import plain
from dapo_mega.data.templates import as_message, chat_text, parsed, render_messages, written_messages
from dapo_mega.data.tokenizer import end_of_turn, stop_tokens, template_end
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
LossOn = Literal["all", "last"]

THINK_ENDS: Final = "</think>"
_THINK: Final = "<think>"
_SHOWN: Final = "shown-{}-there"
_THOUGHTS: Final = ("reasoning_content", "thinking")


@dataclass(frozen=True)
class Span:
    """Tokens that follow each other: what messages of these `roles` become, and whether they are in the loss."""

    roles: str
    token_ids: Sequence[int]
    in_loss: bool


@dataclass(frozen=True)
class Conversation:
    """`messages`, of which those from `first` on may be learnt, and the schemas of the `tools` that they may call."""

    messages: Messages
    tools: Messages = ()
    first: int = 0

    def turns(self, loss_on: LossOn) -> list[int]:
        """The messages to learn. Raises `InputError` where there are none."""
        found = [i for i, said in enumerate(self.messages) if i >= self.first and said["role"] == "assistant"]
        if not found:
            raise InputError("the conversation has no message of role assistant to learn; correct or remove the row")
        return found if loss_on == "all" else found[-1:]


class ConversationEncoder:
    """The tokens of conversations in the tokenizer's chat template. Text of other roles than the assistant's never
    becomes a special token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._thoughts = thought_keys(tokenizer)
        self._stops = set(stop_tokens(Path(str(tokenizer.name_or_path)), tokenizer))
        self._template_end = template_end(tokenizer)
        self._end = end_of_turn(tokenizer, chat_template=True)

    def spans(self, conversation: Conversation, loss_on: LossOn) -> list[list[Span]]:
        """The sequences of a conversation, one unless the template writes earlier turns otherwise. Raises `InputError`
        where it drops or alters what is said."""
        messages = [worded(message, self._thoughts) for message in conversation.messages]
        spoken = [m if m["role"] == "assistant" else cut_special([m], self._tokenizer)[0] for m in messages]
        turns, tools = conversation.turns(loss_on), conversation.tools
        self._check_shown(messages[: turns[-1]], tools)
        sequences: list[list[Span]] = []
        written: list[int] = []
        before = 0
        for turn in turns:
            asked = chat_text(spoken[:turn], self._tokenizer, tools, True)
            whole = chat_text(spoken[: turn + 1], self._tokenizer, tools, False)
            prompt, said = self._ids(asked), self._said(conversation.messages[turn], asked, whole)
            if not sequences or prompt[: len(written)] != written:
                sequences.append([])
                written, before = [], 0
            roles = ", ".join(message["role"] for message in messages[before:turn])
            sequences[-1] += [Span(roles, prompt[len(written) :], False), Span("assistant", said, True)]
            written, before = prompt + said, turn + 1
        return sequences

    def _ids(self, text: str) -> list[int]:
        if CUT in text:
            return cut_ids(text, self._tokenizer)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _said(self, message: Mapping[str, Any], asked: str, whole: str) -> list[int]:
        """The tokens of a turn behind its prompt, with the one token that ends it."""
        if not whole.startswith(asked):
            raise InputError(
                f"the chat template opens a turn with {asked[-40:]!r} and writes it otherwise, so nothing would learn "
                f"what follows the prompt; use another template, or rows of a prompt and the text of its response"
            )
        text = whole.removeprefix(asked)
        _refuse_unshown(message, text)
        ids = self._ids(text)
        ends = [place for place, i in enumerate(ids) if i in self._stops or i == self._template_end]
        if not ends:  # As GLM's, whose turns end with the next one's first token.
            return [*ids, self._end]
        rest = str(self._tokenizer.decode(ids[ends[-1] + 1 :])).strip()
        if rest or any(ids[place] in self._stops for place in ends[:-1]):
            raise InputError("a message of role assistant goes on behind a token that ends it; correct or remove it")
        return ids[: ends[-1] + 1]

    def _check_shown(self, messages: Messages, tools: Messages) -> None:
        """Raise `InputError` where the template does not show each message of other roles once, or the tools."""

        def shown(i: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
            is_said = message["role"] != "assistant" and message["content"].strip()
            return {**message, "content": _SHOWN.format(i)} if is_said else message

        text = render_messages([shown(*each) for each in enumerate(messages)], self._tokenizer, tools)
        refuse_dropped(messages, text, _SHOWN)


def refuse_dropped(messages: Messages, text: str, shown: str) -> None:
    """Raise `InputError` where a chat template's text does not have once what stands for each message."""
    for i, message in enumerate(messages):
        if message["content"].strip() and message["role"] != "assistant" and text.count(shown.format(i)) != 1:
            raise InputError(f"it drops, alters or moves what a message of role {message['role']} says")


def thought_keys(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The keys of a message under which the chat template looks for thoughts."""
    return [key for key in _THOUGHTS if re.search(rf"[.'\"]{key}\b", str(tokenizer.chat_template))]


def without_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without keys of thoughts."""
    return {key: value for key, value in message.items() if key not in _THOUGHTS}


def worded(message: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The message with thoughts where the template looks for them, or in its text."""
    found = named(message)
    if thought := found.pop("reasoning_content", ""):
        found |= dict.fromkeys(keys, thought)
        if not keys:
            found["content"] = f"{_THINK}\n{thought}\n{THINK_ENDS}\n\n{found['content']}"
    return found


def named(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with no markup in the name and id that a policy may have made up."""
    odd = {key: "unknown" for key in ("name", "tool_call_id") if not re.fullmatch(r"[\w.:-]*", message.get(key) or "")}
    return {**message, **odd}


def read_conversation(value: Any) -> list[dict[str, Any]]:
    """A column's value as messages, with the calls of tools, their results and thoughts: a list, or its JSON. Raises
    `InputError` for anything else."""
    turns = plain(written_messages(value) if isinstance(value, str) else value)
    if not isinstance(turns, list) or not turns:
        raise InputError(f"a conversation must be a list of messages, got {turns!r:.80}; correct or remove the row")
    return [_as_turn(turn) for turn in turns]


def is_conversation(value: Any) -> bool:
    """Whether a response is more than the text of one message."""
    turns = written_messages(value) if isinstance(value, str) else value
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return False
    return len(turns) > 1 or any(turn.get(key) for turn in turns for key in ("tool_calls", *_THOUGHTS))


def read_tools(value: Any) -> list[Mapping[str, Any]]:
    """A column's value as schemas of tools: a list, or its JSON. Raises `InputError` for anything else."""
    found = plain(parsed(value) if isinstance(value, str) and value.strip() else value or [])
    if not isinstance(found, list) or not all(isinstance(schema, Mapping) for schema in found):
        raise InputError(f"tools must be a list of schemas, or its JSON, got {value!r:.80}; correct the row")
    return found


def _as_turn(turn: Any) -> dict[str, Any]:
    """A message with what tools and templates need. Keys that are null, as parquet makes them, are left out."""
    if not isinstance(turn, Mapping):
        return as_message(turn)
    given = {key: value for key, value in turn.items() if value is not None}
    calls = [_as_call(call) for call in given.get("tool_calls", [])]
    message: dict[str, Any] = as_message({**given, "content": ""} if calls and "content" not in given else given)
    thought = next((given[key] for key in _THOUGHTS if given.get(key)), "")
    kept = {key: str(given[key]) for key in ("name", "tool_call_id") if given.get(key)}
    others = {"tool_calls": calls, "reasoning_content": thought}
    return message | kept | {key: value for key, value in others.items() if value}


def _as_call(call: Any) -> dict[str, Any]:
    """A call with arguments as a record, which parquet keeps as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise InputError(f"a call of a tool needs a name and arguments, a record or its JSON, got {call!r:.80}")
    own = {"id": call["id"]} if call.get("id") else {}
    return {**own, "type": "function", "function": {"name": name, "arguments": arguments}}


def _refuse_unshown(message: Mapping[str, Any], text: str) -> None:
    """Raise `InputError` where a template's text of a turn lacks what is said, thought or called there."""
    thought, found, said = message["content"].rpartition(THINK_ENDS)
    thought = message.get("reasoning_content") or (thought.partition(_THINK)[2] if found else "")
    calls = [("a call", str(call["function"]["name"])) for call in message.get("tool_calls", ())]
    for what, part in [("what is said", said), ("the thinking", thought), *calls]:
        if part.strip() not in text:
            raise InputError(
                f"the chat template does not show {what} in a turn of the assistant ({part.strip()[:60]!r}); use "
                f"another template, or correct or remove the row"
            )
