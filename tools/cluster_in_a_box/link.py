"""The network interface of a host: its rate, latency and loss, and the commands that shape it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dapo_mega.errors import InputError

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_LEAST_RATE, _LARGEST_RATE = 1e3 / 8, 100e9 / 8
"""Bytes per second that tc takes."""
_BURST_S = 0.004
"""The longest time for which a full bucket lets bytes pass unshaped."""
_QUEUE_S = 0.1
_LEAST_BURST = 32 * 1024


@dataclass(frozen=True)
class Link:
    """What a host's interface carries, in each direction.

    `rate`: bits per second as tc writes them (`100mbit`); None: unshaped. `latency_ms`: delay of every packet. `loss`:
    share of packets that get lost.
    """

    rate: str | None = None
    latency_ms: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        """Raises `InputError` for what cannot be shaped."""
        if self.rate is not None and not _LEAST_RATE <= _bytes_per_second(self.rate) <= _LARGEST_RATE:
            raise InputError(
                f"the rate {self.rate!r} does not exist; give one from 1kbit to 100gbit, such as 100mbit or 2.5gbit"
            )
        if not 0 <= self.latency_ms <= 10_000:
            raise InputError(f"the latency is {self.latency_ms:g} ms; give 0 to 10000")
        if not 0 <= self.loss <= 0.9:
            raise InputError(f"the loss is {self.loss:g}; give a share of packets from 0 to 0.9")

    @property
    def bytes_per_second(self) -> float | None:
        """None: unshaped."""
        return None if self.rate is None else _bytes_per_second(self.rate)

    def qdiscs(self, device: str) -> list[list[str]]:
        """Calls of tc that shape what leaves `device`, after those that removed the earlier shape."""
        if self.bytes_per_second is None:
            return []
        burst = max(_LEAST_BURST, int(self.bytes_per_second * _BURST_S))
        limit = burst + int(self.bytes_per_second * _QUEUE_S)
        shape = ["tbf", "rate", str(self.rate), "burst", str(burst), "limit", str(limit)]
        return [["tc", "qdisc", "add", "dev", device, "root", *shape]]

    def losses(self, device: str) -> list[list[str]]:
        """Calls of nft that lose packets which arrive at `device`, in a table named after it."""
        if not self.loss:
            return []
        chain = f"{{ type filter hook ingress device {device} priority 0; }}"
        draw = f"numgen random mod 100000 < {round(self.loss * 100_000)} drop"
        return [
            ["nft", f"add table netdev {device}"],
            ["nft", f"add chain netdev {device} loss {chain}"],
            ["nft", f"add rule netdev {device} loss {draw}"],
        ]


def _bytes_per_second(rate: str) -> float:
    """0 for a text that is no rate."""
    match = _RATE.fullmatch(rate)
    return float(match[1]) * _UNITS[match[2]] / 8 if match else 0.0
