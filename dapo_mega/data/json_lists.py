"""Reads the items of a large JSON list one at a time."""

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from dapo_mega.errors import InputError

_PIECE_CHARACTERS = 2**20
_MAX_ITEM_CHARACTERS = 2**26
_MAX_INDENT = 200
_AS_TEXT = json.JSONDecoder(parse_float=str, parse_int=str)
_WHITE_SPACE = re.compile(r"[ \t\r\n]*")


class RepeatedFieldError(json.JSONDecodeError):
    """A record has two fields of one name."""


def list_items(
    file: TextIO, name: str, decoder: json.JSONDecoder, piece_characters: int = _PIECE_CHARACTERS
) -> Iterator[Any]:
    """The items of the JSON list that `file` holds, which is read in pieces; in place of one that cannot be read its
    error. Memory: a piece and the largest item.

    Items go on behind a broken one at the next line that begins as that did. Raises `InputError` with `name` and the
    line where there is none, and for anything else.
    """
    buffer = _Buffer(file, name, piece_characters)
    buffer.take("[")
    if buffer.next_character() == "]":
        buffer.take("]")
    else:
        while True:
            try:
                item = buffer.value(decoder)
            except InputError as error:
                if not buffer.find_next():
                    raise
                yield error
                continue
            yield item
            if buffer.next_character() != ",":
                buffer.take("]")
                break
            buffer.take(",")
    if buffer.next_character():
        raise buffer.error("text after the list's end")


class _Buffer:
    def __init__(self, file: TextIO, name: str, piece_characters: int) -> None:
        self._piece_characters = piece_characters
        self._file = file
        self._name = name
        self._text = ""
        self._place = 0
        self._is_at_end = False
        self._num_lines = 1
        self._before = ""  # What stands before the place in its line, or the end of it.

    def next_character(self) -> str:
        """The next character that is no white space, not taken yet; empty at the end."""
        while True:
            space = _WHITE_SPACE.match(self._text, self._place)
            self._skip(len(space[0]) if space else 0)
            if self._place < len(self._text) or not self._read_on():
                return self._text[self._place : self._place + 1]

    def take(self, character: str) -> None:
        """Go on behind `character`, which must be the next one."""
        found = self.next_character()
        if found != character:
            raise self.error(f"{character!r} expected, found {found!r}" if found else "it ends within the list")
        self._skip(1)

    def value(self, decoder: json.JSONDecoder) -> Any:
        """The next JSON value."""
        self.next_character()
        while True:
            try:
                try:
                    value, end = decoder.raw_decode(self._text, self._place)
                except RepeatedFieldError as error:
                    value, end = error, _AS_TEXT.raw_decode(self._text, self._place)[1]
            except json.JSONDecodeError as error:
                if len(self._text) - self._place < _MAX_ITEM_CHARACTERS and self._read_on():
                    continue
                raise self.error(error.msg, error.pos) from error
            # A number may go on behind the end of the buffer, and `6.` is one that ends there.
            following = self._text[end : end + 1]
            if following in {",", "]"} or following.isspace() or not self._read_on():
                self._skip(end - self._place)
                return value

    def find_next(self) -> bool:
        """Go on at the next line that begins as that of the item here, which is broken; whether there is one."""
        if self._before.strip(" \t,["):
            return False
        start, place = f"\n{'' if '[' in self._before else self._before}{{", self._place + 1
        while (found := self._text.find(start, place)) < 0:
            self._skip(max(0, len(self._text) - self._place - len(start)))
            if not self._read_on():
                return False
            place = self._place
        self._skip(found + len(start) - 1 - self._place)
        return True

    def error(self, reason: str, place: int | None = None) -> InputError:
        line = self._num_lines + self._text.count("\n", self._place, self._place if place is None else place)
        return InputError(f"{self._name}:{line} is not valid JSON ({reason}); correct the file")

    def _skip(self, count: int) -> None:
        end = self._place + count
        self._num_lines += self._text.count("\n", self._place, end)
        begin = self._text.rfind("\n", self._place, end) + 1
        known = self._text[max(begin or self._place, end - _MAX_INDENT) : end]
        self._before = known if begin else (self._before + known)[-_MAX_INDENT:]
        self._place = end

    def _read_on(self) -> bool:
        """Whether there was more; reads more the longer the value is, so that reading stays linear."""
        if self._is_at_end:
            return False
        rest = self._text[self._place :]
        piece = self._file.read(max(self._piece_characters, len(rest)))
        self._is_at_end = not piece
        self._text, self._place = rest + piece, 0
        return bool(piece)
