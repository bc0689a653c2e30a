"""Shows one prompt of each dataset as the policy gets it, and warns of what is probably a mistake in how it is made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_mega.atomic_files import read_json_object
from dapo_mega.config import DatasetConfig, RunConfig, SftConfig
from dapo_mega.data.conversations import Span
from dapo_mega.data.prompts import Render, RenderedRow, first_demonstrations, first_rows
from dapo_mega.data.templates import PROBLEM, render_messages, template_text, with_template_arguments
from dapo_mega.data.tokenizer import stop_tokens, template_end, without_embedding, written_end
from dapo_mega.metrics.run_text import shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WARNING = "WARNING: "

_CHECKED_ROWS = 100

_INSTRUCTIONS: Mapping[str, tuple[str, re.Pattern[str]]] = {
    "dapo": ("a line 'Answer: ...'", re.compile(r"answer\s*:", re.IGNORECASE)),
    "boxed": ("\\boxed{}", re.compile(r"\\boxed")),
    "r1": ("<answer> tags", re.compile(r"<answer>")),
    "gsm8k": ("a number after ####", re.compile(r"####")),
}
"""What each `reward.extraction` reads, in words, and how a prompt that asks for it is recognised."""

_ASKS_FOR_NOTHING = ("bare", "none")
"""Templates that say that no instruction is wanted, where `as_is` says that the prompts bring theirs."""


def preview_run(
    config: RunConfig | SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    only_local: bool = False,
    render: Render = render_messages,
) -> str:
    """Text that shows the first prompt of each dataset with its tokens counted and its special tokens marked, and a
    line that begins with `WARNING` for each likely mistake in the first rows. Empty if there is nothing to show.

    `only_local` leaves out datasets that are not on this machine. Raises `InputError` as loading a dataset does.
    """
    extraction = config.reward.answer_extraction if isinstance(config, RunConfig) else None
    lines: list[str] = []
    # Where the model lacks embeddings of tokens that there are, any row may have one.
    lacks_tokens = without_embedding(tokenizer, list(tokenizer.get_vocab().values())) is not None
    for key, dataset in config.data.by_key.items():
        if only_local and not Path(dataset.path).exists():
            continue
        limit = None if lacks_tokens else _CHECKED_ROWS
        if isinstance(config, RunConfig):
            rows = first_rows(dataset, tokenizer, limit, render=render)
        else:
            rows = first_demonstrations(dataset, tokenizer, limit, config.data.loss_on)
        if rows:
            lines += _shown(key, rows[0], tokenizer)
            found = (
                missing_instruction(rows, dataset, extraction),
                doubled_instruction(rows, dataset),
                second_bos(rows, tokenizer),
                turn_without_stop(dataset, tokenizer, config.rollout.stop if isinstance(config, RunConfig) else ()),
            )
            lines += [f"{WARNING}{key}: {sentence}" for sentence in found if sentence]
    if sentence := stop_token_disagreement(Path(config.model.path), tokenizer):
        lines.append(WARNING + sentence)
    return "\n".join(lines)


def with_marked_specials(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokens as text, in which special tokens stand in ⟦⟧ and text that only looks like one does not."""
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    text = ""
    ordinary: list[int] = []
    for token_id in [*token_ids, None]:
        if token_id is not None and token_id not in special:
            ordinary.append(token_id)
            continue
        if ordinary:
            text += str(tokenizer.decode(ordinary))
            ordinary = []
        if token_id is not None:
            text += f"⟦{tokenizer.convert_ids_to_tokens(token_id)}⟧"
    return text


def missing_instruction(rows: Sequence[RenderedRow], dataset: DatasetConfig, extraction: str | None) -> str | None:
    """A warning if prompts do not ask for the answer where the reward looks for it."""
    if extraction is None or extraction not in _INSTRUCTIONS or dataset.template in _ASKS_FOR_NOTHING:
        return None
    place, pattern = _INSTRUCTIONS[extraction]
    without = [row for row in rows if not pattern.search(row.text)]
    if not without:
        return None
    return (
        f"{len(without)} of the first {len(rows)} prompts do not ask for {place}, where reward.extraction={extraction} "
        f"looks for the answer (the first is {without[0].where}); choose a template that asks for it, the extraction "
        f"that fits the template, or template=bare if the model was taught to answer so"
    )


