"""Published tokenizers and chat templates, in the folders that DAPO_MEGA_TOKENIZERS holds: prompts are those of
transformers, text survives, and a response that ends within a character is its text up to there."""

import json
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dapo_mega.config import DatasetConfig
from dapo_mega.data.preview import second_bos, stop_token_disagreement, turn_without_stop, with_marked_specials
from dapo_mega.data.prompts import first_rows
from dapo_mega.data.templates import PROBLEM, TEMPLATES, with_template_arguments
from dapo_mega.data.tokenizer import decoder, load_tokenizer, stop_tokens
from dapo_mega.engines.embedded.decoding import RowBatch
from dapo_mega.environments.dialogues import make_dialogue
from dapo_mega.errors import InputError
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.types import GenerationRequest, SamplingParams

NAMES = ("qwen3", "gemma3", "llama3_1", "deepseek_v3", "smollm2")
TEXTS = {
    "LaTeX": r"Let $\frac{a}{b} \ge \sqrt[3]{x}$ and \[\int_0^1 x^2\,dx = \boxed{\tfrac13}\]",
    "Chinese, Japanese, Korean": "求三角形的面积。ひらがな、한국어 𠮷",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "zero width": "a\u200bb\u200dc\u2060d\ufeffe",
    "right to left": "ما هو \u202bשלום\u202c 3 + 4؟",
    "white space": "  two  spaces , . ! \n\n\t x 's n't",
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "  What is $1+1$? 求\n"}


@cache
def real(name):
    folder = Path(os.environ.get("DAPO_MEGA_TOKENIZERS", "")) / name
    if not os.environ.get("DAPO_MEGA_TOKENIZERS") or not folder.is_dir():
        pytest.skip(f"no tokenizer {name}: set DAPO_MEGA_TOKENIZERS to a folder that has it")
    return load_tokenizer(str(folder))


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def prompts_of(folder, tokenizer, prompts, chat_template=True, template="as_is", **arguments):
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"path": str(folder / "data.jsonl"), "columns": {"ground_truth": "answer"}, "template": template}
    values |= {"chat_template": chat_template, "template_arguments": arguments}
    config = DatasetConfig.model_validate(values)
    return config, first_rows(config, tokenizer, None)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_transformers_with_one_first_token(tmp_path, name):
    tokenizer = real(name)
    conversations = [[USER], [SYSTEM, USER], [SYSTEM, USER, {"role": "assistant", "content": "2"}, USER]]
    config, rows = prompts_of(tmp_path, tokenizer, conversations)
    for row, messages in zip(rows, conversations, strict=True):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert row.token_ids.tolist() == ids, messages
        assert tokenizer.bos_token_id is None or ids[1] != tokenizer.bos_token_id, messages
    assert second_bos(rows, tokenizer) is None
    if name == "smollm2":
        assert ["named SmolLM" in row.text for row in rows] == [True, False, False]
    assert ["Be brief." in row.text for row in rows] == [False, True, True]
    assert turn_without_stop(config, tokenizer) is None
    assert stop_token_disagreement(Path(tokenizer.name_or_path), tokenizer) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_template_is_rendered_as_by_transformers(tmp_path, name):
    tokenizer = real(name)
    for template, text in TEMPLATES.items():
        problems = [*TEXTS.values(), "What is {problem} in {{ m }}?", "<|im_end|> </think> <eos>"]
        _, rows = prompts_of(tmp_path, tokenizer, problems, template=template)
        for problem, row in zip(problems, rows, strict=True):
            messages = [{"role": "user", "content": text.replace(PROBLEM, problem)}]
            assert row.text == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            if problem != problems[-1]:  # Which transformers would read as tokens.
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                assert row.token_ids.tolist() == ids, (template, problem)


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_thinking_is_switched_as_by_transformers_in_first_and_later_turns(tmp_path, arguments):
    tokenizer = real("qwen3")

    def ids(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **arguments)

    config, (row,) = prompts_of(tmp_path, tokenizer, [[SYSTEM, USER]], **arguments)
    assert row.token_ids.tolist() == ids([SYSTEM, USER])
    assert ("<think>" in row.text) == (arguments == {"enable_thinking": False})
    dialogue = make_dialogue("auto", with_template_arguments(tokenizer, config.template_arguments), True, ())
    answer = {"role": "assistant", "content": "2"}
    assert dialogue.whole([SYSTEM, USER, answer, USER]) == ids([SYSTEM, USER, answer, USER])
    before = tokenizer.apply_chat_template([SYSTEM, USER], return_dict=False)
    assert [*before, *dialogue.opening([SYSTEM, USER], [])] == row.token_ids.tolist()
    opened = ids([USER])[len(tokenizer.apply_chat_template([USER], return_dict=False)) :]
    assert dialogue.extend(row.token_ids.tolist(), [tokenizer.eos_token_id], [USER])[-len(opened) :] == opened


