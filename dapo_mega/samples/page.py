"""Makes one HTML page of a run's samples, which needs no server and no network.

No text of a model is in the page's HTML: all data are gzip and base64 in elements that are not executed, and the
page's script puts texts into text nodes only. A content security policy admits that script and that style sheet by
their hashes and nothing else.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dapo_mega import trajectory_records
from dapo_mega.atomic_files import replace_file
from dapo_mega.environments.markup import ENDS, THINK, read_markup
from dapo_mega.errors import InputError
from dapo_mega.samples.files import StoredFile
from dapo_mega.samples.table import account_of
from dapo_mega.trajectory_records import columns_of
from dapo_mega.types import STOP_REASONS, sampled_rows

PageValues = dict[str, Any]

_LEVEL = 5
_ABSENT = -(2**15)
_LOGPROB_SCALE, _DIFFERENCE_SCALE = 1000.0, 10000.0
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, pa.ArrowException)
"""What reading and looking through a damaged file raises."""
_NAMED = 3


@dataclass(frozen=True)
class ClipBounds:
    """What the run's loss does with ratios: tokens are clipped below 1 - low where the advantage is negative, above
    1 + high where it is positive. `of_engine`: ratios are taken to the engine's log-probs."""

    low: float
    high: float
    of_engine: bool = False


@dataclass
class _Tables:
    """What the rows of all files refer to by number."""

    prompts: dict[tuple[int, str, str, str], int] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)

    def prompt(self, key: tuple[int, str, str, str]) -> int:
        return self.prompts.setdefault(key, len(self.prompts))

    def piece_numbers(self, pieces: pa.Array) -> npt.NDArray[np.uint32]:
        """The number of each piece [N]."""
        encoded = pieces.dictionary_encode()
        numbers = [self.pieces.setdefault(text, len(self.pieces)) for text in encoded.dictionary.to_pylist()]
        return np.array(numbers, np.uint32)[encoded.indices.to_numpy()] if len(pieces) else np.empty(0, np.uint32)


@dataclass(frozen=True, eq=False)
class _TokenValues:
    """Of all tokens of a file's rows, in order: the engine's log-prob, the trainer's minus it, and the last update's
    minus the trainer's, each [N] in nats and NaN where it is not known. `lengths` are the rows' numbers of tokens."""

    lengths: npt.NDArray[np.int64]
    engine: npt.NDArray[np.float32]
    difference: npt.NDArray[np.float32]
    change: npt.NDArray[np.float32]


@dataclass(frozen=True)
class WrittenPage:
    """What is on a page: `responses`, their number, and `unreadable`, one line for each file that was left out."""

    responses: int
    unreadable: tuple[str, ...]


def size_of(file: StoredFile) -> tuple[int, int]:
    """Responses of a file, and their tokens; none of a file that cannot be read, which `write_page` names."""
    try:
        has_observed = "sampled" in pq.read_schema(file.path).names
        name = "token_ids" if has_observed else "length"
        column = pq.read_table(file.path, columns=[name])[name]
        lengths = pc.list_value_length(column).to_numpy() if has_observed else column.to_numpy()
    except _UNREADABLE:
        return 0, 0
    return len(lengths), int(lengths.sum())


def write_page(
    output: Path, files: Sequence[StoredFile], *, name: str, clip: ClipBounds | None, notes: Sequence[str] = ()
) -> WrittenPage:
    """Write the page of these files but those that cannot be read, which are named on it. `notes` are shown at its top.

    Raises InputError if no file can be read.
    """
    tables = _Tables()
    steps: list[PageValues] = []
    rows: list[PageValues] = []
    chunks: list[bytes] = []
    texts: list[str] = []
    unreadable: dict[str, str] = {}
    for file in files:
        try:
            table = pq.read_table(file.path, page_checksum_verification=True).combine_chunks()
            values = _token_values(table)
            step, columns = _step(table, file), _columns(table, values, len(steps), tables)
            chunk, responses = _token_chunk(table, values, tables), table["response"].to_pylist()
        except _UNREADABLE as error:
            reason = "it is gone" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
            unreadable[file.path.name] = f"{file.path} cannot be read ({reason[:300]})"
            continue
        steps.append(step)
        rows.append(columns)
        chunks.append(chunk)
        texts += responses
    if unreadable and not steps:
        raise InputError(f"{next(iter(unreadable.values()))}; remove it, or write it again with the run")
    if unreadable:
        names = [*list(unreadable)[:_NAMED], *(["..."] if len(unreadable) > _NAMED else [])]
        notes = [*notes, f"{len(unreadable)} that cannot be read left out: {', '.join(names)}"]
    data: dict[str, bytes] = {
        "meta": _json(
            {
                **{"name": name, "notes": list(notes), "steps": steps, "clip": vars(clip) if clip else None},
                "stops": dict(STOP_REASONS),
            }
        ),
        "rows": _json({name: [value for part in rows for value in part[name]] for name in (rows[0] if rows else ())}),
        "texts": _json(texts),
        "prompts": _json([dict(zip(("index", "text", "truth"), key, strict=False)) for key in tables.prompts]),
        "pieces": _json(list(tables.pieces)),
        **{f"tokens-{i}": chunk for i, chunk in enumerate(chunks)},
    }
    replace_file(output, _document(name, data).encode("utf-8", "replace"))
    return WrittenPage(len(texts), tuple(unreadable.values()))


