"""Writes questions with four choices: python configs/recipes/multiple_choice/make_data.py FOLDER"""

import json
import random
import sys
from pathlib import Path

LETTERS = "ABCD"


def row(rng: random.Random) -> dict[str, object]:
    a, b = rng.randrange(1, 10), rng.randrange(1, 10)
    choices = rng.sample([n for n in range(2, 19) if n != a + b], 3)
    right = rng.randrange(4)
    choices.insert(right, a + b)
    shown = " ".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return {"question": f"{a}+{b}? {shown} ", "answer": LETTERS[right], "choices": choices}


def main() -> None:
    folder, rng = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 400), ("eval", 32)):
        rows = [row(rng) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
