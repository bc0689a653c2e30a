"""Success over compute of RL and of more SFT, from the runs of launch/general_points.sh.

python configs/recipes/general_points/compare.py OUTPUT SEED ...
"""

import json
import sys
from pathlib import Path

from dapo_mega.ablation.intervals import estimate_difference
from dapo_mega.metrics import read_metrics
from dapo_mega.metrics.plotting import empty_figure, save_png

SPLITS = ("in_distribution", "out_of_distribution")
STAGES = ("rollout", "pack", "score", "update", "weight_sync")


def evaluation(record):
    return {split: record[f"evaluation/avg_at_k_{split}"] for split in SPLITS}


def points_of_rl(folder):
    """(step, seconds of training so far, success) at each evaluation."""
    seconds, found = 0.0, []
    for record in read_metrics(folder / "rl" / "metrics.jsonl"):
        seconds += sum(record.get(f"time/{stage}_s", 0.0) for stage in STAGES)
        if f"evaluation/avg_at_k_{SPLITS[0]}" in record:
            found.append((int(record["step"]), seconds, evaluation(record)))
    return found


def points_of_sft(folder):
    seconds = {0: 0.0}
    for record in read_metrics(folder / "sft" / "metrics.jsonl"):
        seconds[int(record["step"])] = max(seconds.values()) + record["time/step_s"]
    starts = {0: folder / "rl"} | {int(path.name.split("_")[-1]): path for path in folder.glob("sft_at_*")}
    return [
        (step, seconds[step], evaluation(read_metrics(path / "metrics.jsonl")[0]))
        for step, path in sorted(starts.items())
    ]


def summary(arms):
    """For each point of an arm the mean over seeds with Student's interval, of success and of its change."""
    points = []
    for at_step in zip(*arms, strict=True):
        values = {"step": at_step[0][0], "seconds": sum(seconds for _, seconds, _ in at_step) / len(at_step)}
        for split in SPLITS:
            success = [found[split] for _, _, found in at_step]
            start = [arm[0][2][split] for arm in arms]
            values[split] = vars(estimate_difference(success)) | {"seeds": success}
            changes = [end - begin for end, begin in zip(success, start, strict=True)]
            values[f"{split}_change"] = vars(estimate_difference(changes))
        points.append(values)
    return points


def main():
    output = Path(sys.argv[1])
    folders = [output / f"seed{seed}" for seed in sys.argv[2:]]
    result = {
        "RL": summary([points_of_rl(folder) for folder in folders]),
        "SFT": summary([points_of_sft(folder) for folder in folders]),
    }
    (output / "comparison.json").write_text(json.dumps({"seeds": [f.name for f in folders], **result}, indent=1) + "\n")
    figure = empty_figure(10, 4)
    for number, split in enumerate(SPLITS, start=1):
        axes = figure.add_subplot(1, 2, number)
        for arm, points in result.items():
            seconds = [point["seconds"] for point in points]
            changes = [point[f"{split}_change"] for point in points]
            axes.plot(seconds, [change["mean"] for change in changes], marker="o", label=arm)
            bounds = [[c["mean"] if c[bound] is None else c[bound] for c in changes] for bound in ("low", "high")]
            axes.fill_between(seconds, *bounds, alpha=0.15)
        start = result["RL"][0][split]["mean"]
        axes.set(title=f"{split.replace('_', ' ')}, {start:.3f} at the warm start")
        axes.set(xlabel="seconds of training after the warm start", ylabel="change of the share of deals solved")
        axes.set_ylim(-0.2, 0.3)  # The intervals of two seeds are wider.
        axes.grid(alpha=0.3)
        axes.legend()
    save_png(figure, output / "comparison.png")
    for arm, points in result.items():
        for point in points:
            shown = [f"{s}={point[s]['mean']:.3f} ({point[s + '_change']['mean']:+.3f})" for s in SPLITS]
            print(f"{arm} step {point['step']}: {point['seconds']:.0f} s, {', '.join(shown)}")


if __name__ == "__main__":
    main()
