from contextlib import closing

import pytest

from dapo_mega.rewards import extract_answer
from dapo_mega.rewards.verifier import AnswerVerifier
from tests.unit.rewards.growth import growing_too_fast


def test_what_is_said_about_an_answer_is_no_part_of_it():
    """Ground truth, response, whether it is right."""
    cases = [
        ("42", "$\\boxed{42}$\n\nNote that the answer is larger than 7.", True),
        ("42", "$\\boxed{42}$\n\nLet me double check the answer: 6*7 = 42. ✓", True),
        ("42", "$\\boxed{42}$. This answer was checked with x = 7.", True),
        ("42", "\\boxed{41} Wait. Final answer: 42", True),
        ("42", "\\boxed{42} Wait. Final answer: 41", False),
        ("72", "The answer is 72, so she has enough.", True),
        ("72", "The answer is 72, which is the total", True),
        ("72", "The answer is 72 (6 dozen)", True),
        ("72", "The answer is 72 — she has enough", True),
        ("72", "The answer is **72** clips in total, with 48 in April", True),
        ("72", "The answer is 72 and not 48.", True),
        ("48", "The answer is 72, not 48.", False),
        ("48", "The answer is 72, which is more than 48", False),
        ("5", "The answer is 3, and 5", False),
        ("3, 5", "The answer is 3, and 5", True),
        ("1,000", "The answer is 1,000 dollars.", True),
        ("58", "答案是58。", True),
        ("58", "<answer>58。</answer>", True),
        ("58", "最终答案是58个。", True),
        ("58", "所以小明一共有58个苹果。", True),
        ("59", "所以小明一共有58个苹果。", False),
        ("y=2", "\\boxed{x=2}", False),
        ("y=2x+1", "\\boxed{x=2x+1}", False),
        ("(x,y)=(1,2)", "\\boxed{(y,x)=(1,2)}", False),
        ("x=4, x=-6", "\\boxed{y=4, y=-6}", False),
        ("x=4, x=-6", "\\boxed{x_1=4, x_2=-6}", True),
        ("3-4i", "\\boxed{3{-}4\\mathrm{i}}", True),
        ("120", "\\boxed{{10\\choose 3}}", True),
        ("x=2", "\\boxed{2}", True),
        ("y=x/2", "\\boxed{x=2y}", True),
        ("44", "\\boxed{44} \\boxed{}", False),
        ("44", "#### 44", True),
        # Denied.
        ("42", "The answer isn't 42.", False),
        ("42", "The answer can't be $42$.", False),
        ("42", "It is not \\boxed{42}.", False),
        ("42", "\\boxed{42}, not \\boxed{43}", True),
        ("42", "The answer is not 41, it is 42.", True),
        ("42", "Die Antwort ist nicht 42.", False),
        ("42", "La réponse n'est pas 42.", False),
        ("42", "答案不是42。", False),
        ("42", "答案是42，不是43。", True),
        ("42", "42 is not the answer.", False),
        ("43", "It is neither 41 nor 43.", False),
        ("42", "It is not the case that the answer is 42.", False),
        ("42", "I don't think that the answer is $42$.", False),
        ("42", "I don't think so. The answer is 42.", True),
        ("B", "The answer is not (B).", False),
        ("B", "The answer is not (A). It is (B).", True),
        ("42", "\\boxed{42}\n\nWe check our answer: 42/6 = 7.", True),
        ("72", "The answer is 72; she has 5 left.", True),
        ("72", "The answer is 72: 48 in April and 24 in May.", True),
        ("72", "The answer is 72, 48 of them from April.", True),
        ("1:2:3", "The ratio is 2:4:6.", True),
        ("9", "It is 9 rather than 8.", True),
        ("9", "The answer is 9 boxes in 3 rows.", True),
        ("9", "答えは9ではない。", False),
        (r"12\pi", "The area is 12π square units.", True),
        (r"\sqrt{5}", "The distance is sqrt(5).", True),
        ("y=2x+1", "So the line is y = 2x + 1.", True),
        ("2", "So x = 2 or x = 3.", False),
        # Other languages and digits.
        ("42", "La respuesta es 42 manzanas.", True),
        ("42", "A resposta é 42.", True),
        ("42", "答えは42です。", True),
        ("42", "정답은 42입니다.", True),
        ("42", "الإجابة: ٤٢", True),
        ("42", "उत्तर ४२ है।", True),
        # More than the last number.
        ("B", "The answer is option B.", True),
        ("(3, 4)", "So the point is (3, 4).", True),
        ("2, 3", "The roots are 2 and 3.", True),
        ("3", "The roots are 2 and 3.", False),
        ("3.4 million", "There are 3.4 million people.", True),
        ("4:30 p.m.", "They arrive at 4:30 a.m.", False),
        ("17_8", "In base 8 this is 17_8.", True),
        ("4/11", "This is 0.\\overline{36}.", True),
    ]
    with closing(AnswerVerifier(1, 5.0, "auto")) as verifier:
        verdicts = verifier.verify([(response, truth) for truth, response, _ in cases])
    assert [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case[2]] == []


def test_what_follows_a_number_on_its_line_costs_no_more_than_its_length():
    def ten_lines(filling, length):
        line = "the answer is 1" + filling * (length // 10 // len(filling)) + "foo\n"
        return "\\boxed{1}\n" + 10 * line

    fillings = [" ", ", ", " (", " - ", " —", " and not"]
    fillings += ["not ", "n't ", "(1, ", "are 1, ", "0.", "9.9", " million", "\u0661", "$1$ not ", "\\boxed{1} not "]
    assert growing_too_fast(lambda _, text: extract_answer(text, "auto"), fillings, ten_lines, length=9_000) == {}


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
