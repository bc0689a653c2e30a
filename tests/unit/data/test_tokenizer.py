"""The built tokenizers return every text exactly, also after a trip through the disk."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dapo_mega.data.tokenizer import (
    SPECIAL_TOKENS,
    build_byte_tokenizer,
    build_character_tokenizer,
    load_tokenizer,
    refuse_other_tokens,
)
from dapo_mega.errors import InputError

ALPHABET = "0123456789+-=,:\n\t Answer</s>é"


@pytest.fixture(scope="module", params=["built", "loaded"])
def character(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return _through_disk(build_character_tokenizer(ALPHABET), request.param, tmp_path_factory.mktemp("character"))


@pytest.fixture(scope="module", params=["built", "loaded"])
def byte(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return _through_disk(build_byte_tokenizer(), request.param, tmp_path_factory.mktemp("byte"))


def _through_disk(tokenizer: PreTrainedTokenizerFast, kind: str, folder: Path) -> PreTrainedTokenizerFast:
    if kind == "built":
        return tokenizer
    tokenizer.save_pretrained(folder)
    loaded = load_tokenizer(str(folder))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    return loaded


@given(text=st.text(alphabet=ALPHABET))
def test_character_round_trip_is_one_token_per_character(character: PreTrainedTokenizerFast, text: str) -> None:
    ids = character(text)["input_ids"]
    assert len(ids) == len(text)
    assert min(ids, default=4) >= len(SPECIAL_TOKENS)
    assert character.decode(ids) == character.decode(ids, skip_special_tokens=True) == text


@given(text=st.text())
def test_byte_round_trip_is_one_token_per_byte(byte: PreTrainedTokenizerFast, text: str) -> None:
    ids = byte(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert min(ids, default=4) >= len(SPECIAL_TOKENS)
    assert byte.decode(ids) == byte.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["</s>", "<pad>", "1</s>2", "<s><unk>"])
def test_text_that_spells_a_special_token_is_not_one(byte: PreTrainedTokenizerFast, text: str) -> None:
    ids = byte(text)["input_ids"]
    assert len(ids) == len(text)
    assert byte.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_have_fixed_ids_and_leave_the_text(character: PreTrainedTokenizerFast) -> None:
    ids = [character.pad_token_id, character.eos_token_id, character.bos_token_id, character.unk_token_id]
    assert ids == [0, 1, 2, 3]
    assert character.eos_token == "</s>"
    assert character.decode([*character("1+1")["input_ids"], 1, 0], skip_special_tokens=True) == "1+1"


def test_a_character_outside_the_alphabet_is_unknown(character: PreTrainedTokenizerFast) -> None:
    assert character("1*2")["input_ids"].count(character.unk_token_id) == 1


@pytest.mark.parametrize("alphabet", ["", ["ab"]])
def test_an_alphabet_is_made_of_characters(alphabet: object) -> None:
    with pytest.raises(InputError):
        build_character_tokenizer(alphabet)


def test_other_tokens_are_refused_and_more_of_them_are_not(tmp_path: Path) -> None:
    own = build_character_tokenizer("0123")
    for name, alphabet in {"same": "0123", "small": "0123", "more": "01234", "other": "0213", "fewer": "012"}.items():
        build_character_tokenizer(alphabet).save_pretrained(tmp_path / name)
    for name in ("same", "more"):
        refuse_other_tokens(own, str(tmp_path / name), "a.path")
    with pytest.raises(InputError, match=r"a\.path=.*/other has other tokens .*: '1' has id 5 .* is 6 there"):
        refuse_other_tokens(own, str(tmp_path / "other"), "a.path")
    with pytest.raises(InputError, match=r"'3' has id 7 in .* and is missing there, as are 0 more"):
        refuse_other_tokens(own, str(tmp_path / "fewer"), "a.path")
    (tmp_path / "small" / "config.json").write_text('{"vocab_size": 7}')
    with pytest.raises(InputError, match=r"'3' has id 7 in .* and is without an embedding there"):
        refuse_other_tokens(own, str(tmp_path / "small"), "a.path")


def test_a_folder_without_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match="no tokenizer could be loaded") as caught:
            load_tokenizer(str(path))
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_tokenizer_needs_an_end_and_pads_with_it_where_it_has_no_pad(tmp_path: Path) -> None:
    backend = build_byte_tokenizer().backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "endless")
    with pytest.raises(InputError, match="eos_token"):
        load_tokenizer(str(tmp_path / "endless"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path / "padless")
    assert load_tokenizer(str(tmp_path / "padless")).pad_token_id == 1


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3_text"])
def test_a_model_of_any_family_keeps_the_tokenizer_of_its_file(tmp_path: Path, family: str) -> None:
    """transformers' AutoTokenizer takes the family's class, which loses white space."""
    build_character_tokenizer(ALPHABET).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    text = "1 + 2\n= 3"
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
