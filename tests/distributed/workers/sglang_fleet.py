"""Two processes of a trainer: rank 0 waits for answers while engines join, the other serves. Prints what each saw."""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dapo_mega.distributed.errors import raise_on_all_ranks
from dapo_mega.engines.sglang.fleet import SglangFleet
from dapo_mega.errors import FleetError, InputError

ERRORS = {"none": None, "input": InputError("the disk is full"), "fleet": FleetError("too few engines")}


class JoiningDriver:
    """Engines have joined before each of the first two answers."""

    def __init__(self):
        self.num_joined = 0
        self.num_answers = 0

    def wait_for_engines(self):
        pass

    def has_outdated(self):
        self.num_joined += 1
        return self.num_joined <= 2

    def next_answer(self, timeout_s):
        self.num_answers += 1
        return self.num_answers


def main(error):
    dist.init_process_group("gloo")
    processes = SimpleNamespace(rank=dist.get_rank(), control=dist.group.WORLD)
    fleet = SglangFleet(processes, JoiningDriver() if processes.rank == 0 else None)
    updates = []

    def update():
        total = torch.ones(1)
        dist.all_reduce(total)
        updates.append(float(total))
        if len(updates) == 2 and error:
            raise error

    fleet.on_outdated_engines(update)
    try:
        with raise_on_all_ranks(processes.control):
            if processes.rank == 0:
                try:
                    answers = [fleet.next_answer() for _ in range(3)]
                finally:
                    fleet.end_serving()
                assert answers == [1, 2, 3]
            else:
                fleet.serve()
        ending = "went on"
    except (InputError, FleetError) as caught:
        ending = str(caught)
    endings = [None, None]
    dist.all_gather_object(endings, (updates, ending))
    if processes.rank == 0:
        print(endings)
    dist.destroy_process_group()


main(ERRORS[sys.argv[1]])
