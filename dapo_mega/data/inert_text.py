"""Text of messages as tokens that control nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT: Final = "<|cut-of-dapo-mega|>"

Pieces = Sequence[tuple[str, bool]]
"""Text in pieces, and whether each is a message's."""


class InertEncoder:
    """Encodes text of which only the template's own markers may be control tokens: special tokens, and others added to
    the vocabulary that the template writes, as Qwen3's <tool_response>. Its tokenizer has one more: where others stand
    in a message, they are cut in two by it, and its ids are left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, only_special: bool = False) -> None:
        """`only_special`: tokens that are not special, as Qwen3's <think>, are left to messages."""
        from transformers import AddedToken

        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer.add_tokens(AddedToken(CUT, special=True, normalized=False), special_tokens=True)
        self.cut = int(self.tokenizer.convert_tokens_to_ids(CUT))
        template = str(tokenizer.chat_template)
        added = self.tokenizer.added_tokens_decoder.items()
        names = {
            i: token.content for i, token in added if token.special or (not only_special and token.content in template)
        }
        self.control = {name: i for i, name in names.items() if name.strip() and self.ids(name) == [i]}
        self._controls = frozenset(self.control.values())
        self._lengths = sorted({len(name) for name in self.control}, reverse=True)
        self._first = re.compile("|".join({re.escape(name[0]) for name in self.control}) or r"\Z.")
        self._mark = CUT if CUT in self.control else ""  # A tokenizer that reads no special tokens needs none.

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def controls(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self._controls]

    def found(self, text: str) -> Iterator[tuple[int, str]]:
        """Where the text spells control tokens, also where these overlap."""
        for first in self._first.finditer(text):
            at = first.start()
            for length in self._lengths:
                if text[at : at + length] in self.control:
                    yield at, text[at : at + length]
                    break

    def parts(self, pieces: Pieces) -> tuple[list[str], list[int]]:
        """The text of pieces (text, whether it is a message's), cut within each control token that a message spells,
        be it in part; and the control tokens that are left."""
        text = "".join(piece for piece, _ in pieces)
        is_shown = b"".join(bytes([shown]) * len(piece) for piece, shown in pieces)
        cuts, own, end = [0], [], 0
        for at, marker in self.found(text):
            if at < end:
                continue
            if any(is_shown[at : at + len(marker)]):
                cuts.append(at + 1)
            else:
                own.append(self.control[marker])
                end = at + len(marker)
        return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)], own

    def cut_markers(self, text: str) -> str:
        """The text, cut within each control token that it spells."""
        return CUT.join(self.parts([(text, True)])[0])

    def encode(self, pieces: Pieces) -> list[int]:
        """The ids of the whole text where messages spell no control token."""
        parts, own = self.parts(pieces)
        ids = [i for i in self.ids(self._mark + self._mark.join(parts)) if i != self.cut]
        if self.controls(ids) != own:  # A tokenizer that normalises text reads them out of other spellings too.
            each = [self._mark.join(piece) if shown else piece for piece, shown in pieces]
            ids = [i for i in self.ids(self._mark + self._mark.join(each)) if i != self.cut]
        return ids


def cut_special(messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[Mapping[str, str]]:
    """The messages of a dataset's row, cut by `CUT` within each special token that their contents spell."""
    spelt = _special(tokenizer)
    return [
        {**message, "content": _encoder(tokenizer).cut_markers(message["content"])}
        if spelt.search(message["content"])
        else message
        for message in messages
    ]


def cut_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a template's text around messages of `cut_special`."""
    encoder = _encoder(tokenizer)
    return [i for i in encoder.ids(text) if i != encoder.cut]


@lru_cache(maxsize=1)
def _special(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    names = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return re.compile("|".join(re.escape(name) for name in names if name.strip()) or r"\Z.")


@lru_cache(maxsize=1)
def _encoder(tokenizer: PreTrainedTokenizerBase) -> InertEncoder:
    return InertEncoder(tokenizer, only_special=True)
