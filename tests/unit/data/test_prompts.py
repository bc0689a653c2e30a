"""Prompts and demonstrations: no answer lost, every drop counted, every refusal naming file and row."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dapo_mega.config import ColumnsConfig, DataConfig, DatasetConfig
from dapo_mega.data.prompts import (
    PromptDataset,
    check_dataset,
    first_rows,
    load_demonstrations,
    load_evaluation_prompts,
    load_prompts,
    load_training_prompts,
)
from dapo_mega.data.readers import read_rows
from dapo_mega.data.templates import render, render_messages
from dapo_mega.data.tokenizer import build_byte_tokenizer, build_character_tokenizer, load_tokenizer, num_embeddings
from dapo_mega.errors import InputError
from dapo_mega.rollout.group_state import dataset_fingerprint

PUBLIC_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
TOKENIZER = build_byte_tokenizer()


def _dataset(folder: Path, records: list[dict], **options: object) -> DatasetConfig:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = {"columns": {"ground_truth": "answer"}, "template": "as_is", **options}
    return DatasetConfig(path=str(path), **options)


def _load(config: DatasetConfig, max_prompt_tokens: int = 100_000, **options: str) -> PromptDataset:
    return load_prompts(config, TOKENIZER, max_prompt_tokens, **options)


def test_prompts_are_rendered_tokenised_and_numbered(tmp_path: Path) -> None:
    records = [{"prompt": f"{i}+1=?", "answer": i + 1, "from": "school"} for i in range(3)]
    columns = {"ground_truth": "answer"}
    data = _load(_dataset(tmp_path, records, template="Q: {problem}\nA:", columns=columns))
    assert [prompt.index for prompt in data.prompts] == [0, 1, 2]
    assert [prompt.ground_truth for prompt in data.prompts] == ["1", "2", "3"]
    for prompt, record in zip(data.prompts, records, strict=True):
        assert prompt.text == f"Q: {record['prompt']}\nA:"
        assert prompt.token_ids.dtype == "int32"
        assert TOKENIZER.decode(prompt.token_ids) == prompt.text


def test_files_that_name_a_data_source_still_load(tmp_path: Path) -> None:
    records = [{"prompt": "1+1=?", "answer": 2, "from": "school"}]
    for column in ("from", "absent"):
        columns = {"ground_truth": "answer", "data_source": column}
        (prompt,) = _load(_dataset(tmp_path, records, columns=columns)).prompts
        assert prompt.fields["from"] == "school", "it is there like every other column"


def test_many_prompts_keep_their_own_answers(tmp_path: Path) -> None:
    records = [{"prompt": "x" * (i % 7) + str(i), "answer": i} for i in range(1300)]
    data = _load(_dataset(tmp_path, records))
    assert [(TOKENIZER.decode(p.token_ids), p.ground_truth) for p in data.prompts] == [
        (record["prompt"], str(record["answer"])) for record in records
    ]


def test_the_first_of_equal_prompts_stays_and_contradictions_are_counted(tmp_path: Path) -> None:
    records = [("a", "1"), ("b", "2"), ("a", " 1 "), ("a", "3"), ("a", "5"), ("c", "4")]
    config = _dataset(tmp_path, [{"prompt": prompt, "answer": answer} for prompt, answer in records])
    data = _load(config)
    assert [(p.index, p.text, p.ground_truth) for p in data.prompts] == [(0, "a", "1"), (1, "b", "2"), (2, "c", "4")]
    assert (data.num_rows, data.num_duplicates, data.num_conflicting, data.num_long) == (6, 3, 2, 0)
    every = _load(config.model_copy(update={"deduplicate": False}))
    assert [prompt.text for prompt in every.prompts] == ["a", "b", "a", "a", "a", "c"]
    assert (every.num_duplicates, every.num_conflicting) == (0, 0)


def test_all_other_columns_stay_with_the_first_of_equal_prompts(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "meta": {"answer": "1", "level": {"of": 5}}, "share": 0.1, "big": 2**70, "none": None},
        {"prompt": "a", "meta": {"answer": "1", "level": {"of": 6}}},
        {"prompt": "b", "meta": {"answer": "1"}, "meta.answer": "2", "tags": [1, "x", [True]]},
    ]
    data = _load(_dataset(tmp_path, records, columns={"ground_truth": "meta.answer"}))
    assert [dict(prompt.fields) for prompt in data.prompts] == [
        {"meta": {"level": {"of": 5}}, "share": 0.1, "big": 2**70, "none": None},
        {"meta": {"answer": "1"}, "tags": [1, "x", [True]]},
    ]
    with pytest.raises(TypeError):
        data.prompts[0].fields["share"] = 0.2
    bare = _load(_dataset(tmp_path, [{"prompt": p.text, "answer": p.ground_truth} for p in data.prompts]))
    assert dataset_fingerprint(bare.prompts) == dataset_fingerprint(data.prompts)


def test_a_mixture_is_one_numbering_with_the_datasets_names(tmp_path: Path) -> None:
    mixture = {}
    for name, sources in (("school", ["", "", "book"]), ("contest", [""])):
        (tmp_path / name).mkdir()
        records = [{"prompt": f"{i}+1", "answer": 1, "from": source or None} for i, source in enumerate(sources)]
        config = _dataset(tmp_path / name, records, columns={"ground_truth": "answer", "data_source": "from"})
        mixture[name] = config.model_dump()
    data = load_training_prompts(DataConfig.model_validate({"mixture": mixture}), TOKENIZER)
    assert [(p.index, p.text, p.dataset, p.data_source) for p in data.prompts] == [
        (0, "0+1", "school", "school"), (1, "1+1", "school", "school"), (2, "2+1", "school", "book"),
        (3, "0+1", "contest", "contest"),
    ]  # fmt: skip
    assert {name: read.num_rows for name, read in data.datasets.items()} == {"school": 3, "contest": 1}
    mixture["contest"]["columns"]["prompt"] = "question"
    with pytest.raises(InputError, match=r"^data\.mixture\.contest: .*has no column 'question'"):
        load_training_prompts(DataConfig.model_validate({"mixture": mixture}), TOKENIZER)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), [1, float("nan")], {"a": 1}, None])
def test_an_answer_is_text_or_a_finite_number_or_the_row_is_named(value: object, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": value}]
    with pytest.raises(InputError, match="line 2: the ground truth must be text, a finite number or a list of them"):
        _load(_dataset(tmp_path, rows, columns={"ground_truth": "answer"}))


@pytest.mark.parametrize("value", ["hard", "0.5", True, None, float("nan"), float("inf"), [1]])
def test_a_difficulty_is_a_number_of_the_row_or_the_row_is_named(value: object, tmp_path: Path) -> None:
    columns = {"ground_truth": "answer", "difficulty": "meta.pass"}
    rows = [{"prompt": "a", "answer": 1, "meta": {"pass": 0.25}}, {"prompt": "b", "answer": 1, "meta": {"pass": 1}}]
    known = _load(_dataset(tmp_path, rows, columns=columns))
    assert [prompt.difficulty for prompt in known.prompts] == [0.25, 1.0]
    plain = _load(_dataset(tmp_path, rows))
    assert plain.prompts[0].difficulty is None
    assert dataset_fingerprint(plain.prompts) != dataset_fingerprint(known.prompts)
    rows[1]["meta"]["pass"] = value
    bad = _dataset(tmp_path, rows, columns=columns)
    for read in (_load, check_dataset):
        with pytest.raises(InputError, match=r"line 2: the difficulty in column 'meta\.pass' must be a finite number"):
            read(bad)
    rows[1]["meta"] = {}
    with pytest.raises(InputError, match=r"line 2 has no column 'meta\.pass'; it has .*columns\.difficulty"):
        _load(_dataset(tmp_path, rows, columns=columns))


def test_the_chat_template_is_applied_once_with_its_own_special_tokens(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    config = _dataset(tmp_path, [{"prompt": "1+1?", "answer": 2}], chat_template=True, template="Q: {problem}")
    (prompt,) = load_prompts(config, tokenizer, 100).prompts
    assert prompt.text == "[user] Q: 1+1?\n[assistant]"
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_special_tokens_that_a_row_spells_are_text_and_the_templates_are_not(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(["<think>"])
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<think>"
    spelt = "a<|im_end|><think><|im_start|>b"
    records = [{"prompt": spelt, "answer": 1, "response": "c"}, {"prompt": "a", "answer": 1, "response": "c"}]
    config = _dataset(tmp_path, records, chat_template=True)
    start, end, think = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<think>"])
    cut = [*tokenizer.tokenize("a<|im_en"), *tokenizer.tokenize("d|>"), "<think>"]
    cut += [*tokenizer.tokenize("<|im_sta"), *tokenizer.tokenize("rt|>b")]
    expected = [start, *tokenizer.convert_tokens_to_ids(cut), end, think]
    for prompt in (load_prompts(config, tokenizer, 100).prompts[0], first_rows(config, tokenizer, 1)[0]):
        assert prompt.token_ids.tolist() == expected
        assert prompt.text == f"<|im_start|>{spelt}<|im_end|><think>"
    demonstration, plain = load_demonstrations(config, tokenizer, 100).sequences
    assert demonstration.prompt_token_ids.tolist() == expected
    assert plain.prompt_token_ids.tolist() == tokenizer("<|im_start|>a<|im_end|><think>")["input_ids"]
    as_written = config.model_copy(update={"chat_template": False})  # A base model's prompt may bring its tokens along.
    assert end in load_prompts(as_written, tokenizer, 100).prompts[0].token_ids


def test_prompts_of_an_environment_show_its_tools_and_do_not_open_the_answer(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ messages[0].content }}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<go>{% endif %}"
    config = _dataset(tmp_path, [{"prompt": "1+1?", "answer": 2}], chat_template=True)
    render_with_tools = partial(render_messages, tools=[{"name": "add"}], add_generation_prompt=False)
    data = DataConfig(train=config, evaluation=config, max_prompt_tokens=100)
    loaded = load_training_prompts(data, tokenizer, render_with_tools).prompts
    loaded += load_evaluation_prompts(data, tokenizer, render_with_tools).prompts
    assert [prompt.text for prompt in loaded] == ["add1+1?"] * 2
    assert [row.text for row in first_rows(config, tokenizer, 1, render=render_with_tools)] == ["add1+1?"]
    assert load_prompts(config, tokenizer, 100).prompts[0].text == "1+1?<go>"


def test_a_long_prompt_is_refused_with_its_length_or_dropped_and_counted(tmp_path: Path) -> None:
    config = _dataset(tmp_path, [{"prompt": "1" * n, "answer": n} for n in (5, 11, 10)])
    with pytest.raises(
        InputError, match=r"line 2: the prompt is 11 tokens, over data.max_prompt_tokens=10; raise it, or set data.long"
    ):
        _load(config, 10)
    data = _load(config, 10, long_prompts="drop")
    held_out = DataConfig(train=config, evaluation=config, max_prompt_tokens=10)
    with pytest.raises(
        InputError, match=r"data.evaluation: .*x.jsonl, line 2: the prompt is 11 tokens, .*prompt_tokens=10"
    ):
        load_evaluation_prompts(held_out, TOKENIZER)
    assert [(p.index, p.ground_truth) for p in data.prompts] == [(0, "5"), (1, "10")]
    assert (data.num_rows, data.num_long) == (3, 1)
    with pytest.raises(InputError, match="all 3 prompts"):
        _load(config, 4, long_prompts="drop")


@pytest.mark.parametrize(
    ("value", "style", "expected"),
    [
        (27.0, "verbatim", "27.0"),
        ("  42\n", "verbatim", "42"),
        (["$k=1$"], "verbatim", "$k=1$"),
        (["1", "3"], "verbatim", "1, 3"),
        (r"So \boxed{1} or \boxed{\frac{1}{\sqrt{2}}} m", "boxed", r"\frac{1}{\sqrt{2}}"),
        ("3 <<1+2=3>>\n#### 2 no\n#### 1,450,000", "gsm8k", "1450000"),
        ("assert f(1) == 2\n", "unchecked", "assert f(1) == 2\n"),
        ({"inputs": ["1"], "outputs": ["2"]}, "unchecked", '{"inputs": ["1"], "outputs": ["2"]}'),
        (["assert f(1) == 2"], "unchecked", '["assert f(1) == 2"]'),
    ],
)
def test_ground_truths_are_taken_out_of_their_column(value: object, style: str, expected: str, tmp_path: Path) -> None:
    (prompt,) = _load(_dataset(tmp_path, [{"prompt": "?", "answer": value}], ground_truth_style=style)).prompts
    assert prompt.ground_truth == expected


@pytest.mark.parametrize(
    ("value", "style", "expected"),
    [
        (["1/2", "0.5"], "verbatim", '["1/2", "0.5"]'),
        ([1, 2.5], "verbatim", '["1", "2.5"]'),
        (["1/2"], "verbatim", "1/2"),
        ("1/2", "verbatim", "1/2"),
        (["#### 1,000", "#### 2"], "gsm8k", '["1000", "2"]'),
    ],
)
def test_a_list_may_hold_several_right_answers(value: object, style: str, expected: str, tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [{"prompt": "?", "answer": value}], ground_truth_style=style, several_answers="any")
    (prompt,) = _load(dataset).prompts
    assert prompt.ground_truth == expected


@pytest.mark.parametrize(
    ("value", "style"),
    [
        (None, "verbatim"),
        ("", "verbatim"),
        ([], "verbatim"),
        ({"a": 1}, "verbatim"),
        ("1", "gsm8k"),
        ("1", "boxed"),
        (r"\boxed{1", "boxed"),
        ("?!", "verbatim"),
    ],
)
def test_a_ground_truth_that_is_no_answer_is_one_line_with_its_row(value: object, style: str, tmp_path: Path) -> None:
    good = {"verbatim": "1", "gsm8k": "#### 1", "boxed": r"\boxed{1}"}[style]
    records = [{"prompt": "a", "answer": good}, {"prompt": "b", "answer": value}]
    with pytest.raises(InputError, match=r"x\.jsonl, line 2: ") as caught:
        _load(_dataset(tmp_path, records, ground_truth_style=style))
    assert "\n" not in str(caught.value)


def test_rows_that_ask_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows"):
        _load(_dataset(tmp_path, []))
    with pytest.raises(InputError, match="line 1: the prompt is empty"):
        _load(_dataset(tmp_path, [{"prompt": " ", "answer": 1}]))
    with pytest.raises(InputError, match="line 1: a prompt must be text"):
        _load(_dataset(tmp_path, [{"prompt": None, "answer": 1}]))
    with pytest.raises(InputError, match="line 1 has no column 'answer'; it has prompt, answr; did you mean 'answr'"):
        _load(_dataset(tmp_path, [{"prompt": "a", "answr": 1}]))


def test_an_unknown_template_is_refused_before_the_data_is_read() -> None:
    with pytest.raises(InputError, match="did you mean 'dapo'"):
        _load(DatasetConfig(path="absent.jsonl", template="dapoo"))


def test_characters_that_the_tokenizer_cannot_represent_are_refused(tmp_path: Path) -> None:
    config = _dataset(tmp_path, [{"prompt": "1+1=", "answer": 2}, {"prompt": "1*1=", "answer": 1}])
    with pytest.raises(InputError, match=r"line 2 has characters .*1<unk>1="):
        load_prompts(config, build_character_tokenizer("1+="), 10)


def test_tokens_without_an_embedding_are_refused_before_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_character_tokenizer("+=0123456789").save_pretrained(folder)
    rows = [{"prompt": "1+1=", "response": "2", "answer": 2}, {"prompt": "1+8=", "response": "9", "answer": 9}]
    config = _dataset(tmp_path, rows)
    for size, refused in ((16, None), (15, "line 2 has token 15 .*'9'"), (14, "line 2 has token 14 .*'8'")):
        num_embeddings.cache_clear()
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
        tokenizer = load_tokenizer(str(folder))
        if refused is None or size == 15:
            assert len(load_prompts(config, tokenizer, 10).prompts) == 2
        else:
            with pytest.raises(InputError, match=f"{refused}.*vocab_size is {size}, and the tokenizer has 16 tokens"):
                load_prompts(config, tokenizer, 10)
        if refused:
            with pytest.raises(InputError, match=refused):
                load_demonstrations(config, tokenizer, 10)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1}))
    num_embeddings.cache_clear()
    with pytest.raises(InputError, match=r"the end of a response is token 1 \('</s>'\)"):
        load_tokenizer(str(folder))


# Demonstrations ------------------------------------------------------------------------------------------------------


def test_a_demonstration_continues_the_prompt_of_a_rollout_and_ends(tmp_path: Path) -> None:
    records = [{"prompt": "1+1?", "response": "Answer: 2", "answer": 2}] * 2
    config = _dataset(tmp_path, records, template="dapo")
    demonstrations = load_demonstrations(config, TOKENIZER, 1000).sequences
    (prompt,) = _load(config).prompts
    assert len(demonstrations) == 2, "repeated demonstrations are kept"
    for demonstration in demonstrations:
        assert demonstration.prompt_token_ids.tolist() == prompt.token_ids.tolist()
        assert demonstration.response_token_ids[-1] == TOKENIZER.eos_token_id
        assert TOKENIZER.decode(demonstration.response_token_ids[:-1]) == "Answer: 2"
        assert demonstration.response_token_ids.dtype == "int32"


def test_a_demonstration_over_the_limit_counts_its_end_token(tmp_path: Path) -> None:
    config = _dataset(tmp_path, [{"prompt": "12", "response": "345"}])
    assert len(load_demonstrations(config, TOKENIZER, 6).sequences) == 1
    with pytest.raises(InputError, match="line 1: prompt and response are 6 tokens, over the limit of 5"):
        load_demonstrations(config, TOKENIZER, 5)


@pytest.mark.parametrize("response", ["", None, 3.5, ["x"]])
def test_a_demonstration_needs_a_text_to_imitate(response: object, tmp_path: Path) -> None:
    records = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": response}]
    if response == 3.5:
        records[1]["response"] = {"text": "b"}
    with pytest.raises(InputError, match="line 2: the response must be text"):
        load_demonstrations(_dataset(tmp_path, records), TOKENIZER, 100)


def test_demonstrations_need_rows_columns_and_known_characters(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows"):
        load_demonstrations(_dataset(tmp_path, []), TOKENIZER, 100)
    with pytest.raises(InputError, match="no column 'response'"):
        load_demonstrations(_dataset(tmp_path, [{"prompt": "a"}]), TOKENIZER, 100)
    tokenizer: PreTrainedTokenizerFast = build_character_tokenizer("ab")
    with pytest.raises(InputError, match="cannot represent"):
        load_demonstrations(_dataset(tmp_path, [{"prompt": "a", "response": "c"}]), tokenizer, 100)


# Public data ---------------------------------------------------------------------------------------------------------

PUBLIC = {
    "aime-2024.parquet": ("extra_info.raw_problem", "reward_model.ground_truth", "verbatim", 960, 30),
    "aime2024.json": ("prompt", "final_answer", "verbatim", 30, 30),
    "amc23.jsonl": ("problem", "answer", "verbatim", 40, 40),
    "gsm8k-train.jsonl": ("question", "answer", "gsm8k", 7473, 7473),
    "gsm8k-test.jsonl": ("question", "answer", "gsm8k", 1319, 1319),
    "math500.json": ("prompt", "final_answer", "verbatim", 500, 500),
    "minerva-math.jsonl": ("problem", "solution", "boxed", 272, 272),
    "olympiadbench.jsonl": ("question", "final_answer", "verbatim", 675, 675),
}


def _public(name: str) -> Path:
    path = PUBLIC_DATA / name
    if not path.is_file():
        pytest.skip(f"public data file {path} is not there")
    return path


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_data_is_read_without_losing_an_answer(name: str) -> None:
    prompt, truth, style, num_rows, num_prompts = PUBLIC[name]
    columns = ColumnsConfig(prompt=prompt, ground_truth=truth)
    config = DatasetConfig(path=str(_public(name)), columns=columns, ground_truth_style=style)
    data = _load(config)
    assert (data.num_rows, len(data.prompts)) == (num_rows, num_prompts)
    assert (data.num_duplicates, data.num_conflicting, data.num_long) == (num_rows - num_prompts, 0, 0)
    answers = {p.text: p.ground_truth for p in data.prompts}
    for row in read_rows(config):
        question, stored = row.value(prompt, ""), row.value(truth, "")
        question = question if isinstance(question, str) else question[0]["value"]
        stored = stored[0] if isinstance(stored, list) else stored
        answer = answers[render("dapo", question)]
        assert answer
        if style == "verbatim":
            assert answer == stored.strip()
        elif style == "gsm8k":
            assert int(answer) == int(stored.split("####")[1].replace(",", ""))
        else:
            last = stored.rpartition("\\boxed")[2]
            assert re.match(rf"\s*{{\s*{re.escape(answer)}\s*}}", last)


def test_prompts_that_hold_the_papers_instruction_are_read_as_they_are() -> None:
    path = str(_public("aime-2024.parquet"))
    as_stored = _load(DatasetConfig(path=path, template="as_is"))
    wrapped = _load(DatasetConfig(path=path, columns=ColumnsConfig(prompt="extra_info.raw_problem")))
    assert [p.text for p in as_stored.prompts] == [p.text for p in wrapped.prompts]
    assert [p.ground_truth for p in as_stored.prompts] == [p.ground_truth for p in wrapped.prompts]
    with pytest.raises(InputError, match=r"aime-2024\.parquet, row 0: .* wrapped twice; set template=as_is"):
        _load(DatasetConfig(path=path))
