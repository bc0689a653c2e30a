"""Texts that say the same have one spelling, and texts that do not keep different ones."""

from dapo_mega.preparation.normalization import normal_text

SAME = [
    (r"Find $\dfrac{1}{2}+x$.", r"Find \( \frac12 + x \) ."),
    (r"$x^{2}$ and $x^{10}$", "$x^2$  and\n$x^10$"),
    (r"Let $a\leq b$, $a \neq c$", r"Let \[a \le b\], \(a\ne c\)"),
    (r"\left( 3, \text{cm} \right)", "(3,cm)"),
    ("the ‘two’ × three…", "the 'two' * three..."),
    (r"area of $1{,}000\,m^2$", "area of 1,000 m²"),
    ("ｆｕｌｌ　width", "full width"),
    ("x &lt; 3 &amp;amp; costs&nbsp;&#36;5<br/>now", "x < 3 & costs $5 now"),
    ("zero\u200bwidth and\u200e marks", "zerowidth and marks"),
]
DIFFERENT = [
    ("$x+y$", "$x-y$"),
    ("$x^{2y}$", "$x^{2}y$"),
    (r"$\frac{1}{23}$", r"$\frac{12}{3}$"),
    ("Find $A$.", "Find $a$."),
    ("1,234", "1, 234"),
    ("3.5", "35"),
    (r"$a \le b$", r"$a \ge b$"),
    ("x < 3 cm", "x < 3 dm"),
]


def test_texts_that_differ_in_spelling_only_are_equal() -> None:
    unequal = [(a, b) for a, b in SAME if normal_text(a).spelling != normal_text(b).spelling]
    assert unequal == []


def test_texts_that_say_something_else_stay_apart() -> None:
    equal = [(a, b) for a, b in DIFFERENT if normal_text(a).spelling == normal_text(b).spelling]
    assert equal == []


def test_words_are_what_is_left_of_any_formula() -> None:
    text = normal_text(r"If $f(x)=\frac{3x-2}{x-2}$, what is $f(-2)+\sin\pi$ of 1,000 apples? 求值")
    assert text.words == (
        *("if", "f", "x", "3", "x", "2", "x", "2", "what", "is", "f", "2"),
        *("sin", "pi", "of", "1000", "apples", "求", "值"),
    )
    assert text.numbers == ("1000", "2", "2", "2", "3")


def test_spelling_is_linear_in_the_length() -> None:
    # Unclosed braces, dollars and backslashes are where expressions of this kind become quadratic.
    for piece in ("{", "\\frac", "$", "\\", "{a ", "1,", "\\left", "&", "&a", "&#1", "<a ", "<"):
        assert len(normal_text(piece * 100_000).tokens) <= len(piece) * 100_000
