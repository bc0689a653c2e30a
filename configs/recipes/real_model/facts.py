"""A response is right that names the answer as a word of its first sentence that is not empty."""

import re


def score(records):
    results = []
    for record in records:
        sentence = re.split(r"[.!?\n]", record["response"].strip(), maxsplit=1)[0].casefold()
        right = re.search(rf"\b{re.escape(record['ground_truth'].casefold())}\b", sentence) is not None
        results.append({"score": float(right), "correct": right})
    return results
