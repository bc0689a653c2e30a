"""Templates hold the papers' texts, leave problems untouched and are never put around a prompt twice."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from dapo_mega.data.templates import TEMPLATES, render, render_messages, templated_messages, with_template_arguments
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.errors import InputError


def test_dapo_is_the_papers_text() -> None:
    assert render("dapo", "1+1?") == (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n1+1?\n\nRemember to put your answer "
        'on its own line after "Answer:".'
    )


@given(st.sampled_from(sorted(TEMPLATES)), st.text())
def test_the_problem_stands_in_the_text_unchanged(template: str, problem: str) -> None:
    before, _, after = TEMPLATES[template].partition("{problem}")
    assert render(template, problem) == before + problem + after


@pytest.mark.parametrize("name", ["as_is", "none", "bare"])
def test_templates_without_text_add_nothing(name: str) -> None:
    assert render(name, r"\boxed{x} {problem} {} {0}") == r"\boxed{x} {problem} {} {0}"


def test_custom_text_may_hold_other_braces() -> None:
    assert render(r"Q: {problem} \boxed{} {x}", "{y}") == r"Q: {y} \boxed{} {x}"


@pytest.mark.parametrize("template", ["dapoo", "Solve it:", "{Problem}", ""])
def test_text_without_a_place_for_the_problem_is_refused(template: str) -> None:
    with pytest.raises(InputError, match="problem"):
        render(template, "1+1?")


@pytest.mark.parametrize("name", ["dapo", "qwen_math", "r1"])
def test_a_prompt_is_not_wrapped_twice(name: str) -> None:
    wrapped = render(name, "1+1?")
    with pytest.raises(InputError, match="as_is"):
        render(name, wrapped)
    assert render("as_is", wrapped) == wrapped


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
]


def render_prompt(prompt: object, template: str, chat_tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    return render_messages(templated_messages(prompt, template)[1], chat_tokenizer)


def test_the_last_user_turn_is_wrapped_and_turns_are_joined_by_newlines() -> None:
    assert render_prompt(CONVERSATION, "Q: {problem}") == "Be brief.\n2+2?\n4\nQ: 3+3?"
    assert CONVERSATION[3]["content"] == "3+3?"


def test_messages_with_from_and_value_are_read() -> None:
    assert render_prompt([{"from": "human", "value": "2+2?"}], "Q: {problem}") == "Q: 2+2?"


def test_arguments_reach_the_chat_template_if_it_reads_them() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = (
        "{% set at = 1 %}{% for m in messages %}{% generation %}{{ m.content }}{{ mood.name if mood }}"
        "{% endgeneration %}{% endfor %}"
    )
    arguments = {"mood": {"name": "!"}}
    given = with_template_arguments(copy.deepcopy(tokenizer), arguments)
    assert render_prompt("2+2?", "as_is", copy.deepcopy(given)) == "2+2?!"
    assert render_prompt("2+2?", "as_is", tokenizer) == "2+2?"
    assert with_template_arguments(tokenizer, {}) is tokenizer
    for name, said in (
        ("at", "does not read at, but mood;"),
        ("tools", "tools is not for you"),
        ("messages", "not for"),
    ):
        with pytest.raises(InputError, match=said):
            with_template_arguments(tokenizer, {**arguments, name: 1})
    tokenizer.chat_template = "{% unheard_of %}"  # What it reads cannot be told.
    assert with_template_arguments(tokenizer, arguments) is not tokenizer


def test_the_chat_template_gets_every_turn_and_opens_the_answer() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
    )
    text = render_prompt(CONVERSATION, "Q: {problem}", tokenizer)
    assert text == "<system>Be brief.<user>2+2?<assistant>4<user>Q: 3+3?<go>"
    assert render_prompt("2+2?", "as_is", tokenizer) == "<user>2+2?<go>"


def test_tools_are_shown_or_refused_and_the_generation_prompt_may_be_left_out() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}{% if add_generation_prompt %}<go>{% endif %}"
    messages, tools = [{"role": "user", "content": "2+2?"}], [{"type": "function", "function": {"name": "add"}}]
    assert render_messages(messages, tokenizer, tools, add_generation_prompt=False) == f"{tools}2+2?"
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert render_messages(messages, None, tools) == "2+2?"
    with pytest.raises(InputError, match="does not show tools"):
        render_messages(messages, tokenizer, tools)


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    with pytest.raises(InputError, match="chat_template"):
        render_prompt("2+2?", "as_is", build_byte_tokenizer())


@pytest.mark.parametrize(
    "prompt", [None, 3, [], ["text"], [{"role": "user"}], [{"role": "system", "content": "x"}], {"role": "user"}]
)
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(InputError):
        render_prompt(prompt, "as_is")
