"""A box of hosts, and the commands that run on them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dapo_mega.errors import InputError
from tools.cluster_in_a_box import delay, keeper
from tools.cluster_in_a_box.link import Link

_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
_MOST_HOSTS = 200
_START_S = 60.0
_CALL_S = 30.0


def why_impossible() -> str | None:
    """Why this machine cannot play several ones, in one line; None where it can."""
    if not sys.platform.startswith("linux"):
        return "hosts are Linux network namespaces, and this is not Linux"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"hosts need the programs {', '.join(missing)} (Debian: iproute2, util-linux)"
    tried = subprocess.run([*_namespaces(), "true"], capture_output=True, text=True, timeout=_CALL_S)
    if tried.returncode:
        return f"this user may not make network namespaces ({tried.stderr.strip()}); be root"
    return None


def _namespaces() -> list[str]:
    """Namespaces of its own for a program: as root, or as root of a user namespace."""
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--net", "--mount"]


class Command:
    """A command that runs on a host. It ends with its host."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.output = output
        self._process = process

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises `subprocess.TimeoutExpired`."""
        return self._process.wait(timeout_s)

    def text(self) -> str:
        """What it has printed, errors included."""
        return self.output.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to its first process, if it has not ended."""
        with contextlib.suppress(OSError, IndexError):
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
            os.kill(int(children.split()[0]), number)


