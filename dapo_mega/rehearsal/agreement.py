"""Checks that ranks meet: in every group the same operations of the same sizes in the same order, for each send its
receive, and no cycle of waits.

A rank that is not rehearsed is taken to do what the rank does that stands for it. The device's tensors are sent as NCCL
does, and no buffer is taken to hold any: a send and its receive begin when both are issued and what their ranks issued
before on the same communicator is over. Sends and receives of a batch begin together, and are over together, on the
communicator of their group, as its collectives; single ones have a communicator for each pair of ranks in a group. The
host's tensors have no such order. A rank that waits for one of these, or calls a collective, issues nothing until it is
over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo_mega.rehearsal.communication import Event, GroupName
from dapo_mega.rehearsal.roles import Roles

_BETWEEN_TWO = ("send", "receive", "wait")


def disagreements(roles: Roles, events: Mapping[int, Sequence[Event]]) -> list[str]:
    """A sentence for each place at which ranks do not meet; none if all of a run's ranks can do what they do.

    `events` are those of each rehearsed rank, in order.
    """
    found = [*_collectives(roles, events), *_sends(roles, events)]
    # One difference makes others behind it; a cycle of waits is looked for where everything has its counterpart.
    return found or list(_cycle(roles, events))


def _collectives(roles: Roles, events: Mapping[int, Sequence[Event]]) -> Iterator[str]:
    by_group: dict[GroupName, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in events.items():
        for event in of_rank:
            if event.operation not in _BETWEEN_TWO:
                by_group[event.group][rank].append(event)
    for group, lists in by_group.items():
        members = roles.within(group.ranks)
        first = members[0]
        for rank in members[1:]:
            if text := _first_difference(roles, first, lists[first], rank, lists[rank]):
                yield text


def _first_difference(roles: Roles, one: int, ones: Sequence[Event], other: int, others: Sequence[Event]) -> str | None:
    for number in range(max(len(ones), len(others))):
        mine = ones[number] if number < len(ones) else None
        theirs = others[number] if number < len(others) else None
        if mine is None or theirs is None or _meeting(mine) != _meeting(theirs):
            group = (mine or theirs).group  # type: ignore[union-attr]
            return (
                f"number {number + 1} of the collectives in the {group.describe()} differs: "
                f"{roles.describe(one)} {_does(mine)}, and {roles.describe(other)} {_does(theirs)}; each would wait "
                f"for the other for ever, or take wrong data"
            )
    return None


def _does(event: Event | None) -> str:
    return f"calls {event.describe()} in phase {event.phase!r}" if event else "calls none any more"


def _meeting(event: Event) -> Any:
    """What has to be the same of all members."""
    # What each member gives in these may differ; the sum of what is taken is what others give.
    sizes = sum(event.sizes) if event.operation != "all_to_all" else len(event.sizes)
    return event.operation, event.dtype, sizes, event.peer


def _sends(roles: Roles, events: Mapping[int, Sequence[Event]]) -> Iterator[str]:
    """Between ranks that are both rehearsed."""
    pairs: dict[tuple[GroupName, int, int, bool], tuple[list[Event], list[Event]]] = defaultdict(lambda: ([], []))
    for rank, of_rank in events.items():
        for event in of_rank:
            if event.peer is None or event.peer not in events:
                continue
            on_group = event.is_batched and not event.is_host  # Single ones have other communicators.
            if event.operation == "send":
                pairs[event.group, rank, event.peer, on_group][0].append(event)
            elif event.operation == "receive":
                pairs[event.group, event.peer, rank, on_group][1].append(event)
    for (group, source, to, _), (sent, received) in pairs.items():
        for number in range(max(len(sent), len(received))):
            mine = sent[number] if number < len(sent) else None
            theirs = received[number] if number < len(received) else None
            if mine is None or theirs is None or (mine.dtype, mine.sizes) != (theirs.dtype, theirs.sizes):
                yield (
                    f"number {number + 1} of what {roles.describe(source)} sends to {roles.describe(to)} in the "
                    f"{group.describe()} differs: the one {_does(mine)}, and the other {_does(theirs)}"
                )
                break


@dataclass(eq=False)
class _Launch:
    """What a rank issues at once: a collective, a send or receive, or a batch of these. It begins when it is issued and
    the one `before` it on its communicator is over, and is over when it and all of `partners` have begun."""

    rank: int
    events: list[Event]
    before: _Launch | None = None
    partners: list[tuple[Event, _Launch, Event]] = field(default_factory=list)
    is_issued: bool = False
    has_begun: bool = False
    is_over: bool = False

    def moves(self) -> bool:
        """Begin, or end, if that can be; whether it could."""
        if not self.has_begun and (self.before is None or self.before.is_over):
            self.has_begun = True
            return True
        self.is_over = self.has_begun and all(launch.has_begun for _, launch, _ in self.partners)
        return self.is_over


def _cycle(roles: Roles, events: Mapping[int, Sequence[Event]]) -> Iterator[str]:
    """Runs all ranks' launches and waits until none can continue."""
    steps = {rank: _steps(rank, of_rank) for rank, of_rank in events.items()}
    _find_partners(steps)
    at = dict.fromkeys(steps, 0)
    open_: list[_Launch] = []
    moved = True
    while moved:
        moved = False
        for rank, of_rank in steps.items():
            while at[rank] < len(of_rank):
                launch, is_wait = of_rank[at[rank]]
                if is_wait and not launch.is_over:
                    break
                if not is_wait:
                    launch.is_issued = moved = True
                    open_.append(launch)
                at[rank] += 1
        while any([launch.moves() for launch in open_]):
            open_, moved = [launch for launch in open_ if not launch.is_over], True
    if open_:
        circle, launch = [], open_[0]
        while launch not in circle:
            circle.append(launch)
            if not launch.is_issued:
                launch = steps[launch.rank][at[launch.rank]][0]
            elif not launch.has_begun:
                assert launch.before
                launch = launch.before
            else:
                launch = next(other for _, other, _ in launch.partners if not other.has_begun)
        held = [launch for launch in circle[circle.index(launch) :] if launch.has_begun]
        lines = []
        for launch in held:
            own, other, its = next(part for part in launch.partners if not part[1].has_begun)
            lines.append(
                f"{roles.describe(launch.rank)} in {own.describe()}, until {roles.describe(other.rank)} comes to "
                f"{its.operation} at {its.place}"
            )
        yield f"{len(held)} of the rehearsed ranks wait for each other for ever: " + "; ".join(lines)


