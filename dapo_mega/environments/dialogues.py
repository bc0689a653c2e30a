"""How messages become tokens between the turns of the policy, and how its turns are read.

Nothing that was sampled is encoded again: a dialogue gives only the tokens behind it. What it gives is what the chat
template writes behind a stand-in for the policy's turn, so a template that strips the thinking of earlier turns can be
used: the thinking stays where it was sampled, in the next turn's prompt as in training.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from dapo_mega.data.conversations import named, refuse_dropped, thought_keys, without_thoughts, worded
from dapo_mega.data.inert_text import CUT, InertEncoder
from dapo_mega.data.templates import chat_text, render_messages
from dapo_mega.data.tokenizer import Decode, decoder, stop_tokens
from dapo_mega.environments.markup import CALL, ENDS, THINK, Read, read_markup
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]

USER: Final = {"role": "user", "content": "question-to-answer"}
_ANSWER: Final = "answer-to-find"
_MARK: Final = "<|shown-"
_CONTENT: Final = _MARK + '"\\\n&é-{}|>'  # What a template escapes or takes apart is not found again.
CALLED: Final = {"role": "tool", "tool_call_id": "call00000", "name": "a_tool", "content": "result"}
_PLAIN: Final = "shown-{}-there"
_TAGS: Final = (*ENDS, *ENDS.values())
_ARGUMENTS: Final = {"key": ["value", 1]}
_MENDED: Final = "use another template, or dialogue: renderers"


class Dialogue(Protocol):
    """`tools` are the schemas that the prompt shows."""

    tools: Messages
    _decode: Decode

    @abstractmethod
    def opening(self, row_messages: Messages, messages: Messages) -> list[int]:
        """The tokens between the prompt of a row, which ends where its last message does, and the first sampled one:
        `messages` and the opening of the policy's turn."""

    @abstractmethod
    def whole(self, messages: Messages) -> list[int]:
        """The tokens of a conversation, with turns that the policy may not have written, and the opening of the next
        one. Raises `InputError` where the template refuses it."""

    @abstractmethod
    def with_tools(self, tools: Messages) -> Dialogue:
        """The same for prompts that show these tools. Raises `InputError` where they cannot be shown."""

    @abstractmethod
    def read(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Read:
        """What the policy did in the turn. No call is dropped: one that cannot be read has its `problem`."""

    @abstractmethod
    def extend(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], messages: Messages, history: Messages = ()
    ) -> list[int] | None:
        """The tokens between a turn and the next sampled token: the turn's close as far as it was not sampled,
        `messages`, and the opening of the policy's turn. None where what is before them is to be written otherwise;
        `history`, the conversation up to the turn, is given where the template says so."""

    def said(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> dict[str, Any]:
        """The policy's turn as a message. Calls of a turn in which one cannot be read are told as they were written."""
        read = self.read(prompt_ids, sampled_ids)
        if any(call["problem"] for call in read.calls):
            return {"role": "assistant", "content": self._decode([np.asarray(sampled_ids)])[0]}
        calls = [
            {"id": call["id"], "type": "function", "function": {key: call[key] for key in ("name", "arguments")}}
            for call in read.calls
        ]
        message = {"role": "assistant", "content": read.text, "tool_calls": calls, "reasoning_content": read.reasoning}
        return {key: value for key, value in message.items() if value or key == "content"}


class BareText(Dialogue):
    """For prompts without a chat template. No text of a message becomes a special token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Messages = ()) -> None:
        self.tools = tools
        self._tokenizer = tokenizer
        self._decode = decoder(tokenizer, _TAGS)

    def opening(self, row_messages: Messages, messages: Messages) -> list[int]:
        text = render_messages(messages)
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"]) if text else []

    def whole(self, messages: Messages) -> list[int]:
        """With the special tokens of the tokenizer, as prompts have them."""
        return list(self._tokenizer(render_messages(messages), split_special_tokens=True)["input_ids"])

    def with_tools(self, tools: Messages) -> Dialogue:
        if tools:
            raise InputError("prompts without a chat template show no tools; set chat_template: true for the data")
        return self

    def read(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Read:
        """All that was written is said too, with the markup of calls and the thinking."""
        (text,) = self._decode([np.asarray(sampled_ids)])
        return read_markup(text)._replace(text=text)

    def extend(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], messages: Messages, history: Messages = ()
    ) -> list[int]:
        return self.opening((), messages)


class TemplateDialogue(Dialogue):
    """Any chat template that appends, with calls as JSON between <tool_call> tags. Raises `InputError` for one that
    does not, when it is made; and for messages that it refuses or alters, when they come.

    A stop token or closing text that was sampled is not repeated. The token also takes the place of the one that the
    template would write.
    One that `may_rewrite` need not append: it is refused where it does not show what is said, or cannot be read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Messages = (), may_rewrite: bool = False) -> None:
        self._may_rewrite = may_rewrite
        self._thought_keys = thought_keys(tokenizer)
        self._tokenizer = tokenizer
        self._decode = decoder(tokenizer, _TAGS)
        self._encoder = InertEncoder(tokenizer)
        self._show(tools)

    def _show(self, tools: Messages) -> None:
        tokenizer, self.tools = self._tokenizer, tools
        asked = render_messages([USER], tokenizer, tools, add_generation_prompt=False)
        stops = stop_tokens(Path(str(tokenizer.name_or_path)), tokenizer)
        self._stops = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in stops}
        self._close = self._text([USER, answer()], False).rpartition(_ANSWER)[2]
        self._stops |= {self._encoder.control[marker]: marker for _, marker in self._encoder.found(self._close)}
        self._opens_thought = self._text([USER], True).removeprefix(asked).rstrip().endswith(THINK)
        self._check_reading()
        for kind, history, messages in _probes(bool(tools)):
            try:
                self.whole([*history, *messages]) if self._may_rewrite else self._pieces(history, messages)
            except InputError as error:
                mended = _MENDED + (", or keep thinking out" if "thinking" in kind else "")
                raise InputError(
                    f"the chat template of {tokenizer.name_or_path} cannot be continued with {kind}: {error}; {mended}"
                ) from error

    def opening(self, row_messages: Messages, messages: Messages) -> list[int]:
        row = self._text(row_messages, False)
        whole = self._text([*row_messages, *_shown(messages)], True)
        if not whole.startswith(row):
            raise InputError(
                f"the chat template of {self._tokenizer.name_or_path} changes a row's prompt where the messages of "
                f"`reset` follow it; let `reset` give none, {_MENDED}"
            )
        return self._encoder.encode(_split(whole.removeprefix(row), messages))

    def whole(self, messages: Messages) -> list[int]:
        plain = self._whole_text([self._worded(stand_in(message, i)) for i, message in enumerate(messages)])
        refuse_dropped(messages, plain, _PLAIN)
        expected = self._encoder.controls(self._encoder.ids(plain))
        for cut in (self._encoder.cut_markers, CUT.join):
            text = self._whole_text([self._worded(with_texts(message, cut)) for message in messages])
            ids = [i for i in self._encoder.ids(text) if i != self._encoder.cut]
            if self._encoder.controls(ids) == expected:
                return ids
        raise InputError("it makes control tokens of these messages")

    def with_tools(self, tools: Messages) -> Dialogue:
        other = copy.copy(self)
        other._show(tools)
        return other

    def read(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Read:
        (text,) = self._decode([np.asarray(sampled_ids)])
        return read_markup(THINK * self._opens_thought + text)

    def extend(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], messages: Messages, history: Messages = ()
    ) -> list[int] | None:
        try:
            shown = [self._worded(with_texts(message, self._encoder.cut_markers)) for message in (*history, *messages)]
            if not history or self._text(shown, True).startswith(self._text(shown[: len(history)], False)):
                return self._behind(sampled_ids, messages)
        except InputError:
            if not self._may_rewrite:
                raise
        return None

    def _behind(self, sampled_ids: Sequence[int], messages: Messages) -> list[int]:
        results = takewhile(lambda message: message["role"] == "tool", messages)
        (close, _), *pieces = self._pieces([USER, answer([named(result) for result in results])], messages)
        stop = self._stops.get(int(sampled_ids[-1])) if len(sampled_ids) else None
        if stop is not None:
            ends = [at + len(marker) for at, marker in self._encoder.found(close)]
            if stop in close or ends:
                close = close.partition(stop)[2] if stop in close else close[ends[0] :]
            else:  # The stop token may be the first of what follows, as GLM's <|user|>.
                pieces[0] = (pieces[0][0].removeprefix(stop), False)
        elif len(sampled_ids) and close.strip():  # Plain text that ends turns may have been sampled (rollout.stop).
            (text,) = self._decode([np.asarray(sampled_ids)])
            longest_first = range(len(close), len(close.rstrip()) - 1, -1)
            close = next((close[end:] for end in longest_first if text.endswith(close[:end])), close)
        return self._encoder.encode([(close, False), *pieces])

    def _text(self, messages: Messages, add_generation_prompt: bool) -> str:
        return chat_text(messages, self._tokenizer, self.tools, add_generation_prompt)

    def _pieces(self, history: Messages, messages: Messages) -> list[tuple[str, bool]]:
        """The close of the stand-in that ends the history and what the template writes behind it, in pieces; see
        `_split`. Raises `InputError` where it does not go on as it was, but for what is before the stand-in's text."""
        asked, before = self._text(history[:-1], False), self._text(history, False)
        whole = self._text([*history, *_shown(messages)], True)
        _, _, turn = before.rpartition(_ANSWER)
        _, found, after = whole.rpartition(_ANSWER)
        if not found or _ANSWER not in before:
            raise InputError("it does not show the policy's answer")
        if not (before.startswith(asked) and whole.startswith(asked) and turn.endswith(self._close)):
            raise InputError(f"it changes what is before the answer, or how this ends ({turn[-40:]!r})")
        if not after.startswith(turn):
            raise InputError(f"what follows changes the answer: it went on {turn[:80]!r}, now {after[:80]!r}")
        return [(self._close, False), *_split(after.removeprefix(turn), messages)]

    def _whole_text(self, messages: Messages) -> str:
        try:
            return self._text(messages, True)
        except InputError:  # gpt-oss's takes no thoughts beside what is said with a call.
            both = [bool(message.get("tool_calls") and message["content"]) for message in messages]
            if not any(both):
                raise
            shown = [
                without_thoughts(message) if is_both else message
                for message, is_both in zip(messages, both, strict=True)
            ]
            return self._text(shown, True)

    def _worded(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return worded(message, self._thought_keys)

    def _check_reading(self) -> None:
        asked = self._text([USER], True)

        def read(turn: Mapping[str, Any]) -> Read:
            written = self._text([USER, turn], False)
            text = written.removeprefix(asked)
            if text == written:  # It writes earlier turns otherwise.
                text = ENDS[THINK] * self._opens_thought + written[written.rfind(_ANSWER) :]
            return self.read(self._encoder.ids(asked), self._encoder.ids(text))

        if self._may_rewrite and (found := read(answer()).text).strip() != _ANSWER:
            raise InputError(
                f"the turns that the chat template of {self._tokenizer.name_or_path} writes cannot be read (it writes "
                f"{_ANSWER!r}, read is {found!r}); {_MENDED}"
            )
        if not self.tools:
            return
        written, calls = self._text([USER, answer([CALLED])], False), read(answer([CALLED])).calls
        if [(call["name"], call["arguments"]) for call in calls] != [(CALLED["name"], _ARGUMENTS)]:
            raise InputError(
                f"the chat template of {self._tokenizer.name_or_path} does not write calls as JSON between {CALL} and "
                f"{ENDS[CALL]} (it ends {written[-120:]!r}); {_MENDED}"
            )


def make_dialogue(
    kind: Literal["auto", "renderers"],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: bool,
    tools: Messages,
    history: Literal["sampled", "template"] = "sampled",
) -> Dialogue:
    """The dialogue of a run. Raises `InputError` where tokenizer and template do not allow it."""
    if kind == "renderers":
        if not chat_template:
            raise InputError("dialogue: renderers is for prompts with chat_template: true; set it, or dialogue: auto")
        from dapo_mega.environments.renderers_dialogue import ReadByRenderers, RenderersDialogue

        return ReadByRenderers(tokenizer, tools) if history == "template" else RenderersDialogue(tokenizer, tools)
    return TemplateDialogue(tokenizer, tools, history == "template") if chat_template else BareText(tokenizer, tools)


def with_texts(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The message with another text for each that somebody wrote: what is said, thought, and arguments of calls."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {change(str(key)): changed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [changed(each) for each in value]
        return change(value) if isinstance(value, str) else value

    def in_call(call: Mapping[str, Any]) -> dict[str, Any]:
        return {**call, "function": {**call["function"], "arguments": changed(call["function"]["arguments"])}}

    texts = {key: change(message[key]) for key in ("content", "reasoning_content") if message.get(key)}
    calls = {"tool_calls": [in_call(call) for call in message["tool_calls"]]} if message.get("tool_calls") else {}
    return {**message, **texts, **calls}


def stand_in(message: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """The message with texts that control nothing."""
    return with_texts(message, lambda text: _PLAIN.format(number) if text.strip() else text)


def _shown(messages: Messages) -> list[dict[str, Any]]:
    """The messages with stand-ins for what they say, between the white space around it."""
    shown = []
    for i, message in enumerate(messages):
        bare = message["content"].strip()
        content = message["content"].replace(bare, _CONTENT.format(i), 1) if bare else message["content"]
        shown.append(named(message) | {"content": content})
    return shown


def _split(text: str, messages: Messages) -> list[tuple[str, bool]]:
    """A text that holds the stand-ins in pieces (text, whether it is a message's). The first is the template's."""
    pieces = []
    for i, message in enumerate(messages):
        if bare := message["content"].strip():
            before, found, text = text.partition(_CONTENT.format(i))
            if not found:
                raise InputError(f"it drops, alters or moves what a message of role {message['role']} says")
            pieces += [(before, False), (bare, True)]
    if _MARK in text:
        raise InputError("it says a message twice")
    return [*pieces, (text, False)]


def answer(results: Messages = (), text: str = _ANSWER) -> dict[str, Any]:
    """A stand-in for the policy's turn, with the calls that have these results."""
    calls = [
        {
            "id": result.get("tool_call_id", ""),
            "type": "function",
            "function": {"name": result.get("name", ""), "arguments": _ARGUMENTS},
        }
        for result in results
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _probes(with_tools: bool) -> Iterator[tuple[str, Messages, Messages]]:
    """What is said next, the conversation before it, and its messages."""
    thinking = f"<think>\nthought\n</think>\n\n{_ANSWER}"
    more = {"role": "user", "content": "more-to-say"}
    user = "a message of the user after "
    yield user + "an answer", [USER, answer()], [more]
    yield user + "thinking", [USER, answer(text=thinking)], [more]
    yield user + "two answers", [USER, answer(text="earlier"), more, answer()], [more]
    if with_tools:
        tool, both = "a tool's result after ", [CALLED, {**CALLED, "tool_call_id": "call00001"}]
        yield tool + "a call", [USER, answer([CALLED])], [CALLED]
        yield "several tools' results", [USER, answer(both)], both
        yield tool + "thinking", [USER, answer([CALLED], thinking)], [CALLED]
        yield tool + "two calls", [USER, answer([CALLED], "earlier"), CALLED, answer([CALLED])], [CALLED]
        yield user + "a tool's", [USER, answer([CALLED], "earlier"), CALLED, answer()], [more]