class Box:
    """Hosts 0 to n-1 on one switch: host i has the name `host<i>`, an address, and one interface, `eth0`. They share
    the file system, as the machines of a cluster share theirs, and talk to each other only.

    From `__enter__` to `__exit__`; when this process ends in another way, the hosts and all that runs on them end too.
    """

    def __init__(self, num_hosts: int, folder: Path, link: Link | None = None) -> None:
        """What host i prints goes to `folder/host<i>.log`, unless a command names another file. Raises `InputError`."""
        if not 1 <= num_hosts <= _MOST_HOSTS:
            raise InputError(f"a box has 1 to {_MOST_HOSTS} hosts, {num_hosts} were asked for")
        self.folder = folder
        self._num_hosts = num_hosts
        self._link = link or Link()
        self._hosts: list[int] = []
        self._keeper_id = 0
        self._keeper: subprocess.Popen[str] | None = None

    @classmethod
    def attached(cls, state: str, folder: Path) -> Self:
        """A box that another process keeps, from the text that its `state` returned."""
        values = json.loads(state)
        box = cls(len(values["hosts"]), folder)
        box._hosts = values["hosts"]
        box._keeper_id = values["keeper"]
        return box

    def __enter__(self) -> Self:
        """Raises `InputError` where this machine cannot do it, or cannot shape the link as asked."""
        if reason := why_impossible():
            raise InputError(reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        names = (self.folder / "hosts").resolve()
        with open(self.folder / "keeper.log", "w") as log:
            self._keeper = subprocess.Popen(
                [*_namespaces(), sys.executable, "-S", keeper.__file__, str(self._num_hosts), str(names)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._keeper_id = self._keeper.pid
        assert self._keeper.stdout
        line = self._keeper.stdout.readline()
        try:
            if not line:
                self._keeper.wait(_START_S)
                raise InputError(f"the hosts did not start: {(self.folder / 'keeper.log').read_text().strip()}")
            self._hosts = json.loads(line)
            for host in range(self._num_hosts):
                self.shape(host, self._link)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the hosts and all that runs on them. Returns when they are gone."""
        if self._keeper is None:
            return
        assert self._keeper.stdin
        assert self._keeper.stdout
        self._keeper.stdin.close()
        self._keeper.wait(_CALL_S)
        self._keeper.stdout.close()
        self._keeper = None
        deadline = time.monotonic() + _CALL_S
        while any(map(_is_alive, self._hosts)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def is_up(self) -> bool:
        """Whether its keeper lives; another process may have got its id since it ended."""
        with contextlib.suppress(OSError):
            return keeper.__file__.encode() in Path(f"/proc/{self._keeper_id}/cmdline").read_bytes()
        return False

    @property
    def state(self) -> str:
        """What another process needs to use this box (`attached`)."""
        return json.dumps({"keeper": self._keeper_id, "hosts": self._hosts})

    def address(self, host: int) -> str:
        """The host's address. Raises `InputError` for a host that does not exist, as do all methods; those that do
        something with a host also for one that has vanished."""
        self._check(host)
        return keeper.address_of(host)

    def command_line(self, host: int, arguments: Sequence[str], folder: Path | None = None) -> list[str]:
        """What runs a command on a host, in a working folder (default: this process's)."""
        inside = ["env", f"--chdir={folder or Path.cwd()}", *arguments]
        return [*_enter(self.first_process(host)), "--uts", "--pid", "--mount", *inside]

    def start(
        self,
        host: int,
        arguments: Sequence[str],
        *,
        output: Path | None = None,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Command:
        """Starts a command on a host, with this process's environment and `variables`. What it prints is added to
        `output`."""
        output = output or self.folder / f"{keeper.name_of(host)}.log"
        with open(output, "ab") as file:
            process = subprocess.Popen(
                self.command_line(host, arguments, folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(variables or {})},
            )
        return Command(process, output)

    def run(self, host: int, arguments: Sequence[str], timeout_s: float = 60) -> str:
        """What a command on a host prints. Raises `subprocess.CalledProcessError` where it fails."""
        line = self.command_line(host, arguments)
        return subprocess.run(line, check=True, capture_output=True, text=True, timeout=timeout_s).stdout

    def cut(self, host: int) -> None:
        """Pulls the host's cable out of the switch: packets get lost both ways, and nobody is told."""
        self._on_switch("ip", "link", "set", self._plug(host), "nomaster")

    def heal(self, host: int) -> None:
        """Plugs the cable in again."""
        self._on_switch("ip", "link", "set", self._plug(host), "master", keeper.BRIDGE)

    def kill(self, host: int) -> None:
        """The host vanishes as a machine without power does: first its cable, then all of its processes."""
        first = self.first_process(host)
        self.cut(host)
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + _CALL_S
        while _is_alive(first) and time.monotonic() < deadline:
            time.sleep(0.01)

    def shape(self, host: int, link: Link) -> None:
        """Gives the host's interface another rate, latency and loss, in both directions."""
        if link.loss and shutil.which("nft") is None:
            raise InputError("packets get lost by the program nft; install it (Debian: nftables), or leave loss=0")
        host_network, switch = _enter(self.first_process(host)), _enter(self._keeper_id)
        for enter, device in ((host_network, "eth0"), (switch, keeper.port_of(host)), (switch, self._plug(host))):
            for undo in (["tc", "qdisc", "delete", "dev", device, "root"], ["nft", f"delete table netdev {device}"]):
                if shutil.which(undo[0]):  # It fails where there is nothing to undo.
                    subprocess.run([*enter, *undo], capture_output=True, timeout=_CALL_S)
        self._delay(host, link.latency_ms)
        for enter, device in ((host_network, "eth0"), (switch, keeper.port_of(host))):
            for do in link.qdiscs(device):
                _checked([*enter, *do])
        for enter, device in ((host_network, "eth0"), (switch, self._plug(host))):
            for do in link.losses(device):
                _checked([*enter, *do])

    def _delay(self, host: int, latency_ms: float) -> None:
        """Puts `delay.py` between the host's port and the switch, or takes it out. A cable that is cut stays so."""
        port, plug, delayed = keeper.port_of(host), self._plug(host), keeper.delayed_port_of(host)
        is_cut = "master" not in self._links()[plug]
        if plug == delayed:
            self._on_switch("ip", "link", "delete", delayed)  # This ends its program, too.
        if latency_ms:
            inner = f"{delayed}in"
            self._on_switch("ip", "link", "set", port, "nomaster")
            self._on_switch("ip", "link", "add", delayed, "up", "type", "veth", "peer", "name", inner)
            self._on_switch("ip", "link", "set", inner, "up")
            # It is a process of the host, so that it ends with it, in the network of the switch.
            enter = [*_enter(self.first_process(host), f"--net=/proc/{self._keeper_id}/ns/net"), "--pid", "--mount"]
            _checked([*enter, sys.executable, "-S", delay.__file__, port, inner, str(latency_ms)])
        if not is_cut:
            self.heal(host)

    def _plug(self, host: int) -> str:
        """The interface of the switch that is in it while the host is not cut off."""
        self.first_process(host)
        delayed = keeper.delayed_port_of(host)
        return delayed if delayed in self._links() else keeper.port_of(host)

    def _links(self) -> dict[str, dict[str, Any]]:
        """The interfaces of the switch by name, as ip describes them."""
        return {link["ifname"]: link for link in json.loads(self._on_switch("ip", "-json", "-statistics", "link"))}

    def sent_bytes(self) -> list[int]:
        """Bytes that every host has sent, headers included."""
        links = self._links()
        ports = [keeper.port_of(host) for host in range(self._num_hosts)]
        return [links[port]["stats64"]["rx"]["bytes"] if port in links else 0 for port in ports]

    def _check(self, host: int) -> None:
        if not 0 <= host < self._num_hosts:
            raise InputError(f"host {host} does not exist; the box has hosts 0 to {self._num_hosts - 1}")

    def first_process(self, host: int) -> int:
        """The id of the process whose namespaces the host is."""
        self._check(host)
        if not _is_alive(self._hosts[host]):
            raise InputError(f"host {host} has vanished; another box has it again")
        return self._hosts[host]

    def _on_switch(self, *arguments: str) -> str:
        return _checked([*_enter(self._keeper_id), *arguments])


def _enter(process: int, network: str = "--net") -> list[str]:
    """Runs a program in the network of a process, or in the one that is named."""
    own_user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(process), *own_user, network]


def _checked(arguments: list[str]) -> str:
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=_CALL_S)
    if result.returncode:
        raise InputError(f"{' '.join(arguments)} failed: {result.stderr.strip()}")
    return result.stdout


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