def _steps(rank: int, events: Sequence[Event]) -> list[tuple[_Launch, bool]]:
    """What the rank issues and, where the second is true, waits for, in order."""
    steps: list[tuple[_Launch, bool]] = []
    launches: dict[int, _Launch] = {}
    last: dict[Any, _Launch] = {}
    for event in events:
        if event.launch in launches:
            if event.operation == "wait":
                steps.append((launches[event.launch], True))
            else:
                launches[event.launch].events.append(event)
            continue
        launch = launches[event.launch] = _Launch(rank, [event])
        is_single = event.operation in _BETWEEN_TWO and not event.is_batched
        if not event.is_host:
            communicator = event.group, event.peer if is_single else None
            launch.before = last.get(communicator)
            last[communicator] = launch
        steps += [(launch, False)] if event.operation in _BETWEEN_TWO else [(launch, False), (launch, True)]
    return steps


def _find_partners(steps: Mapping[int, Sequence[tuple[_Launch, bool]]]) -> None:
    """Of each launch those that it meets: the same number of its kind, as all have their counterparts."""
    meetings: dict[Any, list[tuple[Event, _Launch]]] = defaultdict(list)
    for rank, of_rank in steps.items():
        number: Counter[Any] = Counter()
        for launch, is_wait in of_rank:
            for event in () if is_wait else launch.events:
                key: Any = event.group
                if event.operation in _BETWEEN_TWO:
                    if event.peer not in steps:
                        continue
                    ends = (rank, event.peer) if event.operation == "send" else (event.peer, rank)
                    key = event.group, ends, event.is_batched and not event.is_host
                number[key] += 1
                meetings[key, number[key]].append((event, launch))
    for parts in meetings.values():
        for event, launch in parts:
            launch.partners += [(event, other, its) for its, other in parts if other is not launch]
