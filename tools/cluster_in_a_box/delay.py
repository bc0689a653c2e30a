"""The program that delays a host's packets: `delay.py ONE OTHER MS` carries every frame between two interfaces, in both
directions, each one `MS` milliseconds after it came. It works in the background from when it ends, until one of the two
interfaces is gone.

A program because tc delays packets only in kernels that have netem. Only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections import deque

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33
_ALL_PROTOCOLS = 3
_BUFFER_BYTES = 1 << 26
_LARGEST_FRAME = 1 << 17


def _opened(interface: str) -> socket.socket:
    """All frames that arrive at the interface, as the kernel has them: uncut, with the header that says what is left
    to do with them (checksum, segments), and which sending takes again."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    frames.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    frames.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for limited, forced in ((socket.SO_SNDBUF, _SO_SNDBUFFORCE), (socket.SO_RCVBUF, _SO_RCVBUFFORCE)):
        frames.setsockopt(socket.SOL_SOCKET, limited, _BUFFER_BYTES)
        with contextlib.suppress(PermissionError):  # Only the machine's root may exceed the system's limit.
            frames.setsockopt(socket.SOL_SOCKET, forced, _BUFFER_BYTES)
    frames.bind((interface, _ALL_PROTOCOLS))
    return frames


def _carry(one: socket.socket, other: socket.socket, latency_s: float) -> None:
    """Raises `OSError` when an interface is gone."""
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    towards = {one: other, other: one}
    while True:
        limit = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([one, other], [], [], limit)[0]:
            frame = source.recv(_LARGEST_FRAME)
            waiting.append((time.monotonic() + latency_s, towards[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # A full queue loses it, as a switch's does.
                target.send(frame, socket.MSG_DONTWAIT)


def main() -> None:
    one, other = map(_opened, sys.argv[1:3])
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    _carry(one, other, float(sys.argv[3]) / 1000)


if __name__ == "__main__":
    main()
