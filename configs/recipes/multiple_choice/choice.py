"""Multiple choice: the first letter from A to D in a response is its answer."""

import re


def score(records):
    results = []
    for record in records:
        found = re.search(r"[ABCD]", record["response"])
        letter = found.group() if found else None
        correct = letter == record["ground_truth"]
        value = 1.0 if correct else 0.1 if letter else 0.0
        choices = record["fields"]["choices"]
        answer = str(choices["ABCD".index(letter)]) if letter else None
        results.append(
            {"score": value, "correct": correct, "parts": {"chose": float(letter is not None)}, "answer": answer}
        )
    return results
