"""Turns dataset rows into rendered and tokenised prompts, and into demonstrations for supervised training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dapo_mega.config import DataConfig, DatasetConfig
from dapo_mega.data.conversations import (
    Conversation,
    ConversationEncoder,
    LossOn,
    Span,
    is_conversation,
    read_conversation,
    read_tools,
)
from dapo_mega.data.ground_truths import extracted_answer, ground_truth_text
from dapo_mega.data.inert_text import CUT, cut_ids, cut_special
from dapo_mega.data.numbers import plain
from dapo_mega.data.readers import Row, read_rows
from dapo_mega.data.templates import (
    PROBLEM,
    as_messages,
    as_turns,
    render,
    render_messages,
    response_text,
    template_text,
    templated_messages,
    with_template_arguments,
)
from dapo_mega.data.tokenizer import end_of_turn, stop_tokens, without_embedding
from dapo_mega.errors import InputError
from dapo_mega.rewards.records import RewardRecord
from dapo_mega.rewards.trial import made_up_record
from dapo_mega.types import Prompt, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Render = Callable[[Sequence[Mapping[str, str]], Any], str]
"""Makes the text of a prompt from its turns and the tokenizer, None without a chat template. For an environment with
tools: `functools.partial(render_messages, tools=..., add_generation_prompt=False)`."""

_TOKENIZER_BATCH = 512

_CHECKED_ROWS = 100


@dataclass(frozen=True)
class PromptDataset:
    """The prompts of a run, with `prompts[i].index == i`, and where every row that was read went.

    `num_rows = len(prompts) + num_duplicates + num_long`. `num_conflicting` counts those duplicates whose ground
    truth differs from the one kept, which is the first.
    """

    prompts: tuple[Prompt, ...]
    num_rows: int
    num_duplicates: int
    num_conflicting: int
    num_long: int


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One sequence to learn from: `prompt_token_ids` [P] and `response_token_ids` [L], which begin and end with a token
    to learn. `in_loss` [L] says which are; the others are what is said between turns."""

    prompt_token_ids: TokenIds
    response_token_ids: TokenIds
    in_loss: npt.NDArray[np.bool_]
    dataset: str = ""

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


