import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.rewards.normalization import canonical_latex, compact
from tests.unit.rewards.growth import growing_too_fast


def canonical(text):
    return compact(canonical_latex(text))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("42", "42"),
        (" $42$ ", "42"),
        ("$$42$$", "42"),
        (r"\(42\)", "42"),
        (r"\[ 42 \]", "42"),
        ("**42**", "42"),
        ("42.", "42"),
        ("the value is $42$.", "42"),
        (r"\boxed{42}", "42"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        ("n <= 3", "n<=3"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac 59", r"\frac{5}{9}"),
        (r"\frac9{19}", r"\frac{9}{19}"),
        (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
        (r"\dfrac{17}{50}", r"\frac{17}{50}"),
        (r"11\sqrt2", r"11\sqrt{2}"),
        ("58,500", "58500"),
        (r"10,\!080", "10080"),
        ("1,234,567.5", "1234567.5"),
        (r"\$32,\!348", "32348"),
        ("3, 5, 7", "3,5,7"),  # a list, not 357
        ("1,2", "1,2"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"864 \mbox{ inches}^2", "864"),
        (r"5.4 \text{ cents}", "5.4"),
        ("12 cm", "12"),
        (r"17.5\%", "17.5"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\text{(C)}", "C"),
        ("an ellipse", "ellipse"),
        (r"\frac{a b}{2}", r"\frac{ab}{2}"),  # a is a variable here, not an article
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("x \\in [-2,7]", "[-2,7]"),
        (r"2$\sqrt{3}$", r"2\sqrt{3}"),
        ("\u221242", "-42"),
        ("\u200f42\u202e", "42"),  # writing-direction marks
        ("\uff14\uff12", "\uff14\uff12"),  # full-width digits are not read as ASCII ones
        ("5\u00b2", "5\u00b2"),  # a superscript is not flattened to 52
        ("$", ""),
        ("", ""),
    ],
)
def test_normal_form(answer: str, expected: str) -> None:
    assert canonical(answer) == expected


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "${}$", "\\boxed{{{}}}", " {}. ", "${}$ cm"]),
)
def test_an_integer_survives_every_wrapping_and_grouping(value: int, wrapping: str) -> None:
    assert canonical(wrapping.format(value)) == str(value)
    assert canonical(wrapping.format(f"{value:,}")) == str(value)


@given(st.text(max_size=300) | st.text(alphabet="\\${}[]()^_=,.; \ta1frac sqrt text boxed", max_size=300))
def test_any_text_has_a_normal_form_without_spaces(text: str) -> None:
    normal = canonical(text)
    assert normal == "".join(normal.split())


UNITS = (
    " ",
    "1 ",
    "$",
    "$1",
    "= ",
    "\\frac",
    "\\frac ",
    "\\frac{",
    "\\sqrt ",
    "\\text{",
    "1\\text{",
    "a ",
    "the ",
    ",",
    ", ",
    "{",
    "(",
    "\\boxed{",
    "**",
    "^ ",
    "1,000",
    "and ",
    "\\!",
    ",\\!",
    "x_",
    "\\left(",
    "9",
    "\0",
    "\ud800",
)
STARTS = ("", "1", "\\frac", "a", "$1$ ")


def test_hostile_texts_are_normalised_in_linear_time() -> None:
    cases = itertools.product(STARTS, UNITS)
    assert growing_too_fast(lambda _, text: canonical(text), cases, repeated) == {}


def repeated(case: tuple[str, str], length: int) -> str:
    start, unit = case
    return start + unit * (length // len(unit))
