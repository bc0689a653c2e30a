"""launch/slurm.sbatch with stand-ins for Slurm and for the programs that it starts: who is started where, and how."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "launch" / "slurm.sbatch"
NODES = ("node1", "node2", "node3", "node4", "node5")

# Runs the command once for each machine of --nodelist, as srun does with one task each.
SRUN = """#!/bin/bash
echo "srun $*" >> "$CALLS.srun"
while [[ "$1" == --* ]]; do case "$1" in --nodelist=*) nodes=${1#*=};; esac; shift; done
trap 'kill $(jobs -p) 2>/dev/null; wait; exit 143' TERM
for node in ${nodes//,/ }; do SLURMD_NODENAME=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || result=$?; done
exit "${result:-0}"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then tr , '\\n' <<< "$3"; else echo "scontrol $*" >> "$CALLS"; fi
"""
TOLD = 'echo "$SLURMD_NODENAME key=$DAPO_MEGA_API_KEY shutdown=$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $0 $*" >> "$CALLS"'
PYTHON = f"""#!/bin/bash
[ "$1" != -c ] || exec {shlex.quote(sys.executable)} "$@"
{TOLD}
exit "${{DRY_RUN_RESULT:-0}}"
"""
ENGINES = f"""#!/bin/bash
trap 'echo "$SLURMD_NODENAME engines ended" >> "$CALLS"; kill $!; exit 0' TERM
{TOLD}
[ -z "$ENGINES_FAIL" ] || exit 1
echo "all engines serve: urls"
sleep 60 &
wait
"""
TORCHRUN = f"""#!/bin/bash
{TOLD}
for i in $(seq 100); do [ "$(grep -c serve_rollouts "$CALLS")" -ge 3 ] && break; sleep 0.1; done
[ -z "$STATUS" ] || echo "$STATUS" > "$OUTPUT_DIR/status.json"
exit "$TRAINER_RESULT"
"""


@pytest.fixture
def job(tmp_path):
    """Runs the script on five machines, two of which train; returns (exit status, calls, output)."""
    programs = {"srun": SRUN, "scontrol": SCONTROL, "env/python": PYTHON, "env/torchrun": TORCHRUN, "sglang": ENGINES}
    for name, text in programs.items():
        file = tmp_path / name.replace("env/", "env/bin/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (tmp_path / "output").mkdir()
    calls = tmp_path / "calls"

    def run(result=0, status="", **variables):
        settings = {
            "CALLS": calls,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CONFIG": "my run.yaml",
            "MODEL": "models/m",
            "OUTPUT_DIR": tmp_path / "output",
            "TRAINER_ENV": tmp_path / "env",
            "SGLANG_PYTHON": tmp_path / "sglang",
            "ENGINE_TENSOR": 2,
            "ADDRESS_COMMAND": 'echo "10.0.0.${SLURMD_NODENAME#node}"',
            "SLURM_JOB_NODELIST": ",".join(NODES),
            "SLURM_JOB_ID": 7,
            "TRAINER_RESULT": result,
            "STATUS": status,
            **variables,
        }
        environment = {name: str(value) for name, value in settings.items()}
        done = subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, calls.read_text().splitlines() if calls.exists() else [], done.stdout + done.stderr

    return run


def state(name, goes_on):
    return json.dumps({"state": name, "continue": goes_on})


def test_engines_and_trainer_start_on_their_machines_with_one_key(job):
    result, calls, output = job()
    assert result == 0, output
    trainers = sorted(line for line in calls if "/torchrun " in line)
    assert [line.split()[0] for line in trainers] == ["node1", "node2"]
    for rank, line in enumerate(trainers):
        assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend bound --rdzv-endpoint 10.0.0.1:29500 --log-dir " in line
        assert f" --rdzv-conf rank={rank} launch/train_dapo.py --config my run.yaml output_dir=" in line
        assert "rollout.placement=fleet rollout.fleet.engine_tensor=2 rollout.fleet.rendezvous=10.0.0.1:21600" in line
        assert line.endswith("checkpoint.grace_s=500 parallel.world_size=16")
        assert "shutdown=540" in line
    engines = sorted(line for line in calls if "serve_rollouts.py" in line)
    assert [line.split()[0] for line in engines] == ["node3", "node4", "node5"]
    for node, line in zip(NODES[2:], engines, strict=True):
        assert "--model models/m --num-engines 4 --tensor-parallel 2 --rendezvous 10.0.0.1:21600 --host 10.0.0." in line
        assert f"--host 10.0.0.{node[-1]} --log-folder " in line
        assert line.endswith(f"/output/engines/{node}")
    keys = {line.split()[1] for line in trainers + engines}
    assert len(keys) == 1
    assert len(keys.pop()) == len("key=") + 64


def test_engines_are_ended_after_the_trainer(job):
    _, calls, output = job()
    assert sorted(line for line in calls if "engines ended" in line) == [f"{n} engines ended" for n in NODES[2:]], (
        output
    )


def test_a_stopped_run_puts_the_job_back_into_the_queue(job):
    result, calls, _ = job(result=1, status=state("stopped", True))
    assert result == 0
    assert calls[-1] == "scontrol requeue 7"


@pytest.mark.parametrize(
    ("status", "variables"),
    [
        (state("failed", False), {}),
        ("", {}),
        (state("stopped", True), {"SLURM_RESTART_COUNT": 20}),
    ],
    ids=["failed", "nothing-written", "too-often"],
)
def test_another_end_is_the_jobs_end(job, tmp_path, status, variables):
    # Of an earlier start, which this one has not overwritten.
    (tmp_path / "output" / "status.json").write_text(state("running", True) + "\n")
    result, calls, _ = job(result=1, status=status, **variables)
    assert result == 1
    assert "scontrol requeue 7" not in calls


def test_a_wrong_configuration_starts_nothing(job):
    result, calls, _ = job(DRY_RUN_RESULT=2)
    assert result == 2
    assert not [line for line in calls if "/torchrun " in line or "serve_rollouts" in line]


def test_without_machines_of_their_own_engines_share_the_trainers_gpus(job, tmp_path):
    result, calls, output = job(TRAINER_NODES=5)
    assert result == 0, output
    engines = [line for line in calls if "serve_rollouts.py" in line]
    trainers = [line for line in calls if "/torchrun " in line]
    assert sorted(line.split()[0] for line in engines) == sorted(line.split()[0] for line in trainers) == [*NODES]
    assert all(
        "--tensor-parallel 2 --rendezvous 10.0.0.1:21600 --colocated --memory-fraction 0.7" in e for e in engines
    )
    assert all("rollout.placement=colocated weight_sync.transport=disk" in line for line in trainers)
    assert calls.index(trainers[0]) > max(map(calls.index, engines)), "the trainer waits until all engines serve"
    steps = [line for line in (tmp_path / "calls.srun").read_text().splitlines() if line.startswith("srun ")]
    assert len(steps) == 3
    assert all("--overlap" in step for step in steps)


def test_engines_that_share_gpus_and_end_end_the_job(job):
    result, calls, output = job(TRAINER_NODES=5, ENGINES_FAIL="yes")
    assert result == 1
    assert "error: the engines ended; see" in output
    assert not [line for line in calls if "/torchrun " in line]


def test_more_trainers_than_machines_are_refused(job):
    result, calls, output = job(TRAINER_NODES=6)
    assert (result, calls) == (2, [])
    assert "TRAINER_NODES=6 are more than the job's 5 machines" in output
