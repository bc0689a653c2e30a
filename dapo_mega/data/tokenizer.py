"""Two tokenizers that need no training and no download, and loading of any other.

Both never read a special token out of plain text (`split_special_tokens`): a response that spells "</s>" with
ordinary characters does not end there, and every text survives encoding and decoding unchanged.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dapo_mega.atomic_files import read_json_object, refuse_special_files
from dapo_mega.errors import InputError
from dapo_mega.rewards.thoughts import is_part_of_tag
from dapo_mega.types import TokenIds

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

Decode = Callable[[Sequence[TokenIds]], list[str]]

PAD, EOS, BOS, UNKNOWN = "<pad>", "</s>", "<s>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, BOS, UNKNOWN)
"""In the order of their ids, 0 to 3."""

_MARK = "answer-to-find"
_OF_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")
_UNLIMITED = 10**9  # transformers would warn about prompts over model_max_length; the run's own limits hold instead.


def build_character_tokenizer(alphabet: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet` (repeats ignored), ids from 4 in the order given.

    Any other character becomes `<unk>`; decoding an encoded text over the alphabet returns it exactly.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = list(dict.fromkeys(alphabet))
    if not characters or any(len(character) != 1 for character in characters):
        raise InputError(f"an alphabet needs one or more single characters, got {characters[:20]}")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer)


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, ids from 4: represents any text, at one to four tokens per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer saved in folder `path` (or of that Hugging Face name), with an end token and a pad token.

    A missing pad token is replaced by the end token. Raises `InputError` when there is no tokenizer or it has no
    end token, without which no response would ever end.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind: Any = AutoTokenizer
    if Path(path).is_dir():
        refuse_special_files(Path(path))
        if _is_whole(Path(path)):
            kind = PreTrainedTokenizerFast
    try:
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"no tokenizer could be loaded from {path}; give a folder with tokenizer.json and tokenizer_config.json, "
            f"or a Hugging Face name that can be reached ({reason})"
        ) from error
    if not tokenizer("0")["input_ids"]:  # transformers makes an empty one of a model's folder without its files.
        raise InputError(
            f"no tokenizer could be loaded from {path}: it makes no tokens of text; copy the tokenizer's files "
            f"(tokenizer.json, tokenizer_config.json) beside the model"
        )
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer in {path} has no eos_token; add one to its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if sentence := without_embedding(tokenizer, stop_tokens(Path(path), tokenizer)):
        raise InputError(f"{path}: the end of a response is {sentence}")
    return tokenizer


def _is_whole(folder: Path) -> bool:
    """Whether the folder's tokenizer.json says all, and its class nothing. AutoTokenizer would take the class of the
    model's family, and with it another way of splitting text, which may lose white space."""
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return False  # What is wrong is said where it is read.
    return found in _OF_FILE and (folder / "tokenizer.json").is_file()


def without_embedding(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str | None:
    """What is wrong with the first of these tokens that the model in the tokenizer's folder has no embedding for."""
    size = num_embeddings(str(tokenizer.name_or_path))
    if size is None or not token_ids or max(token_ids) < size:
        return None
    token = next(token for token in token_ids if token >= size)
    return (
        f"token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), for which the model has no embedding: its "
        f"vocab_size is {size}, and the tokenizer has {len(tokenizer)} tokens; use the tokenizer that belongs to the "
        f"model, or give the model's embeddings more rows"
    )


def refuse_other_tokens(tokenizer: PreTrainedTokenizerBase, path: str, key: str) -> None:
    """Raise InputError, which names the `key`, unless the model in the folder `path` knows all tokens of the tokenizer
    by the same ids."""
    own, other = tokenizer.get_vocab(), load_tokenizer(path).get_vocab()
    size = num_embeddings(path) or num_ids(tokenizer)
    differing = [(i, token) for token, i in own.items() if other.get(token) != i or i >= size]
    if differing:
        i, token = min(differing)
        there = "without an embedding" if other.get(token) == i else other.get(token, "missing")
        raise InputError(
            f"{key}={path} has other tokens than the policy: {token!r} has id {i} in {tokenizer.name_or_path} and is "
            f"{there} there, as are {len(differing) - 1} more; give a model with the policy's tokenizer"
        )


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the tokenizer's largest id: ids from there on are rows that pad a model's embedding."""
    return 1 + max(tokenizer.get_vocab().values())


@functools.lru_cache
def num_embeddings(folder: str) -> int | None:
    """`vocab_size` of the model in the folder; None where there is only a tokenizer."""
    file = Path(folder) / "config.json"
    size = read_json_object(file).get("vocab_size") if file.is_file() else None
    return size if isinstance(size, int) else None


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_max_length=_UNLIMITED,
    )


def decoder(tokenizer: Any, tags: Sequence[str] = ()) -> Decode:
    """Responses as text, without special tokens except those that enclose thoughts, and `tags`."""
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    kept = {i for i, content in special.items() if is_part_of_tag(content) or content in tags}
    skipped = {*special, *tokenizer.all_special_ids} - kept if kept else set()

    def decode(responses: Sequence[TokenIds]) -> list[str]:
        ids = [np.array([i for i in r.tolist() if i not in skipped], np.int32) for r in responses]
        return [tokenizer.decode(each, skip_special_tokens=not kept) for each in ids]  # It checks each item of a list.

    return decode


def stop_tokens(model_path: Path, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the model: those of generation_config.json, else the tokenizer's."""
    file = model_path / "generation_config.json"
    eos = read_json_object(file).get("eos_token_id") if file.exists() else None
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def end_of_turn(tokenizer: PreTrainedTokenizerBase, *, chat_template: bool) -> int:
    """The token that ends a demonstration: the one with which the chat template ends a turn of the assistant, where
    responses stop at it, else the tokenizer's end token."""
    assert isinstance(tokenizer.eos_token_id, int)
    token = template_end(tokenizer) if chat_template else None
    stops = stop_tokens(Path(str(tokenizer.name_or_path)), tokenizer)
    return token if token is not None and token in stops else tokenizer.eos_token_id


def template_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token with which the chat template ends a turn of the assistant; None where it has none."""
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = list(filter(written_end(tokenizer).startswith, special))
    return special[max(found, key=len)] if found else None


def written_end(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template writes behind a turn of the assistant, without white space around it."""
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARK}]
    try:
        rendered = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (TemplateError, TypeError, ValueError):  # Told where a prompt is rendered.
        return ""
    return rendered.rpartition(_MARK)[2].strip() if _MARK in rendered else ""
