"""Checks that ranks meet: in every group the same operations of the same sizes in the same order, for each send its
receive, and no cycle of waits.

A rank that is not rehearsed is taken to do what the rank does that stands for it. Waits are those of a rank that
continues when a collective is complete or a receive has its tensor; sends are taken to be buffered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    pairs: dict[tuple[GroupName, int, int], tuple[list[Event], list[Event]]] = defaultdict(lambda: ([], []))
    for rank, of_rank in events.items():
        for event in of_rank:
            if event.peer is None or event.peer not in events:
                continue
            if event.operation == "send":
                pairs[event.group, rank, event.peer][0].append(event)
            elif event.operation == "receive":
                pairs[event.group, event.peer, rank][1].append(event)
    for (group, source, to), (sent, received) in pairs.items():
        for number in range(max(len(sent), len(received))):
            mine = sent[number] if number < len(sent) else None
            theirs = received[number] if number < len(received) else None
            if mine is None or theirs is None or (mine.dtype, mine.sizes) != (theirs.dtype, theirs.sizes):
                yield (
                    f"number {number + 1} of what {roles.describe(source)} sends to {roles.describe(to)} in the "
                    f"{group.describe()} differs: the one {_does(mine)}, and the other {_does(theirs)}"
                )
                break


def _cycle(roles: Roles, events: Mapping[int, Sequence[Event]]) -> Iterator[str]:
    """Runs all ranks' events until none can continue."""
    at = dict.fromkeys(events, 0)
    arrived: Counter[tuple[GroupName, int]] = Counter()
    calls: dict[int, Counter[GroupName]] = {rank: Counter() for rank in events}
    sent: Counter[tuple[GroupName, int, int]] = Counter()
    taken: Counter[tuple[GroupName, int, int]] = Counter()
    entered: set[tuple[int, int]] = set()
    members = {group: roles.within(group.ranks) for group in _groups(events)}

    def continues(rank: int) -> bool:
        """Whether the rank's next event is over; what it gives to others is given in any case."""
        event, is_new = events[rank][at[rank]], (rank, at[rank]) not in entered
        entered.add((rank, at[rank]))
        if event.operation == "send":
            sent[event.group, rank, event.peer or 0] += 1
            return True
        if event.operation == "receive" or (event.operation == "wait" and event.peer not in events):
            return True
        if event.operation == "wait":
            key = (event.group, event.peer or 0, rank)
            if sent[key] <= taken[key]:
                return False
            taken[key] += 1
            return True
        if is_new:
            calls[rank][event.group] += 1
            arrived[event.group, calls[rank][event.group]] += 1
        return arrived[event.group, calls[rank][event.group]] >= len(members[event.group])

    progress = True
    while progress:
        progress = False
        for rank in events:
            while at[rank] < len(events[rank]) and continues(rank):
                at[rank] += 1
                progress = True
    waiting = [rank for rank in events if at[rank] < len(events[rank])]
    if waiting:
        lines = [f"{roles.describe(rank)} in {events[rank][at[rank]].describe()}" for rank in waiting]
        yield f"{len(waiting)} of the rehearsed ranks wait for each other for ever: " + "; ".join(lines)


def _groups(events: Mapping[int, Iterable[Event]]) -> set[GroupName]:
    return {event.group for of_rank in events.values() for event in of_rank}
