"""What is shown of a dataset's prompts at the start, and the warnings about how they are made."""

import json
import re
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from dapo_mega.config import DatasetConfig, RunConfig, SftConfig
from dapo_mega.data.preview import (
    doubled_instruction,
    missing_instruction,
    preview_run,
    second_bos,
    stop_token_disagreement,
    with_marked_specials,
)
from dapo_mega.data.prompts import RenderedRow, first_rows
from dapo_mega.data.tokenizer import build_byte_tokenizer, load_tokenizer

TOKENIZER = build_byte_tokenizer()
CHAT = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}<s>assistant\n"


def adding_bos() -> PreTrainedTokenizerBase:
    """A tokenizer that reads special tokens in texts, and puts one in front."""
    tokenizer = build_byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    return tokenizer


def dataset(folder: Path, prompts: list[str], name: str = "data.jsonl", **options: object) -> DatasetConfig:
    rows = [{"prompt": prompt, "answer": "1", "response": "one"} for prompt in prompts]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"path": str(folder / name), "columns": {"ground_truth": "answer"}, "template": "as_is", **options}
    return DatasetConfig.model_validate(values)


def rows_of(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> list[RenderedRow]:
    return first_rows(config, tokenizer, 100)


def assert_warns(warning: str | None, pattern: str | None) -> None:
    """The warning is one line with this pattern; None: there is none."""
    if pattern is None or warning is None:
        assert warning is pattern is None
    else:
        assert re.search(pattern, warning)
        assert "\n" not in warning


def test_special_tokens_are_marked_and_text_that_looks_like_one_is_not() -> None:
    ids = [2, *TOKENIZER("a</s>\n")["input_ids"], 1]
    assert with_marked_specials(ids, TOKENIZER) == "⟦<s>⟧a</s>\n⟦</s>⟧"
    assert with_marked_specials(adding_bos()("a</s>é")["input_ids"], TOKENIZER) == "⟦<s>⟧a⟦</s>⟧é"


@pytest.mark.parametrize(
    ("extraction", "template", "prompts", "found"),
    [
        (
            "dapo",
            "as_is",
            ["1+1?", "End with\nAnswer: x. 2+2?"],
            r"1 of the first 2 prompts .*'Answer: \.\.\.'.*line 1",
        ),
        ("dapo", "dapo", ["1+1?"], None),
        (
            "boxed",
            "dapo",
            ["1+1?"],
            r"1 of the first 1 prompts do not ask for \\boxed\{\}, where reward.extraction=boxed",
        ),
        ("boxed", "qwen_math", ["1+1?"], None),
        ("r1", "r1", ["1+1?"], None),
        ("r1", "as_is", ["1+1?"], "<answer> tags"),
        ("gsm8k", "Q: {problem}", ["1+1?"], "####"),
        ("dapo", "bare", ["1+1?"], None),
        ("auto", "as_is", ["1+1?"], None),
        (None, "as_is", ["1+1?"], None),
    ],
)
def test_a_missing_instruction_is_named(extraction, template, prompts, found, tmp_path) -> None:
    config = dataset(tmp_path, prompts, template=template)
    assert_warns(missing_instruction(rows_of(config), config, extraction), found)


@pytest.mark.parametrize(
    ("template", "prompts", "found"),
    [
        (
            "dapo",
            ["1+1?", "2+2? Put your final answer within \\boxed{}."],
            r"1 of the first 2 prompts .*line 2.*'dapo'",
        ),
        ("qwen_math", ["Solve it. Answer: $Answer"], "says it again; set template=as_is"),
        ("as_is", ["1+1? Answer: "], None),
        ("Q: {problem}", ["1+1? Answer: "], None),
        ("dapo", ["1+1?"], None),
    ],
)
def test_a_doubled_instruction_is_named(template, prompts, found, tmp_path) -> None:
    config = dataset(tmp_path, prompts, template=template)
    assert_warns(doubled_instruction(rows_of(config), config), found)


def test_an_instruction_in_another_turn_counts_as_well(tmp_path) -> None:
    config = dataset(tmp_path, [""], template="dapo")
    turns = [{"role": "system", "content": "Use \\boxed{}."}, {"role": "user", "content": "1+1?"}]
    Path(config.path).write_text(json.dumps({"prompt": turns, "answer": 2}))
    assert_warns(doubled_instruction(rows_of(config), config), "1 of the first 1")


def test_two_tokens_that_begin_a_text_are_named(tmp_path) -> None:
    tokenizer = adding_bos()
    plain = dataset(tmp_path, ["1+1?", "<s>2+2?"])
    assert_warns(
        second_bos(rows_of(plain, tokenizer), tokenizer), "1 of the first 2 prompts begin with <s> twice .*line 2"
    )
    assert_warns(second_bos(rows_of(plain), TOKENIZER), None)
    chat = plain.model_copy(update={"chat_template": True})
    tokenizer.chat_template = CHAT
    assert_warns(second_bos(rows_of(chat, tokenizer)[:1], tokenizer), None)
    tokenizer.chat_template = "<s>" + CHAT
    assert_warns(second_bos(rows_of(chat, tokenizer), tokenizer), "2 of the first 2 prompts .* chat template")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        ({"config.json": 1, "generation_config.json": [0, 1]}, None),
        ({"config.json": None}, None),
        (
            {"config.json": 1, "generation_config.json": [0, 3]},
            r"</s> \(1\), but generation_config.json has .*\(0\), .*3",
        ),
        ({"config.json": 2}, r"but config.json has <s> \(2\); responses stop"),
    ],
)
def test_end_tokens_of_model_and_tokenizer_are_compared(files, found, tmp_path) -> None:
    for name, ids in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    assert_warns(stop_token_disagreement(tmp_path, TOKENIZER), found)