@dataclass(frozen=True)
class Demonstrations:
    """The sequences of `num_rows` rows. `num_dropped` sequences were too long and left out, also where cutting leaves
    nothing to learn, and `num_cut` were cut."""

    sequences: tuple[Demonstration, ...]
    num_rows: int
    num_dropped: int
    num_cut: int


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt, of which the `chosen` one is better; both begin and end as a `Demonstration`."""

    chosen: Demonstration
    rejected: Demonstration
    dataset: str = ""

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, eq=False)
class RenderedRow:
    """A row as the policy gets it: `text` and `token_ids` [P]; for a demonstration all `sequences` that are made of it,
    too. `untemplated` are the contents of its turns before the template is put around the problem."""

    where: str
    untemplated: str
    text: str
    token_ids: TokenIds
    sequences: Sequence[Sequence[Span]] = ()


@dataclass(frozen=True)
class TrainingPrompts:
    """The prompts of all datasets to train on, with `prompts[i].index == i`, and what was read of each dataset by its
    name."""

    prompts: tuple[Prompt, ...]
    datasets: Mapping[str, PromptDataset]


def load_training_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, render: Render = render_messages
) -> TrainingPrompts:
    """The datasets to train on, one after the other. A row without a data source has its dataset's name there.

    A prompt that two datasets have stays in both. Raises `InputError` as `load_prompts` does.
    """
    datasets = {}
    prompts: list[Prompt] = []
    for name, dataset in config.training.items():
        datasets[name] = _load_part(config, config.key_of(name), dataset, tokenizer, render)
        for prompt in datasets[name].prompts:
            source = prompt.data_source or name
            prompts.append(replace(prompt, index=len(prompts), dataset=name, data_source=source) if name else prompt)
    return TrainingPrompts(tuple(prompts), datasets)


def load_evaluation_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, render: Render = render_messages
) -> PromptDataset:
    """The prompts of `data.evaluation`, which is given. Raises `InputError` as `load_prompts` does."""
    assert config.evaluation
    return _load_part(config, "data.evaluation", config.evaluation, tokenizer, render)


def _load_part(
    config: DataConfig, key: str, dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase, render: Render
) -> PromptDataset:
    try:
        return load_prompts(dataset, tokenizer, config.max_prompt_tokens, config.long_prompts, render=render)
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


def load_prompts(
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    long_prompts: Literal["refuse", "drop"] = "refuse",
    too_long: str = "over data.max_prompt_tokens={limit}; raise it, or set data.long_prompts=drop",
    render: Render = render_messages,
) -> PromptDataset:
    """Read, render, deduplicate (by rendered text, the first row stays) and tokenise the prompts of a dataset.

    `Prompt.fields` are the other columns of a row that stays, or those that `columns.extra` names, on every process:
    about 1 kB per prompt for DAPO-Math-17k, much more where a column holds long texts or images. `too_long` says of
    what a prompt is too long, and what to do.

    Raises `InputError`, naming file and row, for a column that is absent, a ground truth that no answer could be
    compared with, a prompt over `max_prompt_tokens` (unless `long_prompts` is "drop"), a prompt with characters
    that the tokenizer does not know, and a dataset that leaves nothing to ask.
    """
    tokenizer = with_template_arguments(tokenizer, config.template_arguments)
    questions, num_rows, num_conflicting = _read_questions(config, tokenizer, render)
    if not num_rows:
        raise InputError(f"dataset {config.path} has no rows; give one with prompts")
    prompts: list[Prompt] = []
    rows, texts = [row for row, _ in questions], [prompt.text for _, prompt in questions]
    encoded = _encode(rows, texts, tokenizer, not config.chat_template)
    for (row, prompt), token_ids in zip(questions, encoded, strict=True):
        _check_known(row, tokenizer, token_ids)
        if len(token_ids) <= max_prompt_tokens:
            text = prompt.text.replace(CUT, "")
            prompts.append(replace(prompt, index=len(prompts), text=text, token_ids=_ids(token_ids)))
        elif long_prompts == "refuse":
            reason = too_long.format(limit=max_prompt_tokens)
            raise InputError(f"{row.where}: the prompt is {len(token_ids)} tokens, {reason}")
    if not prompts:
        raise InputError(
            f"all {len(questions)} prompts of {config.path} are longer than {max_prompt_tokens} tokens; "
            f"raise data.max_prompt_tokens"
        )
    return PromptDataset(
        prompts=tuple(prompts),
        num_rows=num_rows,
        num_duplicates=num_rows - len(questions),
        num_conflicting=num_conflicting,
        num_long=len(questions) - len(prompts),
    )


def load_demonstrations(
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    long_rows: Literal["refuse", "drop", "cut"] = "refuse",
    loss_on: LossOn = "all",
    name: str = "",
) -> Demonstrations:
    """Every row as tokens to learn from, each turn closed by one end token (`end_of_turn`); `name` is the dataset's.

    The prompt is rendered and tokenised exactly as `load_prompts` does, apart from the response, so that the
    boundary falls where generation will start. Rows are never deduplicated: a prompt may be shown with several
    responses. A row that is a conversation may become several sequences (see `ConversationEncoder`). Raises
    `InputError` for a sequence over `max_tokens`, unless these are dropped or cut at that length, and as `load_prompts`
    does.
    """
    tokenizer = with_template_arguments(tokenizer, config.template_arguments)
    template_text(config.template)  # A template that does not exist is refused before any file is read.
    num_rows = num_dropped = num_cut = 0
    kept: list[Demonstration] = []
    for row, sequences in _sequences(_demonstration_rows(config), config, tokenizer, loss_on):
        num_rows += 1
        for spans in sequences:
            token_ids = [i for span in spans for i in span.token_ids]
            in_loss = np.concatenate([np.full(len(span.token_ids), span.in_loss) for span in spans])
            if (length := len(token_ids)) > max_tokens:
                if long_rows == "refuse":
                    what = "the conversation is" if len(spans) > 2 else "prompt and response are"
                    raise InputError(
                        f"{row.where}: {what} {length} tokens, over the limit of {max_tokens}; raise data.max_tokens, "
                        f"set data.long_rows to drop or cut, or remove the row"
                    )
                in_loss[max_tokens:] = False
                if long_rows == "drop" or not in_loss.any():
                    num_dropped += 1
                    continue
                num_cut += 1
            first, *_, last = np.flatnonzero(in_loss).tolist() * 2
            prompt, response = token_ids[:first], token_ids[first : last + 1]
            kept.append(Demonstration(_ids(prompt), _ids(response), in_loss[first : last + 1], name))
    if not num_rows:
        raise InputError(f"dataset {config.path} has no rows; give one with demonstrations")
    if not kept:
        raise InputError(f"all rows of {config.path} are longer than {max_tokens} tokens; raise data.max_tokens")
    return Demonstrations(tuple(kept), num_rows, num_dropped, num_cut)


def load_pairs(
    config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int, loss_on: LossOn, key: str
) -> tuple[Pair, ...]:
    """Every row as a pair of `columns.response` and `columns.rejected`; `key` is the dataset's in the configuration.
    Raises `InputError` for rows that are no pair, and as `load_demonstrations` does."""
    assert config.columns.rejected
    other = config.columns.model_copy(update={"response": config.columns.rejected})
    try:
        of_rejected = config.model_copy(update={"columns": other})
        chosen, rejected = (
            load_demonstrations(each, tokenizer, max_tokens, loss_on=loss_on) for each in (config, of_rejected)
        )
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    if not len(chosen.sequences) == len(rejected.sequences) == chosen.num_rows:
        raise InputError(
            f"{key}: the chat template makes several sequences of a conversation, which cannot be compared as one; set "
            f"data.loss_on=last, or give rows whose responses are text"
        )
    pairs = tuple(map(Pair, chosen.sequences, rejected.sequences))
    for number, pair in enumerate(pairs):
        if np.array_equal(pair.chosen.response_token_ids, pair.rejected.response_token_ids):
            raise InputError(
                f"{key}: row {number} of {config.path} has the same response as chosen and rejected; remove the row"
            )
    return pairs


def _demonstration_rows(config: DatasetConfig) -> Iterator[Row]:
    columns = config.columns
    if columns.messages is None:
        return read_rows(config, [columns.prompt, columns.response, *([columns.tools] if columns.tools else [])])
    return read_rows(config, [columns.messages, *([columns.tools] if columns.tools else [])])


def _sequences(
    rows: Iterator[Row], config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn
) -> Iterator[tuple[Row, list[list[Span]]]]:
    """Every row with the sequences that are made of it."""
    encoder: ConversationEncoder | None = None
    while batch := list(islice(rows, _TOKENIZER_BATCH)):
        conversations = [_conversation(row, config) for row in batch]
        plain = [row for row, conversation in zip(batch, conversations, strict=True) if conversation is None]
        responses = [_response(row, config) for row in plain]
        texts = [_prompt(row, config, tokenizer)[2] for row in plain]
        prompts = _encode(plain, texts, tokenizer, add_special_tokens=not config.chat_template)
        ended = _closed(plain, responses, config, tokenizer)
        for row, conversation in zip(batch, conversations, strict=True):
            if conversation is None:
                sequences = [[Span("prompt", next(prompts), False), Span("response", next(ended), True)]]
            else:
                encoder = encoder or ConversationEncoder(tokenizer)
                try:
                    sequences = encoder.spans(conversation, loss_on)
                except InputError as error:
                    raise InputError(f"{row.where}: {error}") from error
            for spans in sequences:
                _check_known(row, tokenizer, [i for span in spans for i in span.token_ids])
            yield row, sequences


def check_dataset(config: DatasetConfig, *, has_responses: bool = False) -> None:
    """Check the template and, if the dataset is on this machine, its first rows, without a tokenizer.
    `has_responses`: the rows are demonstrations. Raises `InputError` as `load_prompts` and `load_demonstrations` do.
    """
    template_text(config.template)
    if not Path(config.path).exists():
        return
    without_chat = config.model_copy(update={"chat_template": False})
    num_rows = 0
    for row in islice(read_rows(config), _CHECKED_ROWS):
        num_rows += 1
        if has_responses and (conversation := _conversation(row, config)):
            try:
                conversation.turns("all")
            except InputError as error:
                raise InputError(f"{row.where}: {error}") from error
            continue
        _prompt(row, without_chat, None)
        if has_responses:
            _response(row, config)
        else:
            extracted_answer(row, ground_truth_text(row, config), config)
            _fields(row, config)
            _difficulty(row, config)
    if not num_rows:
        raise InputError(f"dataset {config.path} has no rows; give one that has some")


def first_record(config: DatasetConfig) -> RewardRecord | None:
    """What a reward is given for a made-up response to the first row, read without a tokenizer; None if the dataset is
    not on this machine."""
    if not Path(config.path).exists():
        return None
    row = next(read_rows(config))
    problem, messages, _ = _prompt(row, config.model_copy(update={"chat_template": False}), None)
    truth = extracted_answer(row, ground_truth_text(row, config), config)
    return made_up_record(problem, messages, truth, _data_source(row, config), _fields(row, config))


def first_rows(
    config: DatasetConfig,
    tokenizer: PreTrainedTokenizerBase,
    num_rows: int | None,
    *,
    render: Render = render_messages,
) -> list[RenderedRow]:
    """The first rows, or all, rendered and tokenised as `load_prompts` does it, whatever their length. Raises
    `InputError` as it does."""
    tokenizer = with_template_arguments(tokenizer, config.template_arguments)
    rows = []
    for row in islice(read_rows(config), num_rows):
        _, _, text = _prompt(row, config, tokenizer, render)
        (token_ids,) = _encode([row], [text], tokenizer, not config.chat_template)
        _check_known(row, tokenizer, token_ids)
        before = "\n".join(turn["content"] for turn in as_messages(row.value(config.columns.prompt, "columns.prompt")))
        rows.append(RenderedRow(row.where, before, text.replace(CUT, ""), _ids(token_ids)))
    return rows


def first_demonstrations(
    config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, num_rows: int | None, loss_on: LossOn = "all"
) -> list[RenderedRow]:
    """The first rows, or all, as `load_demonstrations` makes sequences of them, whatever their length. Raises
    `InputError` as it does."""
    tokenizer = with_template_arguments(tokenizer, config.template_arguments)
    rows = islice(_demonstration_rows(config), num_rows)
    return [
        RenderedRow(row.where, _untemplated(row, config), "", _ids(sequences[0][0].token_ids), sequences)
        for row, sequences in _sequences(rows, config, tokenizer, loss_on)
    ]


def _untemplated(row: Row, config: DatasetConfig) -> str:
    """What the turns of the row's prompt say, if it has one."""
    if config.columns.messages is not None:
        return ""
    turns = read_conversation(as_turns(row.value(config.columns.prompt, "columns.prompt")))
    return "\n".join(turn["content"] for turn in turns)


