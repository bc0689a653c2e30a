"""The project's benchmarks: `python tools/benchmark.py NAME [options]`, `NAME --help` for what it measures.

update      one policy update against plain transformers
methods     the update of every method, and PPO's step, against DAPO's
step        one DAPO step, from prompts to new weights, against TRL
mfu         share of a GPU's peak that the update reaches
fp8_drift   log-probs of an FP8 trainer against those of engines
packing     packed micro-batches against padded ones
handover    samples from rank 0 to the others
gather      sharded weights to the replicas' leaders
samples     writing every response, against the step's time
timeline    recording what trainer and engines did when
page        the page of samples in a headless browser
checkpoint  saving while training waits, and in the background
logprobs    log-probs without whole logits
prepare     preparing a training dataset: time and memory by rows
answers     grading ordinary and hostile answers
simulation  simulated schedules against runs on engines of a stated pace
environments trajectories with environments in processes, and in threads of the trainer
endpoint    what the endpoint for programs adds to a turn
fleet       requests in flight at rollout engines, and a server's own batch interface
weight_sync an update of a real SGLang server against bare broadcasts
senders     an update of 1 to 8 engines by 8 processes, over links of one rate
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from dapo_mega.cli import run_command

NAMES = (
    "update",
    "methods",
    "step",
    "mfu",
    "fp8_drift",
    "packing",
    "handover",
    "gather",
    "samples",
    "timeline",
    "page",
    "checkpoint",
    "logprobs",
    "prepare",
    "answers",
    "weight_sync",
    "simulation",
    "senders",
    "fleet",
    "environments",
    "endpoint",
)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(__doc__)
        return
    if name not in NAMES:
        sys.exit(f"benchmark: {name!r} is not one of {', '.join(NAMES)}")
    sys.path.insert(0, str(Path(__file__).with_name("benchmarks")))
    module = importlib.import_module(f"benchmark_{name}")
    run_command(lambda: module.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
