import itertools
import json

import pytest

from dapo_mega.rewards import AnswerVerifier, validate_ground_truth
from dapo_mega.rewards.grading import Grader, gold_answers
from dapo_mega.rewards.structure import readings
from tests.unit.rewards.answers import answers_match
from tests.unit.rewards.growth import QUADRATIC, growing_too_fast


@pytest.mark.parametrize(
    ("candidate", "truth"),
    [
        # Signs of decimals and thousands.
        ("3,5", "3.5"),
        ("0,125", "1/8"),
        ("1.234,5", "1234.5"),
        ("12 500", "12500"),
        ("12{,}500", "12,500"),
        ("1,5; 2,5", "2.5, 1.5"),
        ("3 1/2", "3.5"),
        ("seven", "7"),
        # Percent, degrees, units, money.
        (r"15\%", "15"),
        ("15", r"15\%"),
        ("15 percent", "0.15"),
        ("0.15", r"15\%"),
        (r"40^\circ", "40"),
        ("40 degrees", r"40^{\circ}"),
        ("2.5 km", "2500 m"),
        (r"12 \text{ cm}^2", "12"),
        ("12 square meters", r"12\text{ m}^2"),
        ("$18 per day", r"\$18"),
        ("about 18 dollars", "18"),
        # Repeating decimals are fractions; digits of other scripts.
        (r"\frac{4}{11}", r"0.\overline{36}"),
        (r"0.\dot{3}\dot{6}", r"\frac{4}{11}"),
        ("0.(36)", "4/11"),
        (r"0.1\bar{6}", r"\frac16"),
        (r"0.\dot{1}4285\dot{7}", r"\frac17"),
        ("0.3636...", r"0.\overline{36}"),
        (r"0{,}\overline{3}", "1/3"),
        (r"0.\overline{9}", "1"),
        (r"16.\overline{6}\%", r"\frac{1}{6}"),
        ("0.3\u0307", "1/3"),
        ("\uff14\uff12", "42"),
        ("\uff0d\uff13\uff0e\uff15", "-3.5"),
        ("\u0664\u0662", "42"),
        # Bases, ratios, times of day.
        (r"1101_{\text{two}}", "1101_2"),
        ("(1101)_2", "1101_{2}"),
        ("1101 base 2", "1101_2"),
        ("17_{10}", "17"),
        ("6:10", "3:5"),
        ("18:32", "9:16"),
        ("1e-3", "10^{-3}"),
        ("3 to 5", "3:5"),
        ("2:4:6", "1:2:3"),
        (r"7{:}30", "7:30"),
        (r"7\mathbin{:}30", "7:30"),
        (r"7\!:\!30", "7:30"),
        (r"3{\,:\,}4{:}5", "3:4:5"),
        (r"3 \mathrel{:} 5", "3:5"),
        (r"7\text{:}30", "7:30"),
        (r"\text{12{:}45}", "12:45"),
        (r"2{\,}500", "2500"),
        (r"0{,}001", "0.001"),
        (r"12{,}\!345", "12345"),
        (r"3{.}\!14", "3.14"),
        (r"(2{,}\,3)", "(2,3)"),
        (r"\{1{,} 2\}", r"\{1,2\}"),
        (r"f(x)=x \text{ for all real } x", "f(x)=x"),
        (r"2\sqrt{3} : 4", r"\sqrt{3}:2"),
        (r"\frac{3}{5}", "3:5"),
        ("4:30 PM", r"4:30\text{ p.m.}"),
        ("16:30", "4:30 p.m."),
        ("4:30", "4:30 p.m."),
        ("4 p.m.", "4:00 PM"),
        # Factors and units.
        ("3.4 million", "3400000"),
        (r"\$3.4\text{ million}", "3,400,000"),
        ("2 dozen", "24"),
        ("five dozen", "60"),
        ("two thirds", r"\frac23"),
        ("5 feet 3 inches", "63 inches"),
        ("2 hours 15 minutes", "2.25 hours"),
        (r"2\cdot\pi\cdot r", r"2\pi r"),
        (r"\log_e 2", r"\ln 2"),
        ("75¢", r"\$0.75"),
        ("14 million people", "14,000,000"),
        ("36 km/h", "10 m/s"),
        ("60 miles per hour", "60 mph"),
        (r"\frac{\pi}{3} \text{ radians}", r"60^\circ"),
        (r"2\sqrt{2} \text{ m}", r"200\sqrt{2} \text{ cm}"),
        (r"9.8 \text{ m}/\text{s}^2", "9.8 m/s^2"),
        ("3 liters", "3000 cm^3"),
        (r"3 \pmod{7}", r"n \equiv 3 \pmod 7"),
        ("3", r"x \equiv 3 \pmod{7}"),
        # Functions in plain letters, degrees in them, powers of ten with a letter.
        ("pi/6", r"\frac{\pi}{6}"),
        ("exp(14)", "e^{14}"),
        ("sin(x)", r"\sin x"),
        (r"4\sqrt(3)", r"4\sqrt{3}"),
        ("4sqrt(3)/2", r"2\sqrt{3}"),
        (r"\cos 30^\circ", r"\frac{\sqrt{3}}{2}"),
        ("1.7 x 10^3", "1700"),
        ("option B", "B"),
        (r"\{4, -6\}", "x = 4, x = -6"),
        ("-3, -1, 1, 3", r"\pm 1, \pm 3"),
        (r"x = \pm 1 \text{ or } x = \pm 3", r"\{-3, -1, 1, 3\}"),
        ("x = 1 or x = 3", "1, 3"),
        # Lists, sets, tuples, names.
        ("5, 2", "2, 5"),
        (r"\{5, 2\}", "2, 5"),
        ("2 and 5", r"\{2, 5\}"),
        ("x = 5 or x = 2", "2, 5"),
        ("x_1 = 5, x_2 = 2", "x_1 = 2, x_2 = 5"),
        ("y = 5, x = 2", "x = 2, y = 5"),
        ("x = 2, y = 5", "(2, 5)"),
        ("2, 5", "(x, y) = (2, 5)"),
        ("(y, x) = (5, 2)", "x = 2, y = 5"),
        ("(1,2), (3,4)", "(3, 4), (1, 2)"),
        ("p=5,q=2; p=7,q=2", "(5,2),(7,2)"),
        (r"3 \pm \sqrt{2}", r"3 - \sqrt2, 3 + \sqrt2"),
        (r"12 \text{ adults and } 5 \text{ children}", "12, 5"),
        # Intervals.
        (r"x \in [2, 5)", "[2,5)"),
        (r"2 \le x < 5", "[2,5)"),
        (r"5 > x \ge 2", "[2, 5)"),
        ("x > 2", r"(2, \infty)"),
        ("-x < -2", "x > 2"),
        (r"x < 2 \text{ or } x > 5", r"(5, \infty) \cup (-\infty, 2)"),
        (r"\{x \mid 2 < x < 5\}", "(2, 5)"),
        (r"\mathbb{R}", r"(-\infty, +\infty)"),
        (r"\{1\} \cup \{2\}", r"\{1, 2\}"),
        # Matrices.
        (r"\begin{bmatrix} 1 & 0.5 \\ 0 & 2 \end{bmatrix}", r"\begin{pmatrix} 1 & \frac12 \\ 0 & 2 \end{pmatrix}"),
        (r"\left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        # Equations and relations.
        ("4 = x", "x = 4"),
        ("3 + 4 = 7", "7"),
        (r"\angle ABC = 40^\circ", "40"),
        (r"x = \sqrt{2} \approx 1.41", r"\sqrt{2}"),
        ("y = 2x + 1", "2x - y + 1 = 0"),
        ("2x + 2y < 4", "x + y < 2"),
        ("f(x) = (x+1)^2", "x^2 + 2x + 1"),
        # Choices and words.
        ("(B)", r"\text{B}"),
        ("B. 42", "B"),
        ("(B) 42", "42"),
        (r"\textbf{(B) } 42", "B"),
        ("b", "B"),
        ("The East", r"\text{east}"),
        # The rest is algebra.
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        (r"\sin^2 x", r"1 - \cos^2 x"),
        ("2x(x+1)", "2*x**2 + 2*x"),
        (r"\binom{6}{2}", "15"),
        ("3.14159265", r"\pi"),
        (r"2^{10}", "1024"),
    ],
)
def test_the_same_answer_in_other_words_is_right(candidate: str, truth: str) -> None:
    assert answers_match(candidate, truth)


@pytest.mark.parametrize(
    ("candidate", "truth"),
    [
        # Several values where one was asked for, and one where several were.
        ("41, 42", "42"),
        ("41 or 42", "42"),
        (r"\pm 42", "42"),
        ("x = 41, x = 42", "42"),
        ("A, B, C, D", "B"),
        ("A or B", "B"),
        ("42", "41, 42"),
        ("41, 42, 43", "41, 42"),
        ("(0, 100)", "42"),
        ("0 < x < 100", "42"),
        # What denies or leaves open.
        ("not 42", "42"),
        ("at least 42", "42"),
        ("42 or maybe 43", "42"),
        ("42 of 50", "42"),
        (r"42 \text{ or } 43", "42"),
        ("yes, no", "yes"),
        # What is true of everything, or of nothing.
        ("x = x", "x = 42"),
        ("0 = 0", "x + y = 42"),
        (r"\frac{0}{0}", "42"),
        (r"\infty - \infty", "0"),
        ("n", "42"),
        # Order, brackets and names that carry meaning.
        ("2, 1", "(1, 2)"),
        (r"\{1, 2\}", "(1, 2)"),
        ("[1, 2]", "(1, 2)"),
        ("[1, 2)", "[1, 2]"),
        ("x = 5, y = 2", "x = 2, y = 5"),
        ("(2,1), (4,3)", "(1,2), (3,4)"),
        ("x > 2", r"[2, \infty)"),
        ("x < 2", "x > 2"),
        ("-2x - 2y < -4", "x + y < 2"),
        ("x = z", "x = y"),
        (r"\alpha = 2", r"\theta = 2"),
        ("x_2 = 2", "x_1 = 2"),
        (r"5\cdot x", "5"),
        ("(y, x) = (2, 5)", "x = 2, y = 5"),
        ("x^2 = 4", "x^2 = 9"),
        # Units and shares of another size.
        ("5 m", "5 cm"),
        ("5 hours", "5 minutes"),
        ("5 cents", "5 dollars"),
        ("0.15", "15"),
        # The decimal that a repeating one is cut to; other bases; ratios and times.
        ("0.36", r"0.\overline{36}"),
        (r"0.\overline{36}", "0.36"),
        (r"0.3\overline{6}", r"0.\overline{36}"),
        ("0.333", r"0.\overline{3}"),
        ("0.142857", r"0.\overline{142857}"),
        ("17", "17_8"),
        ("17_8", "17"),
        ("15", "17_8"),
        ("1101_2", "1101_3"),
        ("1:3:2", "1:2:3"),
        ("1:6", "1:2:3"),
        ("2", "4:2:1"),
        ("5:3", "3:5"),
        ("0.6", "3:5"),
        ("4:30", "2:15"),
        ("4:30 a.m.", "4:30 p.m."),
        ("5:30 p.m.", "4:30 p.m."),
        # Factors and units that differ.
        ("14 million", "14"),
        ("14", "14 million"),
        ("14 billion", "14 million"),
        ("5 dozen", "5"),
        ("70 mph", "70 km/h"),
        ("60 radians", r"60^\circ"),
        ("5 cm", r"5 \text{ cm}^2"),
        ("20^\\circ C", "20^\\circ F"),
        ("€5", "\\$5"),
        ("5 cents", "\\$5"),
        (r"3 \pmod 5", r"3 \pmod 7"),
        # Numbers that are close.
        ("0.33", "1/3"),
        ("3.14", r"\pi"),
        ("42.0001", "42"),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"10^{-9}\sqrt{2}", "0"),
        ("12:30", "6:15"),
        ("121_3", "121_5"),
        # Expressions that agree for some numbers only.
        (r"\sqrt{x^2}", "x"),
        ("|x|", "x"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)
def test_another_answer_is_wrong(candidate: str, truth: str) -> None:
    assert not answers_match(candidate, truth)


@pytest.mark.parametrize(
    ("candidate", "truth", "tolerance", "right"),
    [
        ("3.14", r"\pi", 1e-3, True),
        ("3.1", r"\pi", 1e-3, False),
        ("98", "100", 0.02, True),
        ("97", "100", 0.02, False),
        ("102", "100", 0.02, True),
        ("-98", "100", 0.02, False),
        (r"4.5 \times 10^{33}", "4.53e33", 0.01, True),
        ("(1.01, 2)", "(1, 2)", 0.02, True),
        ("1", "0", 0.5, False),
        ("x", "1.01x", 0.5, False),
    ],
)
def test_a_tolerance_is_relative_to_the_truth(candidate: str, truth: str, tolerance: float, right: bool) -> None:
    assert answers_match(candidate, truth, tolerance) is right


def test_numbers_lists_and_words_need_no_computer_algebra() -> None:
    pairs = [("3,5", "3.5"), ("2, 5", "5, 2"), ("[0, 1)", "[0,1)"), ("(B)", "B"), ("12 eggs", "12"), ("4", "5")]
    assert [Grader().grade(*pair) for pair in pairs] == [True] * 5 + [False]
    assert Grader().grade(r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}") is None


def test_any_of_several_right_answers_will_do() -> None:
    truth = json.dumps([r"\frac{x}{2}", "0.5x"])
    assert gold_answers(truth) == (r"\frac{x}{2}", "0.5x")
    assert validate_ground_truth(truth) == truth
    with AnswerVerifier(1, 10.0, "auto") as verifier:
        items = [(r"Thus $\boxed{x/2}$.", truth), ("Answer: 7", ["7", "8"]), ("Answer: 9", ["7", "8"])]
        assert [verdict.correct for verdict in verifier.verify(items)] == [True, True, False]
    with pytest.raises(ValueError, match="empty"):
        validate_ground_truth('["7", ""]')


@pytest.mark.parametrize("truth", ["[1, 2]", '["a', "[]", "(1, 2)", '"7"', '["a", 1]'])
def test_other_brackets_are_one_answer(truth: str) -> None:
    assert gold_answers(truth) == (truth,)


def test_a_ground_truth_may_be_a_whole_solution() -> None:
    truth = r"We have $x^2 = 16$, so $x = \pm 4$, and as $x > 0$, it is $\boxed{4}$."
    assert answers_match("4", truth)
    assert not answers_match("16", truth)


UNITS = (
    "a", "a ", "a.", "\\a", "\\text{a}", "\\text{a} ", "5 a", "^2", "and ", "or", "not ", ",", "1,", "1;", "=", "< ",
    "(", "[", "{", "\\{", "\\cup ", "\\pm ", "\\pma ", "\\frac{", "x_", "_{a}", "/", "-", " ", "!", "\\\\", "&", "|",
    ":", "%", "\\sin ",
    "0.\\overline{3", "\\dot3", "9...", "sqrt(", "1 to ", "(mod ", "\\text{a}/", "\u4e07", "dozen ", "m^2 ",
)  # fmt: skip


@pytest.mark.timeout(60)
def test_reading_takes_at_most_quadratic_time() -> None:
    """Of answers that have at most `MAX_ANSWER_CHARACTERS`, which is milliseconds."""
    cases = itertools.product(("", "5", "(", "x = ", "5\\text{a}"), UNITS, ("", "}"))
    assert (
        growing_too_fast(
            lambda case, text: readings(text),
            cases,
            lambda case, length: (case[0] + case[1] * length)[: length - 1] + case[2],
            length=400,
            most=QUADRATIC,
        )
        == {}
    )