def _document(name: str, data: Mapping[str, bytes]) -> str:
    assets = resources.files("dapo_mega.samples") / "viewer"
    style, script = ((assets / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    body = (assets / "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'sha256-{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    elements = "\n".join(
        f'<script type="application/octet-stream" id="{key}">'
        f"{base64.b64encode(gzip.compress(content, _LEVEL, mtime=0)).decode()}</script>"
        for key, content in data.items()
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(name)} · samples</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}\n{elements}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(values: Any) -> bytes:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def _step(table: pa.Table, file: StoredFile) -> PageValues:
    account = account_of(table.schema.metadata)
    wanted = ("groups", "recorded_groups", "all_recorded", "in_buffer", "in_flight")
    return {
        "step": file.step,
        "kind": "evaluation" if file.is_evaluation else "training",
        **{name: account[name] for name in wanted if name in account},
    }


def _columns(table: pa.Table, values: _TokenValues, step: int, tables: _Tables) -> PageValues:
    """One list per column of the page's rows; text and numbers that browsers have exactly."""
    plain = {name: table[name].to_pylist() for name in _PLAIN}
    keys = zip(*(table[name].to_pylist() for name in ("prompt_index", "prompt", "ground_truth", "kind")), strict=True)
    rounded = {name: [_rounded(value) for value in table[name].to_pylist()] for name in _ROUNDED}
    parts = [{part["name"]: _rounded(part["value"]) for part in found or ()} for found in table["parts"].to_pylist()]
    spans = [[[s["version"], s["end"]] for s in found or ()] for found in table["version_spans"].to_pylist()]
    engines = [[s["engine"] for s in found or ()] for found in table["engine_spans"].to_pylist()]
    # Ids of evaluations begin at 2^62, which a browser cannot hold.
    groups = [f"{step}:{group}" for group in table["group"].to_pylist()]
    own = {
        "step": [step] * len(table),
        "prompt": [tables.prompt((i, p or "", g or "", k)) for i, p, g, k in keys],
        "group": groups,
        "parts": parts,
        "versions": spans,
        "engines": engines,
        "blocks": blocks_of(table),
        "rows": values.lengths.tolist(),
        "gap": _largest_differences(values),
    }
    known = {*_PLAIN, *_ROUNDED, "request_id", "response"}
    more = [c.in_files for c in columns_of(trajectory_records.SCORED) if c.is_plain and c.in_files not in known]
    shown = {f"more {name}": table[name].to_pylist() for name in more if name in table.column_names}
    return {**plain, **rounded, **own, **shown}


_PLAIN = ("outcome", "correct", "is_greedy", "answer", "length", "finish_reason", "weight_version", "in_loss")
_ROUNDED = ("reward", "accuracy_reward", "advantage")


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.6g}")


def _largest_differences(values: _TokenValues) -> list[float | None]:
    """The largest |engine's - trainer's log-prob| of each response; None where the trainer computed none."""
    gaps = np.abs(values.difference)
    ends = np.cumsum(values.lengths)
    is_known = ~np.isnan(gaps)
    return [
        _rounded(float(gaps[start:end][is_known[start:end]].max())) if is_known[start:end].any() else None
        for start, end in zip((ends - values.lengths).tolist(), ends.tolist(), strict=True)
    ]


