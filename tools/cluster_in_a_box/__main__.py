"""Several machines in one box, from the command line: `python -m tools.cluster_in_a_box COMMAND`.

up N              keep N hosts until Ctrl-C; the other commands are for other terminals
run HOST CMD ...  run a command on a host, here
cut HOST          pull the host's cable out of the switch
heal HOST         plug it in again
shape HOST        give its interface another --rate, --latency-ms and --loss
kill HOST         let it vanish, with all of its processes
sent              bytes that each host has sent
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path

from dapo_mega.atomic_files import replace_file
from dapo_mega.cli import run_command
from dapo_mega.errors import InputError
from tools.cluster_in_a_box.box import Box
from tools.cluster_in_a_box.link import Link


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.cluster_in_a_box",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/box"), help="the box's files (default: runs/box)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up")
    up.add_argument("num_hosts", type=int)
    for name in ("run", "cut", "heal", "shape", "kill"):
        commands.add_parser(name).add_argument("host", type=int)
    for shaped in (up, commands.choices["shape"]):
        shaped.add_argument("--rate", help="bits per second, such as 100mbit or 1gbit (default: unshaped)")
        shaped.add_argument("--latency-ms", type=float, default=0.0)
        shaped.add_argument("--loss", type=float, default=0.0, help="share of packets")
    commands.choices["run"].add_argument("arguments", nargs=argparse.REMAINDER, metavar="CMD")
    commands.add_parser("sent")
    options = parser.parse_args()
    if options.command == "up":
        _keep(options.num_hosts, options.folder, _link(options))
        return
    box = _box(options.folder)
    if options.command == "run":
        if not options.arguments:
            raise InputError("no command was given; for example: run 0 ip address")
        sys.stdout.flush()
        line = box.command_line(options.host, options.arguments)
        os.execvp(line[0], line)
    if options.command == "shape":
        box.shape(options.host, _link(options))
    elif options.command == "sent":
        for host, count in enumerate(box.sent_bytes()):
            print(f"host{host} {count}")
    else:
        getattr(box, options.command)(options.host)


def _link(options: argparse.Namespace) -> Link:
    return Link(options.rate, options.latency_ms, options.loss)


def _keep(num_hosts: int, folder: Path, link: Link) -> None:
    state = folder / "state.json"
    if state.exists() and _is_kept(folder):
        raise InputError(f"{folder} holds a box that is up; end it with Ctrl-C, or give another --folder")
    with Box(num_hosts, folder, link) as box:
        replace_file(state, box.state)
        for host in range(num_hosts):
            print(f"host{host} {box.address(host)}")
        print("the hosts are up; Ctrl-C ends them", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        state.unlink()


def _is_kept(folder: Path) -> bool:
    try:
        _box(folder)
    except InputError:
        return False
    return True


def _box(folder: Path) -> Box:
    """The box that another process keeps in `folder`."""
    try:
        box = Box.attached((folder / "state.json").read_text(), folder)
    except OSError:
        raise InputError(f"{folder} holds no box; start one: python -m tools.cluster_in_a_box up 2") from None
    if not box.is_up():
        raise InputError(f"the box in {folder} is gone; start one: python -m tools.cluster_in_a_box up 2")
    return box


if __name__ == "__main__":
    run_command(main)
