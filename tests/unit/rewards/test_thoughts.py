"""Tags of thoughts: which there are, whether a prompt ends in one, and what is said outside of them."""

import numpy as np

from dapo_mega.data.templates import render
from dapo_mega.data.tokenizer import build_byte_tokenizer, decoder
from dapo_mega.rewards import extract_answer
from dapo_mega.rewards.code import extract_code
from dapo_mega.rewards.thoughts import opened_thought, split, spoken
from dapo_mega.rollout.scoring import record_of
from dapo_mega.types import Prompt, Response, Trajectory
from tests.unit.rewards.growth import growing_too_fast

TAGS = [
    ("<think>", "</think>"),
    ("<Thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|think|>", "<|/think|>"),
    ("<|think|>", "<|end|><|begin|>assistant<|content|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]


def test_what_stands_in_a_thought_of_any_tags_is_not_said():
    for opening, end in TAGS:
        found = {
            "cut off": f"{opening}It may be \\boxed{{42}}\n#### 42\nThe answer is 42",
            "closed": f"{opening}Is it \\boxed{{7}}?{end} So \\boxed{{42}}",
            "opened by the prompt": f"Is it \\boxed{{7}}?{end} So \\boxed{{42}}",
            "two": f"{opening}a{end}{opening}\\boxed{{7}}{end}\\boxed{{42}}",
            "two, the last cut off": f"{opening}a{end}{opening}\\boxed{{42}}",
            "nothing said": f"{opening}\\boxed{{42}}{end}",
            "closed by another's tag": f"{opening}</other>[/other]{TAGS[TAGS[0][0] == opening][1]}\\boxed{{42}}",
        }
        answers = {name: extract_answer(text, "auto") for name, text in found.items()}
        right = {"closed", "opened by the prompt", "two"}
        assert answers == {name: "42" if name in right else None for name in found}, (opening, end)
        program = "```python\nprint('{}')\n```\n"
        assert extract_code(opening + program) is None, opening
        assert extract_code(f"Well.\n{opening}\n{program}") is None, opening
        assert extract_code(f"{opening}\n{program.format(1)}{end}\n{program.format(2)}") == "print('2')\n", opening
        # A program may hold tags, and a thought a block that nothing closes.
        tags = opening.strip() + end
        assert extract_code(f"{opening}so{end}\n" + program.format(tags)) == f"print('{tags}')\n", opening
        last = end[end.rfind("<") :] if end.endswith(">") else end
        last = "<|channel|>final<|message|>" if "final" in end else last
        assert extract_code(f"```python\nx\n{last}\n{program.format(3)}") == "print('3')\n", opening


def chat(text, end):
    return f"<|im_start|>system\nReason in [THINK][/THINK].<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n{end}"


def test_a_prompt_ends_in_a_thought_where_its_template_has_opened_one():
    asked = "<|im_start|>assistant\n"
    ends = {"": "", "<think>": "<think>", "<think>\n": "<think>", "<think>\n\n</think>\n\n": "", "<think></think>": ""}
    ends |= {"<think>\nOkay, ": "<think>", "Let me see. <think>Okay": "<think>", "<think>a</think>b<think>": "<think>"}
    ends |= {f"{opening} First,": opening.strip() for opening, _ in TAGS}
    ends |= {"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>": ""}
    users = [
        *(
            "1+1",
            "in",
            "What does <think> mean?",
            "Begin with <think>",
            "a <think>\n<reasoning> b ",
            "</think>",
            "◁think▷",
        ),
    ]
    for user in users:
        messages = [{"role": "system", "content": "Use <think>."}, {"role": "user", "content": user}]
        for end, tag in ends.items():
            text = "Use <think>." + chat(user.strip(), asked + end)
            assert opened_thought(text, messages, user) == tag, (user, end)
    # Without a chat template: the text behind the problem, where a line or a speaker begins.
    plain = {"Assistant: <think>": "<think>", "\n<think>\nOkay, ": "<think>", "\nAssistant: [THINK]Well,": "[THINK]"}
    plain |= {"\nThink within <think> tags.": "", "\nUse <think> and </think>.\nAssistant:": "", "": ""}
    plain |= {"\nUse <think> first.\nAssistant: <think>\n": "<think>", "Assistant: <think>\n</think>\n": ""}
    for end, tag in plain.items():
        for problem in ("1+1", "a", "What is <think>, in words?"):
            text = problem + end
            assert opened_thought(text, [{"role": "user", "content": text}], problem) == tag, text
        assert opened_thought("Question: 1+1 " + end) == tag, end
    r1 = render("r1", "What does <think> do?")
    assert opened_thought(r1, [{"role": "user", "content": r1}], "What does <think> do?") == "<think>"
    prompt = Prompt(0, chat("1+1", asked + "<think>\nOkay, "), np.zeros(1, np.int32), "2", {}, "1+1")
    response = Response(0, np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", 0)
    assert record_of(prompt, Trajectory.of(response), "so</think>2").whole_response == "<think>so</think>2"


def test_tags_that_are_special_tokens_stay_in_the_text():
    tokenizer = build_byte_tokenizer()
    for specials in (["[THINK]", "[/THINK]"], ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"], []):
        tokenizer.add_special_tokens({"additional_special_tokens": [*specials, "<|im_end|>"]})
        opening, end = TAGS[-1] if "<|channel|>" in specials else TAGS[5]
        tokenizer.split_special_tokens = False
        ids = tokenizer(f"{opening}It is \\boxed{{7}}{end}4<|im_end|></s>", add_special_tokens=False)["input_ids"]
        (text,) = decoder(tokenizer)([np.array(ids, np.int32)])
        assert spoken(text) == "4", text


def test_a_text_that_speaks_of_tags_is_read_on():
    said = split("It opens <think> but no more.\nScore: 3", at_start=True)
    assert said == ("It opens <think> but no more.\nScore: 3", "", False)
    assert split(" <think>Score: 3", at_start=True) == (" ", "<think>", False)
    assert split("x</think>\n<think>\nScore: 3", at_start=True) == ("\n", "<think>", True)


def test_tags_cost_no_more_than_their_length():
    units = ["<think>", "</think>", "<think></think>", "a<think>", "<|channel|>", ": ", "\n", "[THINK]:\t", "◁"]
    readers = [spoken, lambda text: split(text, at_start=True), lambda text: split(text, "<think>"), opened_thought]
    cases = [(reader, unit) for reader in readers for unit in units]
    assert growing_too_fast(lambda c, text: c[0](text), cases, lambda c, n: c[1] * (n // len(c[1]))) == {}
