import pytest

from dapo_mega.rewards import extract_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        # Where the answer stands: in tags, behind a word, in a box, or at the end.
        (r"So 3 \cdot 4 is clear. <answer>12</answer>", "12"),
        (r"<answer>Adding up, we get \boxed{12}.</answer>", "12"),
        ("<answer>12 eggs", "12 eggs"),  # an engine stopped at the closing tag
        ("We add.\n\nAnswer: 12 eggs", "12 eggs"),
        ("**Answer:** 12", "12"),
        ("The answer is $12$.", "12"),
        ("Hence the final answer is: 12. I hope it helps.", "12"),
        ("## Final Answer\n\n\\[\n\\frac{3}{4}\n\\]", r"\frac{3}{4}"),
        ("The final answer is:\n$$x = 7$$", "x = 7"),
        (r"Therefore $n = \boxed{12}$ eggs.", "12"),
        (r"Thus \fbox{12}", "12"),
        (r"Thus $\boxed 5$", "5"),
        ("We get $a = 3$, and so the area is $\\frac{9}{2}$.", r"\frac{9}{2}"),
        ("There are 3 boys and 4 girls, so 12 pairs.", "12"),
        ("The area of $ABC$ is 12.", "12"),
        ("She pays $1,250.50 in total.", "$1,250.50"),
        ("It grows 6 * 2 = 12 inches in 6 years.", "12"),
        ("so B must be right, hence (B).", "B"),
        (r"\frac{10}{9}", r"\frac{10}{9}"),
        ("x = 1 or x = 2", "x = 1 or x = 2"),
        # A percent sign belongs to the value, wherever it stands.
        (r"It is $\boxed{28}\%$.", r"28\%"),
        ("Answer: $28$ percent", r"28\%"),
        # Several values of one sentence are a list.
        (r"The roots are \boxed{2} and \boxed{5}.", "2, 5"),
        (r"$x = \boxed{2}$, $y = \boxed{5}$", "2, 5"),
        (r"\boxed{2} \quad \text{and} \quad \boxed{5}", "2, 5"),
        ("The solutions are $x = 2$ and $x = 5$.", "x = 2, x = 5"),
        (r"We find \boxed{5}. Checking again, \boxed{5}.", "5"),
        # The last statement is the one that counts.
        ("Answer: 3\nI was wrong.\nAnswer: 4", "4"),
        (r"\boxed{3}. Let me check. \boxed{4}", "4"),
        (r"\boxed{3}, wait, that is wrong: \boxed{4}", "4"),
        (r"\boxed{3} is what one gets first. Answer: 4", "4"),
        (r"Answer: 3. But after a second look, it is \boxed{4}.", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        (r"\boxed{12}. I hope the answer is correct.", "12"),
        ("Is my answer right? It is 12.", "12"),
    ],
)
def test_the_last_statement_of_an_answer_is_found(response: str, answer: str) -> None:
    assert extract_answer(response, "auto") == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        "I do not know.",
        r"<think>It is \boxed{12}, I think",  # the thought never ends
        r"<think>It is \boxed{12}.</think>",  # nothing is said after it
        r"<think>a</think><think>Answer: 12",
        r"Answer: 3 and so we conclude \boxed{12",  # cut off in the answer
        r"It is \boxed{}.",
        "<answer></answer>",
        "Answer:",
    ],
)
def test_a_response_that_states_nothing_has_no_answer(response: str) -> None:
    assert extract_answer(response, "auto") is None


def test_an_answer_is_looked_for_after_the_thoughts() -> None:
    response = "<think>First I thought \\boxed{3}. Answer: 3</think>\nSumming up, $x = 4$."
    assert extract_answer(response, "auto") == "x = 4"
