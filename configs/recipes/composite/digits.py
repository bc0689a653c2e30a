"""One component of several: the share of digits in a response."""


def score(records):
    return [sum(map(str.isdigit, record["response"])) / max(len(record["response"]), 1) for record in records]
