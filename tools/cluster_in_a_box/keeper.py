"""The program that keeps a box: it makes the bridge and the hosts, says so on standard output, and lives until its
standard input ends.

Everything is in namespaces of its own and of its hosts. When it is gone, whatever the cause, the kernel removes hosts,
processes, interfaces and bridge.

Only the standard library: it starts in the time of one import.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

BRIDGE = "switch"
_INIT = """
hostname "$1"
for kind in all default; do echo 1 > /proc/sys/net/ipv6/conf/$kind/disable_ipv6; done 2> /dev/null
ip link set lo up
echo ready
trap : TERM INT HUP
while :; do sleep 1000 & wait $!; done
"""
"""The first process of a host: ends what its commands leave, and dies with its keeper."""
_WAIT_S = 30.0


def port_of(host: int) -> str:
    """The bridge's end of a host's cable."""
    return f"port{host}"


def delayed_port_of(host: int) -> str:
    """The bridge's end of a cable with latency: `delay.py` carries frames between its other end and the port."""
    return f"delayed{host}"


def address_of(host: int) -> str:
    return f"10.77.{(host + 1) // 250}.{(host + 1) % 250 + 1}"


def name_of(host: int) -> str:
    return f"host{host}"


def call(*arguments: str) -> None:
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=_WAIT_S)
    if result.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {(result.stderr or result.stdout).strip()}")


def _start_host(host: int) -> tuple[subprocess.Popen[str], int]:
    """Its guard, and the id of its first process. `setpriv`: it ends with this process, also after SIGKILL."""
    namespaces = ["--net", "--uts", "--pid", "--mount-proc", "--kill-child=KILL"]
    guard = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", "-c", _INIT, "init", name_of(host)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdout
    if guard.stdout.readline() != "ready\n":
        raise RuntimeError(f"{name_of(host)} did not start")
    first = int(Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()[0])
    port = port_of(host)
    call("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(first))
    call("ip", "link", "set", port, "master", BRIDGE, "up")
    call("nsenter", "-t", str(first), "-n", "ip", "link", "set", "eth0", "up")
    call("nsenter", "-t", str(first), "-n", "ip", "address", "add", f"{address_of(host)}/16", "dev", "eth0")
    return guard, first


def main() -> None:
    num_hosts, names = int(sys.argv[1]), Path(sys.argv[2])
    lines = ["127.0.0.1 localhost", *(f"{address_of(host)} {name_of(host)}" for host in range(num_hosts))]
    names.write_text("\n".join(lines) + "\n")
    try:
        call("mount", "--bind", str(names), "/etc/hosts")
        for kind in ("all", "default"):
            if (ipv6 := Path(f"/proc/sys/net/ipv6/conf/{kind}/disable_ipv6")).exists():
                ipv6.write_text("1")
        call("ip", "link", "add", BRIDGE, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        call("ip", "link", "set", BRIDGE, "up")
        hosts = [_start_host(host) for host in range(num_hosts)]
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    print(json.dumps([first for _, first in hosts]), flush=True)
    while sys.stdin.readline():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
