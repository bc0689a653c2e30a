import json
from pathlib import Path

import pytest

from dapo_mega.rewards import extract_answer
from dapo_mega.rewards.verifier import AnswerVerifier
from tests.unit.rewards.growth import growing_too_fast


@pytest.fixture(scope="module")
def verifier():
    with AnswerVerifier(1, 5.0, "auto") as verifier:
        yield verifier


def test_real_responses_say_what_a_reader_finds():
    """Those of SmolLM2 to GSM8K and MATH-500 that state an answer, which was read by hand."""
    lines = (Path(__file__).parent / "real_responses.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    found = [extract_answer(each["response"], "auto") for each in read]
    assert found == [each["answer"] for each in read]


def test_what_is_said_about_an_answer_is_no_part_of_it(verifier):
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
    verdicts = verifier.verify([(response, truth) for truth, response, _ in cases])
    assert [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case[2]] == []


def test_the_value_counts_that_a_response_says_again_and_none_that_it_gives_up(verifier):
    """Ground truth, response, whether it is right."""
    cases = [
        # The same value again, another one, or a comment.
        ("3/4", "Answer: three quarters, i.e. 3/4", True),
        ("3/4", "Answer: three quarters, i.e. 4/3", False),
        ("3/4", "The answer is 3/4 of an hour, i.e. 30 minutes.", False),
        ("0.75", "The answer is 75%, that is, 3/4.", True),
        ("0.75", "The answer is 75%, that is, 3/5.", False),
        ("250", "The answer is a quarter of a thousand, namely 250 people.", True),
        ("90", "The answer is 1.5 hours, or equivalently 90 minutes.", True),
        ("144", "The answer is $12^2$, in other words $144$.", True),
        ("144", "The answer is $12^2$ (i.e. 142).", False),
        ("72", "The answer is 72, i.e. 24 more than 48.", True),
        ("9/4", "$\\frac{9}{4}$ or $2.25$", True),
        ("9/4", "$\\frac{9}{4}$ or $2.5$", False),
        ("3(4+5)", "\\boxed{3 (4+5)}", True),
        ("3", "\\boxed{3 (4+5)}", False),
        # What stands beside the value.
        ("1/3", "So it is $\\frac{1}{3}$, or approximately $0.333$.", True),
        ("4", "The minimum is 4, attained at x = 2.", True),
        ("2", "The minimum is 4, attained at x = 2.", False),
        ("3", "Thus $k=3$ for every $n \\ge 2$.", True),
        ("17", "There are 17, since 16 is even.", True),
        ("7", "The remainder is 7 when the number is divided by 9.", True),
        ("17", "There are 17 (8 + 9).", True),
        ("36", "Then 2x = 72 and x = 36.", True),
        ("8", "Then b = 4, and ab = 8.", True),
        ("17", "The answer is $17$. $\\blacksquare$", True),
        ("24", "\\boxed{\\text{The answer is } 24}", True),
        ("58", "答案是58或59。", False),
        # Words.
        ("13", "That makes thirteen lollipops.", True),
        ("12", "That makes thirteen lollipops.", False),
        ("-7", "The answer is negative seven.", True),
        ("0.5", "Answer: half", True),
        ("Tuesday", "So 100 days later the day is Tuesday.", True),
        ("Yes", "Yes, it is possible.", True),
        ("No", "No, such a number does not exist.", True),
        ("infinitely many", "There are infinitely many solutions.", True),
        ("A, C", "\\boxed{\\text{A, C}}", True),
        # Supposed, and denied by what is concluded.
        ("42", "Let x = 42 be an assumption. Then it fails, so there is no solution.", False),
        ("42", "Suppose the answer is 42. Then 42 would be prime, a contradiction.", False),
        ("42", "If x were 42, the sum would be odd. So this is impossible.", False),
        ("42", "x = 42 is extraneous. Therefore no such x exists.", False),
        ("42", "It would be 42 if the coin were fair, but it is not.", False),
        ("42", "None of the numbers up to 42 works.", False),
        ("42", "It is impossible that x = 42.", False),
        ("42", "With 42 students this cannot be done.", False),
        ("42", "The sum never equals 42.", False),
        ("42", "Is it 42? No.", False),
        ("42", "It could be anything from 1 to 42.", False),
        ("42", "假设 x = 42，则矛盾，所以无解。", False),
        ("42", "Si x = 42, contradiction, donc il n'y a pas de solution.", False),
        ("42", "Suppose x = 41. That is a contradiction. Hence $x = 42$.", True),
        ("42", "If x = 41 there is no solution, so x = 42.", True),
        ("42", "Thus, for 42 values of k the equation has no solution.", True),
        ("42", "So n = 42, as there is no solution for larger n.", True),
        ("no solution", "Suppose x = 4. Then 0 = 1. So there are no real solutions.", True),
        ("no solution", "There is one solution.", False),
        ("does not exist", "The left limit is 2, so the limit does not exist.", True),
        ("42", "There is no doubt that the answer is 42.", True),
        ("42", "Let x = 42; no.", False),
        ("42", "Nobody can get 42.", False),
        ("42", "not exceeding 42", False),
        ("42", "Answer: 42 (wrong), correct: 41", False),
        ("42", "至少为42", False),
        # Several amounts.
        ("36", "There are 36 pairs (6 × 6).", True),
        ("3.0\\times10^{-5}", "3.0 × 10⁻⁵ mol", True),
        ("\\frac{n(n-1)}{2}", "\\boxed{\\binom n2}", True),
        ("-1/2", "The slope is negative one half.", True),
        ("Saturday", "June 1 is a Saturday.", True),
        ("1/4", "A quarter.", True),
        ("150 minutes", "It takes 2 hours and 30 minutes.", True),
        ("30 minutes", "It takes 2 hours and 30 minutes.", False),
        ("3", "There are 5 boys and 3 girls.", True),
        ("42", "I guess 41 or 42.", False),
        ("7/20", "The answer is 7/20 (35%).", True),
        # Quoted, counted, calculated, marked.
        ("5", 'The answer is "5" or "6".', False),
        ("42", 'The answer is "42" is wrong.', False),
        ("16", "The answer is “16”.", True),
        ("5", "Hence there are \\(5\\) ordered pairs \\((a, b)\\).", True),
        ("5", "So there are 5 possible values of $x$.", True),
        ("n", "The sum of $n$ and $m$ is $n$.", True),
        ("-5", "The total is - 5", True),
        ("14", "There are 11 + 3 in one basket.", False),
        ("3", "There are 11 + 3 in one basket.", False),
        ("14", "It is 11 + 3.", False),
        ("14", "Answer: 11 + 3", True),
        ("1/2", "Half of it, so 1 / 2 of the cake.", True),
        ("x+3", "Zoe has x + 3 coins in each box.", True),
        ("10", "Finally he has 12 - 2 = ", False),
        ("42", "The incorrect answer is 42.", False),
        ("43", "#### 42\nWait, the answer is 43.", True),
        ("43", "The answer is 43.\n#### 42", False),
        ("3", "Three apples.", True),
        ("[2,5)", "Answer: [2, 5)", True),
        ("540", "So he runs 9*60=<<9*60=540>>540 meters", True),
        ("3200", "The third answer was 1400\nAltogether, the answers total 1800+1400= 3200", True),
        ("5", "The answer is 5.\n\nThe answer is $", True),
        ("10x + 9", "Then multiply it by x^2 + 10x + 9 once.", False),
        # Corrected.
        ("43", "The answer is 42. Actually, no, it is 43.", True),
        ("42", "The answer is 42. Actually, no, it is 43.", False),
        ("42", "\\boxed{42} Oops, I miscounted. Sorry, it should be $43$.", False),
        ("42", "The answer is 42. Hmm, that's wrong. It is 43.", False),
        ("42", "The answer is 42. Correction: it is 43.", False),
        ("42", "The answer is 42. Hmm, wait, this is wrong.", False),
        ("42", "The answer is 42. Wait, is it right? Yes, it is.", True),
    ]
    verdicts = verifier.verify([(response, truth) for truth, response, _ in cases])
    assert [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case[2]] == []


def test_what_follows_a_number_on_its_line_costs_no_more_than_its_length():
    def ten_lines(filling, length):
        line = "the answer is 1" + filling * (length // 10 // len(filling)) + "foo\n"
        return "\\boxed{1}\n" + 10 * line

    fillings = [" ", ", ", " (", " - ", " —", " and not"]
    fillings += [
        "i.e. 1 ",
        "(i.e. ",
        "/3 or ",
        " (1+1)",
        "is $1$ for ",
        "no such ",
        "so no ",
        "actually, ",
        "if ",
        "suppose ",
        " final",
        "答:共5天",
        " 1 of the 1 a",
    ]
    fillings += ["not ", "n't ", "(1, ", "are 1, ", "0.", "9.9", " million", "\u0661", "$1$ not ", "\\boxed{1} not "]
    fillings += [
        '"1" ',
        " - 1",
        "(1 - 1) a ",
        "1 values of $n$ ",
        "$1$ integers ",
        "\n#### 1",
        ")} ",
        "the answer ",
        "<<1=1",
    ]
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
        ("It grows 6 * 2 = 12 inches in 6 years.", "12 inches"),
        ("The total is 48 + 24 = 72 clips.", "72"),
        ("It is 10 cm (5 + 5) wide.", "10 cm"),
        ("The total is 2 x 160 = 4 x 80 = 320", "320"),
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


def test_bounds_units_and_signs_in_prose_are_part_of_what_it_states(verifier: AnswerVerifier) -> None:
    """Ground truth, response, whether it is right."""
    cases = [
        ("\\frac{3}{4}", "So the result is ¾.", True),
        ("90^\\circ", "So the angle is a right angle: $\\boxed{\\frac{\\pi}{2}}$ radians.", True),
        ("3\\sqrt{13}", "distance = √117 = 3√13 ≈ 10.82", True),
        ("(-\\infty, 2) \\cup (5, \\infty)", "Answer: all real x such that x < 2 or x > 5", True),
        ("(-\\infty, 2) \\cup (5, \\infty)", "Answer: $\\mathbb{R} \\setminus [2,5]$", True),
        ("\\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}", "The matrix is [[-1, 0], [0, -1]].", True),
        ("6 - 5i", "z = 6 − 5𝑖", True),
        ("\\text{Tuesday}", "100 days after Sunday is **Tuesday**.", True),
        ("Saturday", "Answer: It will be a Saturday.", True),
        ("25\\pi", "Area = 25π cm²", True),
        ("3:5", "The ratio of boys to girls is 3 to 5.", True),
        ("B", "因此正确答案是 B 选项。", True),
        ("16", "A resposta é 16 maçãs.", True),
        ("8", "$$\\bbox[5px, border: 2px solid black]{8}$$", True),
        ("8", "\\boxed{\\color{red}{8}}", True),
        ("8", "$\\boxed{8}$ is the final answer, as n = 8 satisfies 8 < 9.", True),
        ("8", "Answer - 8", True),
        ("135^\\circ", "Answer: $\\frac{3\\pi}{4}$", True),
        ("17", "\\begin{aligned} x &= 10+7 \\\\ &= 17 \\end{aligned}", True),
        ("17", "So there are 17 students in the class, which is more than the 15 desks.", True),
        ("36", "답: 36개", True),
        ("36", "\\boxed{\\textcolor{blue}{36}}", True),
        ("36", "\\boxed{\\Large 36}", True),
        ("36", "Thus $x = \\underline{36}$.", True),
        ("36", "\\(\\colorbox{yellow}{36}\\)", True),
        ("\\frac{5}{8}", "The probability is ⅝.", True),
        ("1\\frac{5}{8}", "1⅝", True),
        ("2\\sqrt{5}", "So AB = √20.", True),
        ("30^\\circ", "\\boxed{\\frac{\\pi}{6}}", True),
        ("a=2, b=3", "a = 2 and b = 3", True),
        ("(-\\infty,2)\\cup(2,\\infty)", "\\boxed{\\mathbb{R}\\setminus\\{2\\}}", True),
        ("\\begin{pmatrix} 2 & 1 \\\\ 0 & 3 \\end{pmatrix}", "The matrix is [[2, 1], [0, 3]].", True),
        ("2:7", "The ratio is 2 to 7.", True),
        ("D", "选项D正确。", True),
        ("Monday", "It was a Monday.", True),
        ("Monday", "The day of the week is Monday.", True),
        ("17", "Therefore the smallest such integer is 17, since 16 fails.", True),
        ("2.5 \\times 10^{8}", "2.5 × 10⁸ m/s", True),
        ("72", "Natalia sold 48 + 24 = 72 clips, hmm, but actually we need to double: 144.", False),
        ("72", "more than 72", False),
        ("72", "x > 72", False),
        ("72", "She has 50 apples and gets 22 => 72 apples", True),
        ("42", "He has $10 more than Eva with $20, so 10 + 20 = $30. In all he has 12 more, so 42.", True),
        ("C", "Either B or C.", False),
        ("60 \\text{ km/h}", "60 mph", False),
        ("5 \\text{ cm}", "5 inches", False),
        ("2^{100}-1", "\\boxed{1.2676506 \\times 10^{30}}", False),
        ("16", "उत्तर 16 नहीं है", False),
        ("16", "คำตอบไม่ใช่ 16", False),
        ("16", "答案大于16。", False),
        ("16", "至少16个", False),
        ("16", "Mindestens 16.", False),
        ("16", "au moins 16", False),
        ("16", "不超过16", False),
        ("8", "The problem asks for a number n with n > 8. I do not know.", False),
        ("8", "Final answer: 8 is impossible, so there is none.", False),
        ("8", "Almost 8.", False),
        ("8", "I'm unsure, perhaps 8 or so.", False),
        ("\\text{June 20}", "July 20", False),
        ("$50", "€50", False),
        ("$50", "50 cents", False),
        ("36", "Lily has fewer than 36 cookies.", False),
        ("36", "She has over 36.", False),
        ("36", "Nearly 36", False),
        ("36", "不到36", False),
        ("36", "超过36块", False),
        ("36", "大约比36多", False),
        ("36", "36より大きい", False),
        ("36", "menos de 36", False),
        ("36", "больше 36", False),
        ("36", "не менее 36", False),
        ("36", "plus de 36", False),
        ("36", "weniger als 36", False),
        ("36", "أكثر من 36", False),
        ("36", "36 से अधिक", False),
        ("36", "มากกว่า 36", False),
        ("36", "36 이상", False),
        ("36", "If she had 36 she would need more. I cannot determine it.", False),
        ("30^\\circ", "30 radians", False),
        ("$45", "£45", False),
        ("$45", "45 cents", False),
        ("14 days", "14 weeks", False),
        ("D", "Both C and D", False),
        ("March 5", "May 5", False),
        # What a value is measured by, and what it is compared with.
        ("150", "Thus the car travelled a total of 150 miles in 2.5 hours.", True),
        ("2.5", "Thus the car travelled a total of 150 miles in 2.5 hours.", False),
        ("3", "So 3 of the 5 children own a bicycle.", True),
        ("5", "So 3 of the 5 children own a bicycle.", False),
        ("12", "小明一共买了15支铅笔,比小红多12支。", False),
        ("15", "小明一共买了15支铅笔,比小红多12支。", True),
        ("5", "答:他们需要5天完成。", True),
        ("4", "答:他们需要5天完成。", False),
        # A base behind a box, an equation the other way round, letters that are no units, a unit that is not asked for.
        ("101_2", "In binary this is \\boxed{101}_2.", True),
        ("101_2", "In base 3 this is \\boxed{101}_{3}.", False),
        ("10", "Subtracting 2b, we get 10 = b", True),
        ("12", "Subtracting 2b, we get 10 = b", False),
        ("x=4", "Dividing by 3 gives 4 = x.", True),
        ("\\frac{1}{2} m v^2", "The energy is $\\frac{m v^2}{2}$.", True),
        ("\\frac{1}{2} m v^2", "The energy is $\\frac{1}{2}$.", False),
        ("1600", "She lifts 1,600 pounds.", True),
        ("16", "She lifts 1,600 pounds.", False),
        ("1600", "She pays $1,600.00", True),
        ("1600", "She pays $1,600.05", False),
        ("600", "She pays $1,600", False),
        # Cut off, or given up before a guess.
        ("15", "Let me think about $15$ again and", False),
        ("42", "We could not determine the answer; one might guess that it is 42, which is not shown.", False),
        ("100 \\text{ m}", "100 feet", False),
    ]
    verdicts = verifier.verify([(response, truth) for truth, response, _ in cases])
    wrong = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case[2]]
    assert wrong == []
