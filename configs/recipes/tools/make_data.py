"""Questions that a look-up answers: `make_data.py FOLDER` writes train.jsonl and eval.jsonl."""

import json
import random
import sys
from pathlib import Path

WORDS = [
    "amber",
    "basil",
    "cedar",
    "delta",
    "ember",
    "frost",
    "grove",
    "hazel",
    "iris",
    "jade",
    "kelp",
    "lotus",
    "maple",
]

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, size in (("train", 512), ("eval", 64)):
    draw = random.Random(name)
    with (folder / f"{name}.jsonl").open("w") as file:
        for _ in range(size):
            secrets = {word: draw.randint(10, 999) for word in draw.sample(WORDS, 5)}
            asked = draw.sample(sorted(secrets), 2)
            question = f"What is the sum of the numbers that are kept under {asked[0]} and {asked[1]}?"
            answer = str(secrets[asked[0]] + secrets[asked[1]])
            file.write(json.dumps({"prompt": question, "answer": answer, "secrets": secrets}) + "\n")