def _read_questions(
    config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, render: Render
) -> tuple[list[tuple[Row, Prompt]], int, int]:
    """The distinct questions, not yet tokenised, with the places of their rows; the number of rows read, and that of
    repeated rows that contradict the first."""
    questions: dict[Any, tuple[Row, Prompt]] = {}
    truths: dict[Any, str] = {}
    num_rows = num_conflicting = 0
    template_text(config.template)  # A template that does not exist is refused before any file is read.
    for row in read_rows(config):
        problem, messages, text = _prompt(row, config, tokenizer, render)
        truth = ground_truth_text(row, config)
        key = text if config.deduplicate else num_rows
        num_rows += 1
        if key in questions:
            # Equal texts are not extracted again: DAPO-Math-17k repeats each a hundred times.
            kept = questions[key][1].ground_truth
            num_conflicting += truth != truths[key] and extracted_answer(row, truth, config) != kept
            continue
        truths[key] = truth
        prompt = Prompt(
            index=len(questions),
            text=text,
            token_ids=_ids([]),
            ground_truth=extracted_answer(row, truth, config),
            fields=MappingProxyType(_fields(row, config)),
            problem=problem,
            messages=tuple(messages),
            data_source=_data_source(row, config),
            difficulty=_difficulty(row, config),
        )
        questions[key] = Row(row.source, row.number, {}, row.unit), prompt
    return list(questions.values()), num_rows, num_conflicting


