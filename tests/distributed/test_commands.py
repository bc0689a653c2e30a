"""Rank 0 commands, the others obey: what each gets and gives, who hears of an error, and how all end."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dapo_mega.distributed import commands
from dapo_mega.distributed.commands import Commanded, Own, command, gathered
from dapo_mega.errors import FleetError, InputError

from .launching import run_distributed

pytestmark = pytest.mark.distributed


class Crew(Commanded):
    def __init__(self, control=None, work=None):
        super().__init__(control or dist.group.WORLD)
        self.work = work
        self.heard = []

    @command
    def total(self, value, own):
        """The sum over all processes of the value, and of what is rank 0's own."""
        box = torch.tensor([value, own.value or 0.0])
        dist.all_reduce(box)
        self.heard.append(own.value)
        return box.tolist()

    @command
    def twice(self, value):
        """Within a command, another one is a plain method."""
        return [self.total(value, own=Own(None)), self.total(value, own=Own(None))]

    @gathered
    def ranks(self, *, offset):
        return dist.get_rank() + offset

    @command
    def fail(self, *ranks):
        if dist.get_rank() in ranks:
            raise InputError(f"rank {dist.get_rank()} cannot")
        return "well"

    @command
    def fail_alone(self):
        """What the others wait for never comes."""
        if dist.get_rank() == 1:
            raise InputError("rank 1 cannot")
        dist.all_reduce(torch.ones(1), group=self.work)


def commanded(ending):
    """What each process has seen, and with which error it has ended."""
    crew, seen = Crew(), []
    try:
        if dist.get_rank():
            crew.obey()
        else:
            with crew.commanding():
                seen += [crew.total(1.0, own=Own(5.0)), crew.twice(2.0), crew.ranks(offset=10)]
                for ranks in ((), (1,), (0, 2)):
                    try:
                        seen.append(crew.fail(*ranks))
                    except InputError as error:
                        seen.append(str(error))
                seen.append(crew.total(1.0, own=Own(None)))
                if ending:
                    raise FleetError(ending)
    except FleetError as error:
        seen.append(str(error))
    return [*seen, crew.heard]


@pytest.mark.parametrize("ending", ["", "no engines"])
def test_all_do_what_rank_0_commands_and_it_hears_of_every_error(ending):
    first, *others = run_distributed(commanded, 3, ending, timeout_s=120)
    ended = [ending] if ending else []
    assert first == [
        [3.0, 5.0],
        [[6.0, 0.0]] * 2,
        [10, 11, 12],
        "well",
        "rank 1 cannot",
        "rank 0 cannot",
        [3.0, 0.0],
        *ended,
        [5.0, None, None, None],
    ]
    assert others == [[*ended, [None] * 4]] * 2


def one_fails_alone():
    """After how many seconds each process has ended, and with which error. Rank 1 reports its error, which rank 0, in
    the collective without it, does not hear."""
    commands._LONE_FAILURE_S = 0.5
    groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=5)) for _ in range(2)]
    crew, started = Crew(*groups), time.monotonic()
    try:
        if dist.get_rank():
            crew.obey()
        else:
            with crew.commanding():
                crew.fail_alone()
    except (InputError, RuntimeError) as error:
        return time.monotonic() - started, type(error).__name__, str(error)


def test_a_process_that_fails_alone_ends_and_waits_for_nobody():
    first, second = run_distributed(one_fails_alone, 2, timeout_s=120)
    assert second[1:] == ("InputError", "rank 1 cannot")
    assert 0.4 < second[0] < first[0]
    assert first[1] == "RuntimeError"
