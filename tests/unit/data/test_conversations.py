"""Conversations as prompts and responses: read as what they are or refused with their row, and ended once."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dapo_mega.config import DatasetConfig
from dapo_mega.data.preview import turn_without_stop
from dapo_mega.data.prompts import (
    PromptDataset,
    check_dataset,
    first_demonstrations,
    first_rows,
    load_demonstrations,
    load_prompts,
)
from dapo_mega.data.tokenizer import build_byte_tokenizer, build_character_tokenizer, load_tokenizer
from dapo_mega.errors import InputError

TOKENIZER = build_byte_tokenizer()


def _dataset(folder: Path, records: list[dict], **options: object) -> DatasetConfig:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DatasetConfig(path=str(path), **{"columns": {"ground_truth": "answer"}, "template": "as_is", **options})


def _load(config: DatasetConfig) -> PromptDataset:
    return load_prompts(config, TOKENIZER, 1000)


CHATML = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "6 x 7?"}
ASSISTANT = {"role": "assistant", "content": "It is 42."}


def _chat_tokenizer(folder: Path, template: str = CHATML, stops: tuple[str, ...] = ("</s>", "<|end|>")) -> Any:
    """Saved in `folder`, where generation ends at the tokens `stops`."""
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|end|>"]})
    tokenizer.chat_template = template
    tokenizer.split_special_tokens = False
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_tokenizer(str(folder))


MESSAGES_AS_TEXT = [
    json.dumps([USER]),
    " \ufeff" + json.dumps([USER], indent=1),
    str([USER]),
    json.dumps(USER),
    json.dumps(json.dumps([USER])),
    json.dumps([{"from": "human", "value": "6 x 7?"}]),
    '[{"role": "user", "content": "6 x 7?", "name": null}]',
]
NOT_MESSAGES = ["[1, 2] and [3, 4]?", '{"role": 1, "content": 2} is a dict. What is its length?', '[{"a": 1}]', "[]"]


def test_messages_that_are_written_as_text_are_messages(tmp_path: Path) -> None:
    texts = [*MESSAGES_AS_TEXT, *NOT_MESSAGES]
    config = _dataset(tmp_path, [{"prompt": text, "answer": 42} for text in texts], deduplicate=False)
    assert [prompt.problem for prompt in _load(config).prompts] == ["6 x 7?"] * len(MESSAGES_AS_TEXT) + NOT_MESSAGES


REFUSED_PROMPTS = [
    (json.dumps([USER, {**USER, "content": 7}]), "a message must be a record"),
    (json.dumps([USER])[:-3], "neither JSON nor a Python list"),
    (str([USER]).replace("}", "}\n {'a': 1}"), "neither JSON nor a Python list"),
    (f"array({[USER]}, dtype=object)", "neither JSON nor a Python list"),
    (json.dumps({"messages": [USER]}), "a message must be a record"),
    (json.dumps([[USER]]), "a message must be a record"),
    (json.dumps([USER, ASSISTANT]), "role 'assistant' .'It is 42.'., which would be shown to the policy"),
    ([USER, ASSISTANT], "role 'assistant'"),
    ([USER, {"role": "model", "content": ""}], "role 'model'"),
    ([USER, ASSISTANT, {"role": "system", "content": "Be brief."}], "role 'assistant'"),
    ([{"from": "human", "value": "?"}, {"from": "gpt", "value": "42"}], "role 'assistant'"),
    ("\ud83d?", "half of a surrogate pair"),
    ([{"role": "user", "content": "\ude00"}], "half of a surrogate pair"),
    (float("nan"), "got NaN"),
    (None, "got null"),
]


def test_a_prompt_that_would_be_misread_is_refused_with_its_row(tmp_path: Path) -> None:
    for prompt, message in REFUSED_PROMPTS:
        config = _dataset(tmp_path, [{"prompt": "?", "answer": 1}, {"prompt": prompt, "answer": 42}])
        for read in (_load, check_dataset):
            with pytest.raises(InputError, match=rf"x\.jsonl, line 2.*{message}") as caught:
                read(config)
            assert "\n" not in str(caught.value), prompt
    (prompt,) = _load(
        _dataset(tmp_path, [{"prompt": [USER, ASSISTANT, {**USER, "content": "And?"}], "answer": 1}])
    ).prompts
    assert prompt.problem == "And?"


def test_half_of_a_surrogate_pair_is_refused_wherever_it_is_used(tmp_path: Path) -> None:
    good = {"prompt": "?", "answer": "1", "response": "b", "data_source": "c"}
    for column in ("answer", "data_source", "response"):
        config = _dataset(tmp_path, [good, {**good, "prompt": "!", column: "\ud83d"}])
        with pytest.raises(InputError, match="line 2 holds half of a surrogate pair"):
            load_demonstrations(config, TOKENIZER, 99) if column == "response" else _load(config)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML, "no system role"),
        ("{{ messages[5]['content'] + 'x' }}", "undefined|no element"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{% for %}", "."),
    ],
)
def test_a_chat_template_that_fails_is_one_line_with_the_row(template: str, reason: str, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    config = _dataset(tmp_path, [{"prompt": [system, USER], "answer": 42, "response": "x"}], chat_template=True)
    tokenizer = _chat_tokenizer(tmp_path, template)
    reads = (lambda: load_prompts(config, tokenizer, 99), lambda: load_demonstrations(config, tokenizer, 99))
    for read in (*reads, lambda: first_rows(config, tokenizer, 1)):
        with pytest.raises(InputError, match=rf"line 1: .*chat template .*roles system, user .*({reason})") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_text_that_the_tokenizer_fails_at_is_one_line_with_the_row(tmp_path: Path) -> None:
    tokenizer = build_character_tokenizer("ab")
    broken = json.loads(tokenizer.backend_tokenizer.to_str())
    broken["model"]["unk_token"] = "absent"
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(broken))
    records = [{"prompt": "a" * (i % 9) + "b" * (i // 9), "answer": 1} for i in range(1, 600)]
    with pytest.raises(InputError, match="line 561: the tokenizer cannot read the text"):
        load_prompts(_dataset(tmp_path, [*records[:560], {"prompt": "c", "answer": 1}, *records]), tokenizer, 99)


def test_a_demonstration_ends_once_with_what_ends_a_turn(tmp_path: Path) -> None:
    given = [
        "4 2",
        "4 2 ",
        "4 2<|end|>",
        "4 2<|end|>\n",
        "4 2</s>",
        "4 2<|end|></s>",
        [{**ASSISTANT, "content": "4 2"}],
    ]
    given += [json.dumps([{**ASSISTANT, "content": "4 2"}])]
    config = _dataset(tmp_path, [{"prompt": [USER], "response": response} for response in given], chat_template=True)
    (tmp_path / "model").mkdir()
    for stops, end in ((("</s>", "<|end|>"), "<|end|>"), (("</s>",), "</s>")):
        tokenizer = _chat_tokenizer(tmp_path / "model", stops=stops)
        found = [row.response_token_ids.tolist() for row in load_demonstrations(config, tokenizer, 99).sequences]
        shown = first_demonstrations(config, tokenizer, 99)
        assert [row.sequences[0][-1].token_ids for row in shown] == found
        assert bool(turn_without_stop(config, tokenizer)) == (end == "</s>")
        texts = [tokenizer.decode(ids) for ids in found]
        expected = [f"4 2{end}", f"4 2 {end}", *[f"4 2{end}"] * 6]
        if end == "</s>":  # What ends no response is part of it.
            expected[2:6] = ["4 2<|end|></s>", "4 2<|end|>\n</s>", "4 2</s>", "4 2<|end|></s>"]
        assert texts == expected


def test_a_turn_that_ends_with_plain_text_is_named_with_what_stops_responses(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n###\n{% endfor %}"
    config = _dataset(tmp_path, [{"prompt": "6 x 7?", "answer": "42"}], chat_template=True)
    said = turn_without_stop(config, _chat_tokenizer(tmp_path, template, ("</s>",)))
    assert "ends a turn with '###', 3 tokens of plain text, at which no response stops, but at </s> (1)" in str(said)
    assert "set rollout.stop to this text" in str(said)
    assert turn_without_stop(config, _chat_tokenizer(tmp_path, template, ("</s>",)), ["Q:", "##"]) is None
    assert turn_without_stop(config, _chat_tokenizer(tmp_path, template, ("</s>",)), ["#\n"]) is not None
    nothing = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert turn_without_stop(config, _chat_tokenizer(tmp_path, nothing, ("</s>",))) is None


def test_a_response_that_goes_on_behind_its_end_is_refused(tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path)
    for response, message in {
        "4<|end|>2": "goes on",
        "<|end|>": "nothing but",
        json.dumps([USER]): "one message",
    }.items():
        config = _dataset(tmp_path, [{"prompt": "?", "response": response}], chat_template=True)
        with pytest.raises(InputError, match=f"line 1: .*{message}"):
            load_demonstrations(config, tokenizer, 99)
