"""Answers that try to hang, crash or deceive a comparison, and such that try to run code."""

HOSTILE_ANSWERS = (
    "9**9**9**9",
    "9^9^9^9",
    "10^10^10",
    "10^{10^{10}}",
    "((9^{99})^{99})^{99}",
    "(" * 10_000 + "1" + ")" * 10_000,
    "(" * 200,
    "{" * 10_000,
    "\\frac{" * 10_000,
    "9" * 10**6,
    "9" * 5000,
    "9" * 299,
    "1e" + "9" * 200,
    "0." + "0" * 250 + "1",
    "\\frac{1}{",
    "\\frac{1}{0}",
    "\\sqrt[",
    "\\left(",
    "\\begin{pmatrix} 1",
    "\\end{array}",
    "$$$$$",
    "\\",
    "^",
    "_",
    "4\0002",
    "\0",
    "\0\0",
    "\ud800",
    "\ud800\udfff",
    "\u202e24",
    "\u202e24\u202c",
    "💥" * 50,
    " " * 10**6,
    "-" * 299,
    "!" * 299,
    "5" + "!" * 50,
    "\\sqrt" * 59,
    "^9" * 149,
)
# Each would leave a file X in the working directory. A relative name keeps them within the length that is compared.
CODE = (
    "__import__('os').system('touch X')",
    "1+__import__('os').system('touch X')",
    "__import__('pathlib').Path('X').touch()",
    "open('X', 'w')",
    "$__import__('os').system('touch X')$",
    "\\text{__import__('os').system('touch X')}",
    "$\\text{open('X','w')}+1$",
    "1 + eval(\"open('X','w')\")",
    "1*(lambda: open('X', 'w'))()",
    "\\input{X} \\write18{touch X} 42+1",
)


def shown(text: str) -> str:
    """Enough of a text to know it by."""
    return ascii(text[:20])
