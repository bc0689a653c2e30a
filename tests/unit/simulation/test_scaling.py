"""Plans and simulations from few to many GPUs."""

import re
from pathlib import Path

import pytest

from dapo_mega.commands import plan
from dapo_mega.errors import InputError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SMALL = [
    str(CONFIGS / "gsm8k-qwen2.5-0.5b-8gpu.yaml"),
    f"model.architecture={CONFIGS / 'architectures' / 'qwen2.5-0.5b.json'}",
    *("batch.groups_per_step=8", "batch.mini_batch_groups=8", "batch.generation_groups=8", "batch.group_size=4"),
]


def test_every_size_has_its_best_division_of_both_forms(capsys, tmp_path):
    picture = tmp_path / "scaling.png"
    plan.main([*SMALL, "--scaling", "4:17", "--simulated-steps", "1", "--output", str(picture)])
    text = capsys.readouterr().out
    assert "8 groups x 4 responses a step on any number of GPUs" in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] != "|--"]
    rows = [row for row in rows if len(row) == 8][1:]
    assert [(int(row[0]), row[1]) for row in rows] == [
        (size, form) for size in (4, 8, 16) for form in ("in turns, synchronous", "split, asynchronous")
    ]
    best = max(float(row[3]) / int(row[0]) for row in rows)
    for row in rows:
        trainer, engines, tensor = re.fullmatch(r"(\w+) \+ (\d+) of tensor (\d+)", row[2]).groups()
        num_engine_gpus = int(engines) * int(tensor)
        assert int(row[0]) == (num_engine_gpus if trainer == "all" else int(trainer) + num_engine_gpus)
        assert float(row[4].strip("%")) == pytest.approx(100 * float(row[3]) / int(row[0]) / best, abs=1)
    rates = [float(row[3]) for row in rows]
    assert rates[-2] > rates[0], "more GPUs are faster"
    assert rates[-1] > rates[1], "more GPUs are faster"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scaling", "16"], r"--scaling=16 must be FIRST:LAST, two numbers of GPUs, such as 16:4096"),
        (["--scaling", "64:16"], r"--scaling=64:16 must be FIRST:LAST with 2 or more GPUs, the smaller number first"),
        (["--scaling", "12:96"], r"begins with 12 GPUs, which are no whole machines of 8 \(--gpus-per-node\)"),
        (["--scaling", "8:16", "--simulate"], r"--scaling divides the GPUs and simulates by itself; leave --simulate"),
        (["--scaling", "8:16", "--output", "x.pdf"], r"--output x.pdf must be a file that ends in .png, in a folder"),
        (["--output", "x.png"], r"--output is the picture of --scaling; add --scaling FIRST:LAST"),
        (["--scaling", "2:4", "--gpu-memory-gib", "6"], r"on 2, 4 GPUs no division between trainer and engines fits"),
    ],
)
def test_what_cannot_be_scaled_is_one_line(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        plan.main([*SMALL, *arguments])
    assert "\n" not in str(caught.value)


def test_the_best_divisions_are_simulated_in_their_schedules_and_can_be_copied(capsys):
    options = ["--simulated-steps", "2", "--kept-share", "0.9"]
    plan.main([*SMALL, "--total-gpus", "4", "--simulate", *options])
    head, *text = capsys.readouterr().out.splitlines()
    assert head == "divisions of 4 GPUs between trainer and engines, simulated in their schedules, best first:"
    shown = [i for i, line in enumerate(text) if "steps/hour" in line]
    rates = [float(text[i].split()[0]) for i in shown]
    assert rates == sorted(rates, reverse=True)
    assert {"in turns on all, synchronous" in text[i] for i in shown} == {True, False}
    assert all("assumed: " in line for line in text[-2:])
    split = next(i for i in shown if "with max_staleness 1" in text[i])
    trainer, engines, tensor = re.search(r"trainer (\d) \+ engines (\d), .* of tensor (\d)", text[split]).groups()
    assert int(trainer) + int(engines) == 4
    assert "rollout.schedule=asynchronous" in text[split + 1]
    overrides = [pair for pair in text[split + 1].split() if not pair.startswith("rollout.schedule")]
    fleet = ["--engine-gpus", engines, "--engine-tensor", tensor]
    plan.main([*SMALL, *overrides, "--simulate", *fleet, *options])
    rows = capsys.readouterr().out.splitlines()
    same = next(row for row in rows if row.startswith("| asynchronous | 1 |"))
    assert float(same.split("|")[3]) == pytest.approx(float(text[split].split()[0]), rel=0.01)
