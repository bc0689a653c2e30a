"""Controlled edits of problems: what is still the same problem, and what is another one."""

import html
import random
import re
from collections.abc import Callable

Edit = Callable[[str, random.Random], str | None]
"""The edited problem, or None where the edit changes nothing."""


def respelled(text: str, _: random.Random) -> str:
    """Other white space and other LaTeX."""
    text = text.replace("\\frac", "\\dfrac").replace("\\le ", "\\leq ").replace(" + ", "+").replace("$", "$ ")
    return text.replace(" ", "  ").replace("\n", "\n\n")


def typo(text: str, draw: random.Random) -> str:
    """A letter is missing."""
    place = draw.choice([i for i, character in enumerate(text) if character.isalpha()])
    return text[:place] + text[place + 1 :]


def other_word(text: str, draw: random.Random) -> str | None:
    """A word has another one in its place."""
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if word.isalpha() and len(word) > 2]
    if not places:
        return None
    words[draw.choice(places)] = draw.choice(["certain", "various", "given", "small", "several"])
    return " ".join(words)


def two_words(text: str, draw: random.Random) -> str | None:
    """Two words have others in their place."""
    once = other_word(text, draw)
    return once and other_word(once, draw)


def with_ending(text: str, draw: random.Random) -> str:
    """A sentence more."""
    return f"{text} {draw.choice(['Express your answer as a common fraction.', 'Give your final answer as a number.'])}"


def with_beginning(text: str, draw: random.Random) -> str:
    """A heading more."""
    return draw.choice(["Problem. ", "Question: ", "Solve the following problem: "]) + text


def swapped_sentences(text: str, _: random.Random) -> str | None:
    """The first two sentences change places."""
    sentences = re.split(r"(?<=[.!?])\s+", text)
    if len(sentences) < 2:
        return None
    sentences[0], sentences[1] = sentences[1], sentences[0]
    return " ".join(sentences)


def other_number(text: str, draw: random.Random) -> str | None:
    """One number is another: another problem."""
    found = list(re.finditer(r"\d+", text))
    if not found:
        return None
    number = draw.choice(found)
    return f"{text[: number.start()]}{int(number[0]) + draw.randint(1, 8)}{text[number.end() :]}"


def other_question(text: str, _: random.Random) -> str | None:
    """The last sentence asks for something else: another problem."""
    sentences = re.split(r"(?<=[.!?])\s+", text)
    if len(sentences) < 2 or re.search(r"\d", sentences[-1]):
        return None
    return " ".join([*sentences[:-1], "Find the largest possible value of the sum of all of them."])


def escaped(text: str, _: random.Random) -> str:
    """As it stands on a web page."""
    return html.escape(text).replace("$", "&#36;").replace(". ", ".<br/>")


def look_alike(text: str, _: random.Random) -> str:
    """Cyrillic letters for Latin ones."""
    return text.translate(str.maketrans("aeopcyxiABEKMHOPCTX", "аеорсухіАВЕКМНОРСТХ"))


def interspersed(text: str, draw: random.Random) -> str:
    """A word more behind every fourth."""
    words = text.split(" ")
    more = ["really", "quite", "also", "then", "indeed"]
    return " ".join(f"{word} {draw.choice(more)}" if place % 4 == 3 else word for place, word in enumerate(words))


SAME: dict[str, Edit] = {
    "spelling": respelled,
    "typo": typo,
    "one word": other_word,
    "two words": two_words,
    "a sentence more": with_ending,
    "a heading more": with_beginning,
    "sentences swapped": swapped_sentences,
}
DISGUISED: dict[str, Edit] = {"escaped": escaped, "look-alike": look_alike, "interspersed": interspersed}
OTHER: dict[str, Edit] = {"one number": other_number, "another question": other_question}