def _prompt(
    row: Row, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase | None, render: Render = render_messages
) -> tuple[str, list[dict[str, str]], str]:
    """The problem, the turns, and the text that the policy is asked, where a chat template's turns spell no special
    token (`cut_special`)."""
    prompt = row.value(config.columns.prompt, "columns.prompt")
    try:
        problem, messages = templated_messages(prompt, config.template)
        chat = tokenizer if config.chat_template else None
        text = render(messages if chat is None else cut_special(messages, chat), chat)
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from error
    if not problem.strip():
        raise InputError(f"{row.where}: the prompt is empty; correct or remove the row")
    return problem, messages, row.text(text)


def _conversation(row: Row, config: DatasetConfig) -> Conversation | None:
    """The row as a conversation; None if it is a prompt and the text of its response."""
    columns = config.columns
    whole = None if columns.messages is None else row.value(columns.messages, "columns.messages")
    response = row.value(columns.response, "columns.response") if whole is None else None
    if whole is None and columns.messages is None and not is_conversation(response):
        return None
    try:
        if not config.chat_template:
            raise InputError("a conversation needs the chat template; set chat_template: true")
        if columns.messages is not None and template_text(config.template) != PROBLEM:
            raise InputError(f"template={config.template!r:.40} is for prompts, and conversations have none; set as_is")
        messages: list[dict[str, Any]] = []
        if columns.messages is None:
            messages = read_conversation(as_turns(row.value(columns.prompt, "columns.prompt")))
            asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
            if not asked:
                raise InputError("the list of messages has no message with role user; add one")
            messages[asked[-1]]["content"] = render(config.template, messages[asked[-1]]["content"])
        first = len(messages)
        messages += read_conversation(response if columns.messages is None else whole)
        tools = read_tools(row.optional(columns.tools)) if columns.tools else ()
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from error
    for message in messages:
        row.text(message["content"])
    return Conversation(messages, tools, first)


