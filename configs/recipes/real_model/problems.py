"""Makes the data of this recipe: word problems that a small instruct model can almost solve, and facts it knows.

python configs/recipes/real_model/problems.py OUTPUT [SEED]

    train.parquet          1,000 word problems
    eval-problems.parquet  96 of other sentences, names and things
    eval-facts.parquet     96 questions whose answers are words: what training should not take away
"""

import itertools
import random
import sys
from pathlib import Path

import pandas as pd

# Sentences of training and of evaluation share no template, no name and no thing, so that what is learnt is to solve.
TRAIN = (
    ("{name} buys {a} boxes with {b} {things} in each box. How many {things} is that?", "a*b"),
    ("{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?", "a+b"),
    ("There are {a} {things} on the table. {name} takes {b} of them away. How many {things} are left?", "a-b"),
    ("Each of {a} friends gives {name} {b} {things}. How many {things} does {name} get?", "a*b"),
    ("{name} had {a} {things} and gave {b} of them to a friend. How many {things} does {name} still have?", "a-b"),
    ("In the morning {name} sells {a} {things}, in the evening {b}. How many {things} does {name} sell?", "a+b"),
    ("{name} puts {b} {things} into each of {a} bags. How many {things} are in the bags?", "a*b"),
    ("One basket holds {a} {things}, another one holds {b}. How many {things} are there together?", "a+b"),
)
EVALUATION = (
    ("A shelf has {a} rows. On each row {name} sees {b} {things}. How many {things} are on the shelf?", "a*b"),
    ("{name} counted {a} {things} yesterday and {b} {things} today. How many {things} were counted?", "a+b"),
    ("Of {a} {things}, {b} were lost by {name}. How many {things} remain?", "a-b"),
    ("Every day {name} collects {b} {things}. How many {things} does {name} collect in {a} days?", "a*b"),
)
NAMES = ("Dan", "Mia", "Tom", "Eva", "Sam", "Lily", "Ben", "Zoe", "Max", "Ida")
OTHER_NAMES = ("Oscar", "Nina", "Paul", "Clara", "Hugo", "Ruth")
THINGS = ("apples", "books", "stones", "coins", "pens", "cards", "eggs", "shells", "stamps", "buttons")
OTHER_THINGS = ("marbles", "cups", "tickets", "flowers", "candles", "keys")

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "China": "Beijing",
    "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
    "Ireland": "Dublin", "Poland": "Warsaw", "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen",
    "Finland": "Helsinki", "Hungary": "Budapest", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago",
    "Argentina": "Buenos Aires", "Canada": "Ottawa", "Mexico": "Mexico City", "India": "New Delhi",
    "Thailand": "Bangkok", "Turkey": "Ankara", "Iran": "Tehran", "Iraq": "Baghdad", "Kenya": "Nairobi",
    "Belgium": "Brussels", "South Korea": "Seoul",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "black": "white", "open": "closed",
    "early": "late", "happy": "sad", "old": "young", "rich": "poor", "fast": "slow", "wet": "dry", "full": "empty",
    "hard": "soft", "light": "dark", "high": "low", "long": "short", "win": "lose", "true": "false", "push": "pull",
    "strong": "weak", "first": "last", "inside": "outside", "love": "hate", "buy": "sell", "loud": "quiet",
    "clean": "dirty", "thick": "thin", "begin": "end", "always": "never", "north": "south",
}  # fmt: skip
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "lion": "cub", "duck": "duckling",
    "pig": "piglet", "goat": "kid", "frog": "tadpole", "kangaroo": "joey", "deer": "fawn", "goose": "gosling",
    "chicken": "chick", "bear": "cub", "swan": "cygnet",
}  # fmt: skip
COLOURS = {
    "the sky on a clear day": "blue", "grass": "green", "snow": "white", "coal": "black", "a ripe banana": "yellow",
    "blood": "red", "milk": "white", "the sun in a child's drawing": "yellow", "a ripe tomato": "red",
    "chocolate": "brown", "an orange": "orange", "a leaf in spring": "green", "a polar bear": "white",
    "a crow": "black", "an emerald": "green", "a ruby": "red",
}  # fmt: skip


def word_problems(templates, names, things, count, draw):
    """Distinct rows with `problem` and `answer`; factors from 2 to 9, other numbers up to 12."""
    rows = {}
    for template, rule in itertools.islice(itertools.cycle(templates), 100 * count):
        a, b = (draw.randint(2, 9 if rule == "a*b" else 12) for _ in range(2))
        if rule == "a-b" and a <= b:
            a, b = b + draw.randint(1, 9), b
        text = template.format(name=draw.choice(names), things=draw.choice(things), a=a, b=b)
        rows[text] = {"a*b": a * b, "a+b": a + b, "a-b": a - b}[rule]
        if len(rows) == count:
            break
    return [{"problem": text, "answer": str(answer), "data_source": "problems"} for text, answer in rows.items()]


def facts():
    asked = (
        ("What is the capital of {}?", CAPITALS),
        ('What is the opposite of "{}"?', OPPOSITES),
        ("What is a young {} called?", YOUNG),
        ("Which colour is {}?", COLOURS),
    )
    return [
        {"problem": question.format(key), "answer": answer, "data_source": "facts"}
        for question, answers in asked
        for key, answer in answers.items()
    ]


def main():
    output, seed = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    output.mkdir(parents=True, exist_ok=True)
    draw = random.Random(f"word problems {seed}")
    tables = {
        "train": word_problems(TRAIN, NAMES, THINGS, 1000, draw),
        "eval-problems": word_problems(EVALUATION, OTHER_NAMES, OTHER_THINGS, 96, random.Random("held out")),
        "eval-facts": facts(),
    }
    for name, rows in tables.items():
        pd.DataFrame(rows).to_parquet(output / f"{name}.parquet")
        print(f"{output / name}.parquet: {len(rows)} rows, such as {rows[0]['problem']!r} -> {rows[0]['answer']!r}")


if __name__ == "__main__":
    main()
