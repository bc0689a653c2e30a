"""What the command lines print is for people: no control characters, no tracebacks of closed pipes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from dapo_mega.atomic_files import disk_refusal, replace_file
from dapo_mega.cli import printable
from dapo_mega.distributed.stores import connect_store, open_store
from dapo_mega.errors import is_lost_connection

REPOSITORY = Path(__file__).resolve().parents[2]


def run(code, **settings):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=120, check=False, **settings
    )


def test_escape_codes_are_spelled_out():
    assert printable("a\x1b[31mred\x07\x9b\u202e\ud800\n\tb é") == "a\\x1b[31mred\\x07\\x9b\\u202e\\ud800\n\tb é"
    code = "from dapo_mega.cli import *; print_once('a\\33[31m'); run_command(lambda: fail('b\\33[2J'))"
    result = run("def fail(text): raise InputError(text)\n" + code)
    assert (result.returncode, result.stdout, result.stderr) == (2, b"a\\x1b[31m\n", b"error: b\\x1b[2J\n")


def test_a_file_where_an_outputs_folder_would_have_to_be_is_named(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "sub"):
        code = f"import pathlib; run_command(lambda: pathlib.Path({str(folder)!r}).mkdir(exist_ok=True))"
        result = run("from dapo_mega.cli import *; " + code)
        said = f"error: {folder}: a file stands where a folder is needed; give another path\n"
        assert (result.returncode, result.stderr.decode()) == (2, said)


def test_a_terminal_that_knows_few_characters_is_no_error():
    result = run("from dapo_mega.cli import *; print_once('⟦é')", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stdout) == (0, b"\\u27e6\\xe9\n")


def test_nothing_is_said_of_what_is_left_at_the_end():
    """Triton names each thing of its own that no search for garbage has found: a hundred lines behind a run's last."""
    pytest.importorskip("triton")
    program = "from dapo_mega.cli import loading\nwith loading():\n    import triton"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout + result.stderr == ""


def test_a_closed_pipe_ends_a_command_without_a_word():
    code = "from dapo_mega.cli import *; run_command(lambda: [print_once('line') for _ in range(100_000)])"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_a_launcher_that_hangs_is_ended_unless_it_will_start_again():
    worker = "from dapo_mega.cli import leave; leave('a machine is gone', 75, launcher_limit_s=0.1)"
    launcher = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', sys.argv[1]]); time.sleep({})"
    for num_restarts, max_restarts, sleep_s, status, times in (
        (0, 0, 1000, -9, 2),
        (0, 1, 1, 0, 1),
        (1, 1, 1000, -9, 2),
    ):
        variables = {
            **os.environ,
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
        }
        line = [sys.executable, "-c", launcher.format(sleep_s), worker]
        result = subprocess.run(line, cwd=REPOSITORY, capture_output=True, timeout=120, check=False, env=variables)
        assert (result.returncode, result.stderr) == (status, times * b"stopped: a machine is gone\n"), num_restarts


def test_a_second_interrupt_changes_nothing_of_the_first_ones_end():
    """It comes while the program notes how it ended."""
    code = """
import os, signal
from dapo_mega.cli import before_leaving, run_command
signal.signal(signal.SIGINT, signal.default_int_handler)  # Tests in the background are started without it.
interrupt = lambda *_: os.kill(os.getpid(), signal.SIGINT)
before_leaving(lambda message, status: (interrupt(), os.write(1, b"noted")))
run_command(interrupt)
"""
    result = run(code)
    said = b"stopped: interrupted; start the same command again to continue\n"
    assert (result.returncode, result.stdout, result.stderr) == (130, b"noted", said)


def test_a_full_disk_is_named_with_the_file(tmp_path):
    (tmp_path / "file.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as full:
        replace_file(tmp_path / "file.json", "content")
    assert full.value.filename == str(tmp_path / "file.json")


def raised(error, cause=None):
    try:
        try:
            if cause:
                raise cause
        finally:
            raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("unexpected pos 704 vs 598"), "only a part was written to the disk"),
        (
            raised(RuntimeError("unexpected pos 704 vs 598"), OSError(errno.ENOSPC, "No space left on device")),
            "No space",
        ),
        (OSError(errno.EIO, "Input/output error", "/a/file"), "/a/file: Input/output error"),
        (RuntimeError("OSError: [Errno 28] No space left on device\nRuntimeError: unexpected pos 1 vs 2"), "No space"),
    ],
)
def test_a_disk_that_refuses_is_found_behind_what_came_of_it(error, reason):
    assert reason in disk_refusal(error)
    assert disk_refusal(RuntimeError("shapes differ")) is None


def test_a_store_that_is_gone_shows_that_another_process_has_ended():
    """Not one that was never there: the first one needs another start, the second one another address."""
    store = open_store("127.0.0.1", 20)
    port, client = store.port, connect_store("127.0.0.1", store.port, 20)
    client.set("key", "")
    del store
    for is_lost, ask in ((True, lambda: client.get("key")), (False, lambda: connect_store("127.0.0.1", port, 1))):
        with pytest.raises(dist.DistNetworkError) as raised:
            ask()
        assert is_lost_connection(raised.value) == is_lost, raised.value