def test_a_prompt_of_each_dataset_is_shown_with_its_warnings(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    values = {"output_dir": "o", "num_steps": 1, "model": {"path": str(tmp_path)}}
    mixture = {
        name: dataset(tmp_path, [f"{name}?"], name, template=template).model_dump()
        for name, template in (("a.jsonl", "Answer: {problem}"), ("b.jsonl", "as_is"))
    }
    mixture = {name[0]: given for name, given in mixture.items()}
    data = {"mixture": mixture, "evaluation": {**mixture["a"], "path": str(tmp_path / "elsewhere.jsonl")}}
    text = preview_run(RunConfig.model_validate({**values, "data": data}), TOKENIZER, only_local=True)
    lines = text.splitlines()
    assert lines[:3] == [
        "first prompt of data.mixture.a, 16 tokens, special tokens in ⟦⟧:",
        "  | Answer: a.jsonl?",
        "first prompt of data.mixture.b, 8 tokens, special tokens in ⟦⟧:",
    ]
    assert [line.partition(" 1 of")[0] for line in lines[4:5]] == ["WARNING: data.mixture.b:"]
    assert lines[5].startswith("WARNING: the tokenizer in")
    tuning = {**values, "data": {"train": mixture["b"]}}
    lines = preview_run(SftConfig.model_validate(tuning), TOKENIZER).splitlines()
    assert lines[2:4] == [
        "response, 4 tokens, in the loss, divided by ·, special tokens in ⟦⟧:",
        "  | o·n·e·⟦</s>⟧",
    ]
    assert len(lines) == 5, "an instruction is not asked for where no reward reads it"


def test_of_a_conversation_each_token_in_the_loss_is_shown_by_role(tmp_path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = CHAT.replace("<s>assistant", "{% if add_generation_prompt %}<s>assistant") + "{% endif %}"
    tokenizer.split_special_tokens = False
    tokenizer.save_pretrained(tmp_path)
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "no"},
    ]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"chat": [*chat, *chat[1:]]}))
    train = {"path": str(tmp_path / "chat.jsonl"), "columns": {"messages": "chat"}, "template": "as_is"}
    data = {"train": {**train, "chat_template": True}, "loss_on": "last"}
    values = {"output_dir": str(tmp_path), "num_steps": 1, "model": {"path": str(tmp_path)}, "data": data}
    lines = preview_run(SftConfig.model_validate(values), load_tokenizer(str(tmp_path))).splitlines()
    assert lines[0].startswith("first system, user, assistant, user of data.train, ")
    assert lines[-2:] == ["assistant, 3 tokens, in the loss, divided by ·, special tokens in ⟦⟧:", "  | n·o·⟦</s>⟧"]