def doubled_instruction(rows: Sequence[RenderedRow], dataset: DatasetConfig) -> str | None:
    """A warning if a template adds an instruction to prompts that bring one."""
    if not _asks(template_text(dataset.template).replace(PROBLEM, "")):
        return None
    twice = [row for row in rows if _asks(row.untemplated)]
    if not twice:
        return None
    return (
        f"{len(twice)} of the first {len(rows)} prompts say by themselves how to answer (the first is "
        f"{twice[0].where}), and template {dataset.template[:40]!r} says it again; set template=as_is, or "
        f"columns.prompt to the column with the bare problem"
    )


def second_bos(rows: Sequence[RenderedRow], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A warning if prompts begin with two tokens that begin a text."""
    bos = tokenizer.bos_token_id
    twice = [row for row in rows if bos is not None and list(row.token_ids[:2]) == [bos, bos]]
    if not twice:
        return None
    return (
        f"{len(twice)} of the first {len(rows)} prompts begin with {tokenizer.bos_token} twice (the first is "
        f"{twice[0].where}), which models are not trained on; remove one from the chat template or from the prompts"
    )


def turn_without_stop(
    dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()
) -> str | None:
    """A warning if the chat template ends a turn with what stops no response: neither a token that does nor one of the
    `texts`."""
    tokenizer = with_template_arguments(tokenizer, dataset.template_arguments)
    if not dataset.chat_template or not (text := written_end(tokenizer)) or text.startswith(tuple(texts)):
        return None
    token, stops = template_end(tokenizer), stop_tokens(Path(str(tokenizer.name_or_path)), tokenizer)
    if token in stops:
        return None
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in stops)
    known = (
        f"at which no response stops, but at {named}; texts of responses are learnt with {tokenizer.eos_token} behind "
        f"them, conversations with what the template writes"
    )
    if token is not None:
        written = f"{tokenizer.convert_ids_to_tokens(token)} ({token})"
        return (
            f"the chat template ends a turn with {written}, {known}. Add {token} to eos_token_id in "
            f"generation_config.json"
        )
    num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return (
        f"the chat template ends a turn with {text[:40]!r}, {num_tokens} tokens of plain text, {known}. Let the "
        f"template end turns with {tokenizer.eos_token}, or set rollout.stop to this text, or responses may go on as "
        f"the user"
    )


def stop_token_disagreement(model_path: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A warning if a file of the model lists end tokens, and the tokenizer's is not among them."""
    end = tokenizer.eos_token_id
    others = {name: ids for name, ids in _end_tokens(model_path) if ids and end not in ids}
    if not others:
        return None
    listed = "; ".join(
        f"{name} has {', '.join(f'{tokenizer.convert_ids_to_tokens(i)} ({i})' for i in ids)}"
        for name, ids in others.items()
    )
    return (
        f"the tokenizer in {model_path} ends a text with {tokenizer.eos_token} ({end}), but {listed}; responses stop "
        f"at those of generation_config.json, or else at the tokenizer's. Correct the files, or responses may never end"
    )


def _end_tokens(model_path: Path) -> Iterator[tuple[str, list[int]]]:
    for name in ("generation_config.json", "config.json"):
        if (model_path / name).is_file():
            given = read_json_object(model_path / name).get("eos_token_id")
            listed = given if isinstance(given, list) else [given]
            yield name, [i for i in listed if isinstance(i, int)]


def _asks(text: str) -> bool:
    return any(pattern.search(text) for _, pattern in _INSTRUCTIONS.values())


def _shown(key: str, row: RenderedRow, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    spans = [span for sequence in row.sequences for span in sequence] or [Span("prompt", row.token_ids.tolist(), False)]
    lines = []
    if len(row.sequences) > 1:
        lines.append(
            f"the chat template writes earlier turns otherwise than they were said, so the first row of {key} is "
            f"{len(row.sequences)} sequences, one after the other:"
        )
    for place, span in enumerate(spans):
        title = span.roles if place else f"first {span.roles} of {key}"
        marks = "in the loss, divided by ·, " if span.in_loss else ""
        lines.append(f"{title}, {len(span.token_ids)} tokens, {marks}special tokens in ⟦⟧:")
        pieces = [[i] for i in span.token_ids] if span.in_loss else [span.token_ids]
        text = shortened("·".join(with_marked_specials(piece, tokenizer) for piece in pieces))
        lines += [f"  | {line}" for line in text.split("\n")]
    return lines
