"""Summarises a finished run: the first and last value of each main metric."""

from pathlib import Path

from dapo_mega.metrics.jsonl import read_metrics

_ROWS = (
    ("held-out reward", "evaluation/reward_mean", ".3f"),
    ("held-out accuracy (avg@k)", "evaluation/avg_at_k", ".3f"),
    ("held-out pass@k", "evaluation/pass_at_k", ".3f"),
    ("held-out response length", "evaluation/response_length_mean", ".1f"),
    ("reward", "rollout/reward_mean", ".3f"),
    ("loss", "policy/loss", ".4f"),
    ("generation entropy (nats per token)", "policy/entropy", ".4f"),
    ("mean probability of generated tokens", "rollout/mean_token_probability", ".4f"),
)


def before_and_after(run_dir: Path) -> list[str]:
    """`quantity  first -> last` for every quantity that the run recorded, with the steps they are from."""
    records = read_metrics(run_dir / "metrics.jsonl")
    lines = []
    is_rl = any("rollout/reward_mean" in record for record in records)  # Where the loss's value says nothing.
    for label, name, spec in _ROWS:
        if is_rl and name == "policy/loss":
            continue
        found = [(int(record["step"]), record[name]) for record in records if name in record]
        if found:
            (first_step, first), (last_step, last) = found[0], found[-1]
            lines.append(f"{label:38s} {first:{spec}} -> {last:{spec}}   (steps {first_step} -> {last_step})")
    return lines