def _token_values(table: pa.Table) -> _TokenValues:
    # Those that were observed included.
    lengths = np.asarray(pc.list_value_length(table["token_ids"]).to_numpy(), np.int64)
    engine, trainer, updated = (_flat(table[f"{name}_logprobs"], lengths) for name in ("engine", "trainer", "update"))
    if "sampled" in table.column_names:
        engine[_flat(table["sampled"], lengths) == 0] = np.nan
    return _TokenValues(lengths, engine, trainer - engine, updated - trainer)


def _token_chunk(table: pa.Table, values: _TokenValues, tables: _Tables) -> bytes:
    """Four arrays of all tokens of the file's rows, in order: numbers of pieces (uint32), and as int16 the engine's
    log-probs in thousandths of a nat, the trainer's minus them, and the last update's minus the trainer's, both in
    tenths of thousandths."""
    pieces = table["tokens"].combine_chunks().flatten() if len(table) else pa.array([], pa.string())
    columns = (
        _quantized(values.engine, _LOGPROB_SCALE),
        _quantized(values.difference, _DIFFERENCE_SCALE),
        _quantized(values.change, _DIFFERENCE_SCALE),
    )
    return tables.piece_numbers(pieces).tobytes() + b"".join(column.tobytes() for column in columns)


def _flat(column: pa.ChunkedArray, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The values of a list column, one after the other; NaN for the tokens of rows without a list."""
    flat = np.full(int(lengths.sum()), np.nan, np.float32)
    if not len(lengths):
        return flat
    lists = column.combine_chunks()
    present = np.repeat(~np.asarray(lists.is_null()), lengths)
    flat[present] = lists.flatten().to_numpy(zero_copy_only=False)
    return flat


def _quantized(values: npt.NDArray[np.float32], scale: float) -> npt.NDArray[np.int16]:
    scaled = np.clip(np.nan_to_num(values, nan=0.0) * scale, _ABSENT + 1, -_ABSENT - 1).round().astype(np.int16)
    scaled[np.isnan(values)] = _ABSENT
    return scaled


Block = dict[str, Any]
_COLUMNS = ("sampled", "turns", "segments", "stop")


def blocks_of(table: pa.Table) -> list[list[Block] | None]:
    """The blocks that the tokens of each row are shown in, in their order; None for a single answer.

    `kind` is `turn`, `observed`, or `rewritten` for an observed history that begins a new piece; `end` is the row of
    the trajectory up to which it goes, exclusive. A turn has its `finish_reason`, `parts`, and `calls` as `read_markup`
    finds them in its text.
    """
    if not set(_COLUMNS) & set(table.column_names):
        return [None] * len(table)
    columns = [table[name] if name in table.column_names else [None] * len(table) for name in _COLUMNS]
    return [_blocks(*row) for row in zip(table["tokens"], *columns, strict=True)]


def _blocks(tokens: pa.ListScalar, *columns: pa.Scalar | None) -> list[Block] | None:
    texts = tokens.values
    mask, (turns, segments, stop) = columns[0], [column and column.as_py() for column in columns[1:]]
    sampled = np.ones(len(texts), bool) if mask is None else mask.values.to_numpy(zero_copy_only=False)
    if len(turns or [0]) == len(segments or [0]) == 1 and not stop and sampled.all():
        return None
    return list(_cut(texts, sampled, turns or [], (segments or [0])[:-1]))


def _cut(
    texts: pa.StringArray, sampled: npt.NDArray[np.bool_], turns: Sequence[Block], new_pieces: Sequence[int]
) -> Iterator[Block]:
    begin = 0
    for turn in turns:
        start = sampled_rows(sampled, begin, turn["end"]).start
        if start > begin:
            yield {"kind": "rewritten" if begin in new_pieces else "observed", "end": start}
        begin = turn["end"]
        text = "".join(texts[start : begin - (turn["finish_reason"] == "stop")].to_pylist())  # Not the stop token.
        is_thought = ENDS[THINK] in text.partition(THINK)[0]  # The template had opened it.
        calls = read_markup(THINK * is_thought + text).calls
        yield {"kind": "turn", **turn, "parts": json.loads(turn["parts"]), "calls": calls}
    if begin < len(sampled):  # Where it stopped before the next turn.
        yield {"kind": "observed", "end": len(sampled)}