@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_no_template_reads_are_refused(tmp_path, name):
    known = "enable_thinking" if name == "qwen3" else ""
    with pytest.raises(InputError, match=f"does not read enable_thoughts, but .*{known}"):
        prompts_of(tmp_path, real(name), [[USER]], enable_thoughts=False)


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_that_a_row_spells_are_text(tmp_path, name):
    tokenizer = real(name)
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    text = " ".join(("Say", tokenizer.eos_token, *special.values())[:300])
    _, (plain, spelt) = prompts_of(
        tmp_path, tokenizer, [[{"role": "user", "content": said}] for said in ("1+1?", text)]
    )
    assert [i for i in spelt.token_ids if i in special] == [i for i in plain.token_ids if i in special]
    assert text.strip() in spelt.text
    assert tokenizer.decode(spelt.token_ids) == spelt.text


@pytest.mark.parametrize("name", ["gemma3", "llama3_1"])
def test_a_first_token_in_the_text_beside_the_tokenizers_is_named(tmp_path, name):
    tokenizer = real(name)
    _, rows = prompts_of(tmp_path, tokenizer, [f"{tokenizer.bos_token}1+1?", "1+1?"], chat_template=False)
    assert f"1 of the first 2 prompts begin with {tokenizer.bos_token} twice" in second_bos(rows, tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_text_comes_back_as_it_was(name):
    tokenizer = real(name)
    # Qwen's tokenizer composes characters (NFC) before it reads them, so that only composed text can come back.
    texts = {kind: text for kind, text in TEXTS.items() if (name, kind) != ("qwen3", "decomposed")}
    ids = {kind: np.array(ids_of(tokenizer, text), np.int32) for kind, text in texts.items()}
    assert dict(zip(texts, decoder(tokenizer)(list(ids.values())), strict=True)) == texts
    assert {kind: with_marked_specials(ids[kind].tolist(), tokenizer) for kind in texts} == texts
    assert {kind: "".join(TokenPieces(tokenizer).of(ids[kind]).to_pylist()) for kind in texts} == texts


@pytest.mark.parametrize("name", NAMES)
def test_a_response_cut_within_a_character_is_its_text_up_to_there(name):
    tokenizer, num_cut = real(name), 0
    text = r"So $\boxed{7}$ 𓀀𠮷🏳️‍🌈"
    ids = np.array(ids_of(tokenizer, text), np.int32)
    for end in range(1, len(ids)):
        (shown,) = decoder(tokenizer)([ids[:end]])
        whole = shown.rstrip("\ufffd")
        num_cut += whole != shown
        assert text.startswith(whole), end
        assert shown.encode(), end
        assert with_marked_specials(ids[:end].tolist(), tokenizer) == shown, end
        assert "".join(TokenPieces(tokenizer).of(ids[:end]).to_pylist()) == shown, end
    assert num_cut > 0


@pytest.mark.parametrize("name", NAMES)
def test_responses_stop_at_the_tokenizers_end_token_without_other_files(name):
    tokenizer = real(name)
    assert stop_tokens(Path(tokenizer.name_or_path), tokenizer) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_ends_responses_is_found_at_the_token_that_completes_it(name):
    """However many tokens it is, and where they begin within it."""
    tokenizer, num_parts = real(name), 0
    for text in TEXTS.values():
        ids = ids_of(tokenizer, text)
        shown = [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
        for start in range(0, len(shown[-1]) - 3, 3):
            stop = shown[-1][start : start + 4]
            expected = next(end for end, before in enumerate(shown) if stop in before)
            sampling = SamplingParams(stop=(stop,), max_new_tokens=len(ids))
            request = GenerationRequest(0, np.zeros(1, np.int32), 0, sampling)
            batch = RowBatch([(0, request)], SimpleNamespace(device="cpu"), None, 1, tokenizer.decode)
            batch._tokens[0] = torch.tensor(ids)
            found = []
            for end in range(1, expected + 1):
                batch._lengths = np.array([end])
                found += batch._ends_in_stop(tokenizer.decode)
            assert found == [False] * (expected - 1) + [True], (text, stop)
            num_parts += len(ids_of(tokenizer, stop)) > 1
    assert num_parts > 10
