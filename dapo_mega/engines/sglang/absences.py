"""Describes the engines that a waiting run misses: since when, why, and what the user can do."""

from __future__ import annotations

import time
from collections.abc import Mapping

from dapo_mega.config import FleetConfig
from dapo_mega.engines.sglang.health import Watch
from dapo_mega.engines.sglang.membership import PRESENT, Member


def describe_absences(
    members: Mapping[str, Member], health: Mapping[str, Watch], fleet: FleetConfig
) -> tuple[str, str]:
    """All engines that cannot be used now, each with its state, and what the user can do to get them."""
    missing = [
        f"{url} since {_clock(member.missing_since)}: {_state(member, health[url])}"
        for url, member in members.items()
        if member.state not in PRESENT
    ]
    states = {health[url].state for url, member in members.items() if member.state not in PRESENT}
    advice = []
    if len(members) < fleet.min_engines:
        address = f" --rendezvous {fleet.rendezvous} and this run's API key" if fleet.rendezvous else ""
        where = "" if fleet.rendezvous else " and name them in rollout.fleet.urls"
        advice.append(
            f"start engines with launch/serve_rollouts.py{address}{where}, or lower rollout.fleet.min_engines="
            f"{fleet.min_engines}"
        )
    if "dead" in states:
        advice.append("restart the dead engines (launch/serve_rollouts.py does so by itself)")
    if "hung" in states:
        advice.append(
            "restart the hung engines (launch/serve_rollouts.py does so after --restart-hung-after-s; without this "
            "package's plugin an engine waits up to 30 minutes for a trainer that was killed while the engine joined)"
        )
    if any(member.state == "refused" for member in members.values()):
        advice.append("correct the refused engines and restart them")
    described = "; ".join(missing) or ("no others are known" if members else "none is known")
    return described, "; ".join(advice) or "wait until they have started"


def _state(member: Member, health: Watch) -> str:
    if member.state == "refused":
        return f"refused, {member.reason}"
    match health.state:
        case "healthy":
            return f"is taken up, {member.reason}" if member.reason else "is taken up"
        case "starting":
            return f"has not answered a probe for {health.silence_s:.0f} s ({health.reason})"
    return f"{health.state} for {health.state_s:.0f} s, {health.reason}"


def _clock(moment: float) -> str:
    """The time of day at `moment` of the monotonic clock, and how long ago that was."""
    seconds = time.monotonic() - moment
    return f"{time.strftime('%H:%M:%S', time.localtime(time.time() - seconds))} ({seconds:.0f} s)"