def _response(row: Row, config: DatasetConfig) -> str:
    value = row.value(config.columns.response, "columns.response")
    try:
        text = response_text(value)
    except InputError as error:
        raise InputError(f"{row.where}: {error}") from error
    return row.text(text)


def _closed(
    rows: Sequence[Row], responses: Sequence[str], config: DatasetConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[int]]:
    """The tokens of responses, each with one end token, whether its text brings that along or not."""
    end = end_of_turn(tokenizer, chat_template=config.chat_template)
    stops = {end, *stop_tokens(Path(str(tokenizer.name_or_path)), tokenizer)}
    endings = tuple(str(tokenizer.convert_ids_to_tokens(token)) for token in stops)
    texts = []
    for text in responses:
        while (bare := text.rstrip()).endswith(endings):
            text = next(bare.removesuffix(ending) for ending in endings if bare.endswith(ending))
        texts.append(text)
    for row, text, token_ids in zip(rows, texts, _encode(rows, texts, tokenizer, False), strict=True):
        if not text or stops.intersection(token_ids):
            raise InputError(
                f"{row.where}: the response {'goes on behind' if text else 'is nothing but'} a token that ends it "
                f"({' or '.join(endings)}); correct or remove the row"
            )
        yield [*token_ids, end]


def _fields(row: Row, config: DatasetConfig) -> dict[str, Any]:
    """The row's other columns, or those that `columns.extra` names, by these names."""
    columns = config.columns
    if columns.extra is None:
        return row.without(columns.prompt, columns.ground_truth)
    return {name: plain(row.value(name, "columns.extra")) for name in columns.extra}


def _data_source(row: Row, config: DatasetConfig) -> str:
    source = row.optional(config.columns.data_source or "data_source")
    return "" if source is None else row.text(str(source))


def _difficulty(row: Row, config: DatasetConfig) -> float | None:
    column = config.columns.difficulty
    if column is None:
        return None
    value = plain(row.value(column, "columns.difficulty"))
    value = float(value) if isinstance(value, Decimal) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(
            f"{row.where}: the difficulty in column {column!r} must be a finite number, got {value!r:.80}; correct or "
            f"remove the row, or set columns.difficulty to another column"
        )
    return float(value)


def _encode(
    rows: Sequence[Row], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> Iterator[list[int]]:
    """Token ids per text. A chat template has put its special tokens into the text already, and others are cut."""
    for start in range(0, len(texts), _TOKENIZER_BATCH):
        batch = list(texts[start : start + _TOKENIZER_BATCH])
        try:
            encoded = tokenizer(batch, add_special_tokens=add_special_tokens)["input_ids"]
            for place, text in enumerate(batch):
                if CUT in text and not add_special_tokens:
                    encoded[place] = cut_ids(text, tokenizer)
        except Exception as error:  # The library of tokenizers raises no narrower one.
            if len(texts) > 1:  # Once more one by one, to name the row.
                for row, text in zip(rows[start:], batch, strict=False):
                    list(_encode([row], [text], tokenizer, add_special_tokens))
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{rows[start].where}: the tokenizer cannot read the text ({reason}); correct or remove the row"
            ) from error
        yield from encoded


def _check_known(row: Row, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> None:
    unknown = tokenizer.unk_token_id
    # Some tokenizers (Qwen2's) name their end token as the unknown one, and never produce it for a character.
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in token_ids:
        raise InputError(
            f"{row.where} has characters that the tokenizer cannot represent (it reads "
            f"{tokenizer.decode(token_ids)!r:.120}); use a byte-level tokenizer or correct the row"
        )
    if sentence := without_embedding(tokenizer, token_ids):
        raise InputError(f"{row.where} has {sentence}")


def _ids(token_ids: Sequence[int]) -> TokenIds:
    return np.asarray(token_ids, dtype=np.int32)
