"""Summarises a finished run: the first and last value of each main metric."""

from pathlib import Path

from dapo_mega.metrics import names
from dapo_mega.metrics.jsonl import read_metrics

_ROWS = (
    ("held-out reward", names.EVALUATION_REWARD_MEAN, ".3f"),
    ("held-out accuracy (avg@k)", names.EVALUATION_AVG_AT_K, ".3f"),
    ("held-out pass@k", names.EVALUATION_PASS_AT_K, ".3f"),
    ("held-out response length", names.EVALUATION_RESPONSE_LENGTH_MEAN, ".1f"),
    ("reward", names.REWARD_MEAN, ".3f"),
    ("loss", names.LOSS, ".4f"),
    ("generation entropy (nats per token)", names.ENTROPY, ".4f"),
    ("mean probability of generated tokens", names.MEAN_TOKEN_PROBABILITY, ".4f"),
)


def before_and_after(run_dir: Path) -> list[str]:
    """`quantity  first -> last` for every quantity that the run recorded, with the steps they are from."""
    records = read_metrics(run_dir / "metrics.jsonl")
    lines = []
    is_rl = any(names.REWARD_MEAN in record for record in records)  # Where the loss's value says nothing.
    for label, name, spec in _ROWS:
        if is_rl and name == names.LOSS:
            continue
        found = [(int(record["step"]), record[name]) for record in records if name in record]
        if found:
            (first_step, first), (last_step, last) = found[0], found[-1]
            lines.append(f"{label:38s} {first:{spec}} -> {last:{spec}}   (steps {first_step} -> {last_step})")
    return lines
