"""The card of a prepared dataset: what it was made from, with which settings, and where every row went."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dapo_mega.atomic_files import read_json_object
from dapo_mega.errors import InputError

CARD = "card.json"
"""Name of the card in the folder of a prepared dataset."""
DATA = "train.parquet"
"""Name of the prepared rows in that folder."""

DECIDING_PACKAGES = ("dapo_mega", "math-verify", "sympy", "pyarrow", "torch", "transformers")
"""What decides rows that a model had a part in."""

_FORMAT = "dapo_mega prepared dataset 1"


@dataclass(frozen=True)
class FileRecord:
    """A file by its name without folders, the SHA-256 of its content, and its size."""

    name: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class SourceRecord:
    """One source: its name, its files (for a dataset of the hub one whose hash is of the rows), and its rows."""

    name: str
    files: tuple[FileRecord, ...]
    num_rows: int
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """How a prepared dataset was made. Equal inputs, settings and versions give an equal card, byte for byte.

    `num_rows_read = num_rows + sum(dropped.values())`, and `dropped` counts rows by reason. `made_by` names the
    command. `versions` are those of packages that decide the result. `details` holds further counts of the command.
    `parent` is the card of the prepared dataset that this one was made from, whole, with its own parent in it.
    """

    made_by: str
    data: FileRecord
    num_rows_read: int
    num_rows: int
    dropped: Mapping[str, int]
    sources: tuple[SourceRecord, ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    details: Mapping[str, Any] = field(default_factory=dict)
    parent: "Card | None" = None

    def text(self) -> str:
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class CardReference:
    """A card as a run's record names it: where it lies, its hash, and what it says of the rows."""

    path: str
    sha256: str
    made_by: str
    data_sha256: str
    num_rows: int


def read_card(file: Path) -> Card:
    """Raises `InputError` for a file that is no card."""
    content = read_json_object(file, "prepare the dataset again, or move the file away")
    if content.pop("format", None) != _FORMAT:
        raise InputError(f"{file} is not the card of a prepared dataset; give a folder that `dapo-mega prepare` made")
    try:
        return TypeAdapter(Card).validate_python(content)
    except ValidationError as error:
        raise InputError(f"{file} is damaged ({error.errors()[0]['msg']}); prepare the dataset again") from error


def card_of(dataset: str | Path) -> Path | None:
    """The card of a prepared dataset, given its folder or its rows' file; None for any other file or folder."""
    path = Path(dataset)
    file = (path if path.is_dir() else path.parent) / CARD
    if not file.is_file() or (path.is_file() and path.name != DATA):
        return None
    return file if _FORMAT in file.read_text(errors="replace")[:200] else None


def verified_card(dataset: str | Path) -> CardReference | None:
    """The card of a prepared dataset; None for a dataset without one.

    Raises `InputError` if the rows are not those that the card was written for.
    """
    file = card_of(dataset)
    if file is None:
        return None
    card = read_card(file)
    rows = file.with_name(card.data.name)
    remedy = f"prepare the dataset again, or move {file} away to use the rows as they are"
    if not rows.is_file():
        raise InputError(f"{file} belongs to {rows}, which is missing; {remedy}")
    found = file_record(rows).sha256
    if found != card.data.sha256:
        raise InputError(
            f"{rows} is not the file that its card describes: its SHA-256 is {found[:12]}..., the card's "
            f"{card.data.sha256[:12]}...; {remedy}"
        )
    own_hash = hashlib.sha256(file.read_bytes()).hexdigest()
    return CardReference(str(file), own_hash, card.made_by, card.data.sha256, card.num_rows)


def file_record(file: Path) -> FileRecord:
    """The record of a file; reads all of it."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
    return FileRecord(file.name, digest.hexdigest(), file.stat().st_size)
