from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_mega.rewards.numerals import numerals_equal, parse_numeral


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", Fraction(42)),
        ("-007", Fraction(-7)),
        ("+3", Fraction(3)),
        (".5", Fraction(1, 2)),
        ("42.", Fraction(42)),
        ("3.83e35", Fraction(383 * 10**33)),
        ("-1e-2", Fraction(-1, 100)),
        (r"4\times10^{33}", Fraction(4 * 10**33)),
        (r"4\cdot10^2", Fraction(400)),
        ("1/2", Fraction(1, 2)),
        ("-6/4", Fraction(-3, 2)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"1\frac{4}{5}", Fraction(9, 5)),
        (r"-1\frac{4}{5}", Fraction(-9, 5)),
    ],
)
def test_value_of_a_written_number(text: str, value: Fraction) -> None:
    numeral = parse_numeral(text)
    assert numeral is not None
    assert numeral.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1/0",
        r"\frac{1}{0}",
        "1e99999",
        "1e1001",
        "9" * 101,
        "1.2.3",
        "--1",
        "1 2",
        "\uff14\uff12",
        "٤٢",
        "1_000",
        "0x10",
        "nan",
        "inf",
        r"4\times10^{99999}",
        "1e999999999",
        "4\n",
    ],
)
def test_what_is_not_a_number_here(text: str) -> None:
    assert parse_numeral(text) is None


@pytest.mark.parametrize(
    ("candidate", "truth", "equal"),
    [
        ("42.0", "42", True),
        ("42.0000001", "42", False),  # an integer has no rounding to forgive
        ("41.9999999", "42", False),
        ("0.333333", "1/3", True),
        ("0.33333", "1/3", False),
        ("1/3", "0.333333", True),
        ("3.14", "3.1416", False),
        ("2.8e-6", "2.7e-6", False),  # rounding to six places would take these for equal
        ("2/4", "1/2", True),
        ("-1/2", "1/2", False),
    ],
)
def test_equality_of_numbers(candidate: str, truth: str, equal: bool) -> None:
    first, second = parse_numeral(candidate), parse_numeral(truth)
    assert first is not None
    assert second is not None
    assert numerals_equal(first, second) is equal


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6), st.integers(1, 1000))
def test_a_fraction_equals_its_expansions(top: int, bottom: int, factor: int) -> None:
    short, long = (
        parse_numeral(f"{top}/{bottom}"),
        parse_numeral(f"\\frac{{{top * factor}}}{{{bottom * factor}}}"),
    )
    assert short is not None
    assert long is not None
    assert numerals_equal(short, long)
