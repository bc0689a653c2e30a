"""A reward of one's own: the share of sevens in a response. Nothing is right or wrong about it."""


def score(records):
    results = []
    for record in records:
        text = record["response"]
        digits = sum(character.isdigit() for character in text)
        results.append(
            {
                "score": text.count("7") / max(len(text), 1),
                "parts": {"digits": digits, "other": len(text) - digits},
            }
        )
    return results
