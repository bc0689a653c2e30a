"""Conversations as demonstrations: the right tokens are in the loss, behind the prompts that the model would see."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dapo_mega.config import DatasetConfig
from dapo_mega.data.preview import with_marked_specials
from dapo_mega.data.prompts import Demonstration, check_dataset, first_demonstrations, load_demonstrations
from dapo_mega.data.tokenizer import load_tokenizer, stop_tokens
from dapo_mega.errors import InputError

from .test_conversations import CHATML, _chat_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "6 x 7?"}
MORE = {"role": "user", "content": "Sure? <|end|>"}
FIRST = {"role": "assistant", "content": "It is 42."}
SECOND = {"role": "assistant", "content": "Yes."}
CALL = {"name": "multiply", "arguments": {"a": 6, "b": 7}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "multiply", "content": "42"}
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}]
DROPS_THOUGHTS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def dataset(folder: Path, *rows: Any, **columns: str) -> DatasetConfig:
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(folder / "x.jsonl"), template="as_is", chat_template=True, columns=columns)


def learnt(tokenizer: Any, sequences: tuple[Demonstration, ...]) -> list[str]:
    """What of each sequence is in the loss, and in brackets what is not."""
    found = []
    for each in sequences:
        text = f"[{with_marked_specials(each.prompt_token_ids.tolist(), tokenizer)}]"
        for place, (i, is_in) in enumerate(zip(each.response_token_ids.tolist(), each.in_loss.tolist(), strict=True)):
            was_in = place == 0 or bool(each.in_loss[place - 1])
            text += "[" * (was_in and not is_in) + "]" * (is_in and not was_in) + with_marked_specials([i], tokenizer)
        found.append(text)
    return found


WHOLE = (
    "[⟦<|start|>⟧user\n6 x 7?⟦<|end|>⟧\n⟦<|start|>⟧assistant\n]It is 42.⟦<|end|>⟧"
    "[\n⟦<|start|>⟧user\nSure? <|end|>⟦<|end|>⟧\n⟦<|start|>⟧assistant\n]Yes.⟦<|end|>⟧"
)


def test_the_turns_of_a_conversation_are_learnt_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path)
    conversation = [USER, FIRST, MORE, SECOND]
    last = WHOLE.replace("]It is 42.⟦<|end|>⟧[", "It is 42.⟦<|end|>⟧")
    cases: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
        ({"chat": [*conversation, USER]}, {"messages": "chat"}, "all", WHOLE),
        ({"chat": json.dumps(conversation)}, {"messages": "chat"}, "all", WHOLE),
        ({"chat": conversation}, {"messages": "chat"}, "last", last),
        ({"prompt": [USER], "response": conversation[1:]}, {}, "all", WHOLE),
        ({"prompt": "6 x 7?", "response": conversation[1:]}, {}, "all", WHOLE),
        ({"prompt": conversation[:3], "response": [SECOND]}, {}, "all", last),
        ({"prompt": [USER], "response": conversation[1:]}, {}, "last", last),
    ]
    for row, columns, loss_on, expected in cases:
        config = dataset(tmp_path, row, **columns)
        check_dataset(config, has_responses=True)
        loaded = load_demonstrations(config, tokenizer, 999, loss_on=loss_on)
        assert learnt(tokenizer, loaded.sequences) == [expected], (row, loss_on)


def test_a_template_that_drops_thinking_makes_a_sequence_of_each_turn(tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path, DROPS_THOUGHTS)
    conversation = [USER, {**FIRST, "reasoning_content": "Six sevens."}, {**MORE, "content": "Sure?"}, SECOND]
    config = dataset(tmp_path, {"chat": conversation}, messages="chat")
    begin = "[⟦<|start|>⟧user\n6 x 7?⟦<|end|>⟧\n⟦<|start|>⟧assistant\n"
    assert learnt(tokenizer, load_demonstrations(config, tokenizer, 999).sequences) == [
        begin + "]<think>Six sevens.</think>It is 42.⟦<|end|>⟧",
        begin + "It is 42.⟦<|end|>⟧\n⟦<|start|>⟧user\nSure?⟦<|end|>⟧\n⟦<|start|>⟧assistant\n]Yes.⟦<|end|>⟧",
    ]


def test_what_a_template_does_not_show_is_refused_with_the_row(tmp_path: Path) -> None:
    opens = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    hides = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    thinking = {**FIRST, "content": "<think>Six sevens.</think>It is 42."}
    strips = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    cases: list[tuple[str, list[dict[str, Any]], str]] = [
        (opens, [USER, FIRST], "opens a turn with .* and writes it otherwise"),
        (hides, [USER, CALLING, RESULT, FIRST], "drops, alters or moves what a message of role tool says"),
        (CHATML, [USER, CALLING], "does not show a call .*multiply"),
        (strips, [USER, thinking], "does not show the thinking"),
        (CHATML, [USER, {**FIRST, "content": "It<|end|> is"}], "goes on behind a token that ends it"),
        (CHATML, [USER], "no message of role assistant"),
        (CHATML, [USER, {**CALLING, "tool_calls": [{"name": "x", "arguments": "{"}]}], "needs a name and arguments"),
    ]
    for template, conversation, message in cases:
        config = dataset(tmp_path, {"chat": [USER, FIRST]}, {"chat": conversation}, messages="chat")
        with pytest.raises(InputError, match=rf"line [12]: .*{message}"):
            load_demonstrations(config, _chat_tokenizer(tmp_path, template), 999)
    config = dataset(tmp_path, {"chat": [USER, FIRST]}, messages="chat")
    for update, message in (({"chat_template": False}, "chat_template: true"), ({"template": "dapo"}, "set as_is")):
        with pytest.raises(InputError, match=message):
            check_dataset(config.model_copy(update=update), has_responses=True)


def test_long_sequences_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path)
    long = {"chat": [{**USER, "content": "x" * 99}, FIRST]}
    config = dataset(tmp_path, {"chat": [USER, FIRST, MORE, SECOND]}, {"chat": [USER, SECOND]}, long, messages="chat")
    limit = len(load_demonstrations(config, tokenizer, 999).sequences[0]) - 3
    with pytest.raises(InputError, match=rf"line 1: the conversation is {limit + 3} tokens, over the limit"):
        load_demonstrations(config, tokenizer, limit)
    dropped, cut = (load_demonstrations(config, tokenizer, limit, long_rows) for long_rows in ("drop", "cut"))
    assert (dropped.num_rows, dropped.num_dropped, dropped.num_cut) == (3, 2, 0)
    assert (cut.num_rows, cut.num_dropped, cut.num_cut) == (3, 1, 1)
    assert learnt(tokenizer, cut.sequences)[0] == WHOLE.removesuffix("s.⟦<|end|>⟧")
    assert learnt(tokenizer, cut.sequences)[1:] == learnt(tokenizer, dropped.sequences)
    with pytest.raises(InputError, match="all rows"):
        load_demonstrations(config, tokenizer, 4, "drop")


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "smollm2", "gemma3", "deepseek_v3"])
def test_published_templates_show_the_turns_that_are_learnt(name: str, tmp_path: Path) -> None:
    folder = Path(os.environ.get("DAPO_MEGA_TOKENIZERS", "")) / name
    if not os.environ.get("DAPO_MEGA_TOKENIZERS") or not folder.is_dir():
        pytest.skip(f"no tokenizer {name}: set DAPO_MEGA_TOKENIZERS to a folder that has it")
    tokenizer = load_tokenizer(str(folder))
    more = {**MORE, "content": "Sure?"}
    rows = [{"chat": [USER, FIRST, more, SECOND]}]
    if name == "qwen3":
        rows.append({"chat": [USER, CALLING, RESULT, FIRST], "tools": TOOLS})
    config = dataset(tmp_path, *rows, messages="chat", tools="tools")
    stops = {*stop_tokens(folder, tokenizer)}
    for row in first_demonstrations(config, tokenizer, None):
        said = [tokenizer.decode(s.token_ids[:-1]) for sequence in row.sequences for s in sequence if s.in_loss]
        assert "It is 42." in (said[0] + said[1]), said
        assert all("Sure" not in text and "6 x 7" not in text for text in said)
        turns = [span for sequence in row.sequences for span in sequence if span.in_loss]
        assert len(turns) == 2
        assert all(len(stops.intersection(span.token_ids)) == 1 for span in turns)
        for sequence in row.sequences:
            ids = [i for span in sequence for i in span.token_ids]
            begun = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=False, tools=None)
            assert row.where.endswith("line 2") or tokenizer.decode(ids).startswith(begun[:20])
