"""Memory shared by name outlives the trainer as long as an engine holds it; nothing else of the trainer does."""

import subprocess
import sys

TRAINER = """
import sys, torch
from dapo_mega.weight_sync import shared_memory
shared_memory.start_memory_manager()
tensor = torch.arange(6.0)
with shared_memory._sharing_by_name():
    tensor.share_memory_()
    import base64, io
    from multiprocessing.reduction import ForkingPickler
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump([("a", tensor)])
print(base64.b64encode(pickled.getvalue()).decode(), flush=True)
sys.stdin.readline()
print("the last words", file=sys.stderr)
"""
ENGINE = """
import base64, pickle, sys, torch.multiprocessing
torch.multiprocessing.set_sharing_strategy("file_system")
((name, tensor),) = pickle.loads(base64.b64decode(sys.stdin.readline()))
print(name, tensor.sum().item(), flush=True)
sys.stdin.readline()
"""


def start(program, **streams):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **streams,
    )


def test_who_reads_the_trainers_output_does_not_wait_for_its_engines():
    trainer, engine = start(TRAINER, stderr=subprocess.PIPE), start(ENGINE)
    try:
        engine.stdin.write(trainer.stdout.readline())
        engine.stdin.flush()
        assert engine.stdout.readline() == "a 15.0\n"
        _, said = trainer.communicate("end\n", timeout=60)
        assert said == "the last words\n"
        assert engine.poll() is None
    finally:
        for process in (trainer, engine):
            process.kill()
            process.wait()
