"""Templates that the library `renderers` knows (an extra of this package), behind the protocol of dialogues."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dapo_mega.data.conversations import named
from dapo_mega.data.inert_text import CUT, InertEncoder
from dapo_mega.data.templates import chat_text, render_messages
from dapo_mega.data.tokenizer import decoder
from dapo_mega.environments.dialogues import (
    CALLED,
    USER,
    Dialogue,
    Messages,
    TemplateDialogue,
    answer,
    stand_in,
    with_texts,
)
from dapo_mega.environments.markup import Read, call_of
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RenderersDialogue(Dialogue):
    """What the library `renderers` knows of a model's template. It reads special tokens out of messages: they are cut
    in two before."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Messages = ()) -> None:
        self.tools = list(tools)
        self._tokenizer = tokenizer
        self._decode = decoder(tokenizer)
        self._encoder = InertEncoder(tokenizer)
        self._renderer = self._chosen()

    def opening(self, row_messages: Messages, messages: Messages) -> list[int]:
        row = self._render(row_messages, False)
        text = render_messages(row_messages, self._tokenizer, self.tools, add_generation_prompt=False)
        if row != self._encoder.ids(text):
            raise InputError("the library renderers writes another prompt than the tokenizer's chat template")
        ids = self._inert(row, messages, lambda shown: self._render([*row_messages, *shown], True))
        if ids is None:
            raise InputError("the library renderers changes a row's prompt where the messages of `reset` follow it")
        return ids

    def whole(self, messages: Messages) -> list[int]:
        ids = self._inert([], messages, lambda shown: self._render(shown, True))
        if ids is None:
            raise InputError("the library renderers reads control tokens out of these messages")
        return ids

    def with_tools(self, tools: Messages) -> Dialogue:
        other = copy.copy(self)
        other.tools = list(tools)
        other._renderer = other._chosen()
        return other

    def read(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Read:
        return _read(self._renderer, self.tools, prompt_ids, sampled_ids)

    def extend(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], messages: Messages, history: Messages = ()
    ) -> list[int] | None:
        prompt, sampled = [int(i) for i in prompt_ids], [int(i) for i in sampled_ids]

        def bridged(shown: Messages) -> list[int]:
            bridge = self._renderer.bridge_to_next_turn(prompt, sampled, shown, tools=self.tools or None)
            return [] if bridge is None else list(bridge.token_ids)

        return self._inert([*prompt, *sampled], messages, bridged)

    def _render(self, messages: Messages, add_generation_prompt: bool) -> list[int]:
        ids = self._renderer.render_ids(
            list(messages), tools=self.tools or None, add_generation_prompt=add_generation_prompt
        )
        return list(ids)

    def _chosen(self) -> Any:
        """The renderer of the model's name, or else the first that writes what the chat template writes."""
        known = [[USER], [USER, answer(), USER], *([[USER, answer([CALLED]), CALLED]] if self.tools else [])]
        for is_named, renderer in _candidates(self._tokenizer, self._encoder):
            self._renderer = renderer
            with contextlib.suppress(Exception):
                if is_named or all(map(self._writes, known)):
                    return renderer
        raise InputError(
            f"the library renderers has none that writes what the chat template of {self._tokenizer.name_or_path} "
            f"writes; use another template, or dialogue: auto, or history: template"
        )

    def _writes(self, messages: Messages) -> bool:
        """Whether the renderer writes what the template does."""
        text = chat_text(messages, self._tokenizer, self.tools, True)
        return self._render(messages, True) == self._encoder.ids(text)

    def _inert(self, before: list[int], messages: Messages, make: Callable[[Messages], list[int]]) -> list[int] | None:
        """What `make` adds for these messages, if it has no more control tokens than for harmless ones."""
        given = [named(message) for message in messages]
        cut = [with_texts(message, self._encoder.cut_markers) for message in given]
        harmless = [stand_in(message) for message in given]
        expected = self._encoder.controls(make(harmless)[len(before) :])
        for shown in (cut, given):  # Some renderers, as gpt-oss', do not read special tokens, thus not the cuts.
            ids = make(shown)
            added = ids[len(before) :]
            kept = [i for i in added if i != self._encoder.cut]
            if (
                ids[: len(before)] == before
                and added
                and self._encoder.controls(kept) == expected
                and CUT not in self._encoder.tokenizer.decode(kept)
            ):
                return kept
        return None


class ReadByRenderers(TemplateDialogue):
    """A chat template that may rewrite, whose turns the library `renderers` reads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Messages = ()) -> None:
        problem = InputError(f"the library renderers has none for the tokens of {tokenizer.name_or_path}")
        encoder = InertEncoder(tokenizer)
        opened = chat_text([USER], tokenizer, tools, True).removeprefix(chat_text([USER], tokenizer, tools, False))
        for _, renderer in _candidates(tokenizer, encoder):
            self._renderer = renderer
            for self._opening in ([], encoder.ids(opened)):  # gpt-oss's needs what the template wrote of the turn.
                try:
                    super().__init__(tokenizer, tools, may_rewrite=True)
                    return
                except InputError as error:
                    problem = error
        raise problem

    def read(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Read:
        return _read(self._renderer, self.tools, prompt_ids, [*self._opening, *sampled_ids])


def _candidates(tokenizer: PreTrainedTokenizerBase, encoder: InertEncoder) -> Iterator[tuple[bool, Any]]:
    """Renderers for these tokens, and whether it is the one of the model's name."""
    try:
        import renderers.base
        import renderers.configs
    except ImportError as error:
        raise InputError(
            f"dialogue: renderers needs a library; pip install 'dapo_mega[renderers]' ({error})"
        ) from error
    name = renderers.base.MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    renderers.base._populate_registry()
    for kind in [name] if name else [kind for kind in renderers.base.RENDERER_REGISTRY if kind != "default"]:
        renderer = None
        with contextlib.suppress(Exception):  # A renderer for other tokens fails in ways of its own.
            config = renderers.configs._config_class_for(kind)(thinking_retention="all")
            renderer = renderers.create_renderer(encoder.tokenizer, config)
        if renderer:
            yield bool(name), renderer


def _read(renderer: Any, tools: Messages, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> Read:
    prompt, sampled = [int(i) for i in prompt_ids], [int(i) for i in sampled_ids]
    parsed = renderer.parse_response(sampled, tools=list(tools) or None, prompt_ids=prompt)
    calls: list[dict[str, Any]] = []
    for call in parsed.tool_calls:
        problems = {"ok": "", "unknown_tool": "", "unclosed_block": "unclosed", "missing_name": "no_name"}
        problem = problems.get(str(call.status), "bad_json")
        calls.append(call_of(len(calls), call.name, call.arguments, problem) | ({"id": call.id} if call.id else {}))
    return Read(parsed.content, parsed.reasoning_content or "", calls)
