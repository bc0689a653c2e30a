"""Faults in what ranks do together are found, and named with the ranks, the operation and the place."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import subprocess
import sys

import pytest
import torch
import torch._dynamo  # Else each rank imports it when it makes its first tensor.
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication

from dapo_mega.config import ParallelConfig
from dapo_mega.rehearsal.agreement import disagreements
from dapo_mega.rehearsal.communication import World
from dapo_mega.rehearsal.device import DEVICE, PretendedDevice
from dapo_mega.rehearsal.roles import Roles
from dapo_mega.rehearsal.together import Stuck, together

PAIR = Roles(ParallelConfig(), 2)


def found(step, roles=PAIR):
    """What is said of a world whose ranks do `step(rank)`, within the pretended device."""

    def work(rank, exchange):
        world = World(rank, roles.world_size, exchange)
        world.start()
        with PretendedDevice():
            step(rank)
        return world.events

    return disagreements(roles, together(roles, work))


def on_device(*shape):
    return torch.empty(*shape, device=DEVICE)


def test_ranks_that_meet_are_not_complained_about():
    def step(rank):
        dist.all_reduce(on_device(3))
        dist.send(on_device(4), 1) if rank == 0 else dist.recv(on_device(4), 0)
        found = [None, None]
        dist.all_gather_object(found, f"rank {rank}")
        assert found == ["rank 0", "rank 1"]

    assert found(step) == []


def test_values_of_the_host_are_exchanged():
    def step(rank):
        total = torch.tensor([1.0, float(rank)])
        dist.all_reduce(total)
        assert total.tolist() == [2.0, 1.0]
        dist.all_reduce(total, dist.ReduceOp.MAX)
        parts = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(parts, torch.tensor([float(rank)]))
        assert torch.cat(parts).tolist() == [0.0, 1.0]
        box = [{"from": rank}]
        dist.broadcast_object_list(box, src=1)
        assert box == [{"from": 1}]
        if rank == 0:
            dist.isend(torch.tensor([7]), dst=1)
        else:
            received = torch.zeros(1, dtype=torch.int64)
            dist.recv(received, src=0)
            assert received.item() == 7

    assert found(step) == []


def test_a_skipped_collective_is_found():
    def step(rank):
        for bucket in range(3):
            if (rank, bucket) != (1, 1):
                dist.all_reduce(on_device(10 + bucket))

    (text,) = found(step)
    assert all(part in text for part in ("number 2 of the collectives", "[11]", "[12]"))
    assert all(part in text for part in ("rank 0", "rank 1"))


def test_a_collective_of_one_rank_alone_is_found():
    def step(rank):
        dist.all_reduce(on_device(2))
        if rank == 0:
            dist.all_reduce(on_device(2))

    (text,) = found(step)
    assert "calls none any more" in text


def test_a_collective_of_the_host_that_one_rank_alone_calls_is_found():
    def step(rank):
        if rank == 0:
            dist.all_reduce(torch.zeros(2))

    with pytest.raises(Stuck, match=r"rank 0.* waits in all_reduce of \[2\] float32.*rank 1.*has ended"):
        found(step)


def test_another_operation_type_or_root_is_found():
    def other_type(rank):
        dist.all_reduce(torch.empty(2, dtype=torch.bfloat16 if rank else torch.float32, device=DEVICE))

    def other_root(rank):
        dist.broadcast(on_device(2), src=rank)

    def other_operation(rank):
        if rank:
            dist.all_reduce(on_device(4))
        else:
            dist.broadcast(on_device(4), src=0)

    assert "bfloat16" in found(other_type)[0]
    assert ", rank 0" in found(other_root)[0]
    assert "broadcast" in found(other_operation)[0]


def test_a_send_of_another_shape_is_found():
    def step(rank):
        if rank == 0:
            dist.isend(on_device(4, 8), 1)
        else:
            dist.irecv(on_device(4, 6), 0).wait()

    (text,) = found(step)
    assert all(part in text for part in ("[32]", "[24]", "rank 0", "rank 1"))


def test_a_send_without_its_receive_is_found():
    def step(rank):
        if rank == 0:
            dist.isend(on_device(4), 1)

    (text,) = found(step)
    assert "calls none any more" in text


def test_a_cycle_of_waits_is_found():
    def step(rank):
        dist.irecv(on_device(4), 1 - rank).wait()
        dist.isend(on_device(4), 1 - rank)

    (text,) = found(step)
    assert text.startswith("2 of the rehearsed ranks wait for each other for ever")


def waits(rank):
    dist.send(on_device(4), 1 - rank)
    dist.recv(on_device(4), 1 - rank)


def waits_for_what_it_receives(rank):
    dist.isend(on_device(4), 1 - rank)
    dist.irecv(on_device(4), 1 - rank).wait()


def waits_for_nothing(rank):
    dist.isend(on_device(4), 1 - rank)
    dist.irecv(on_device(4), 1 - rank)


@pytest.mark.parametrize("step", [waits, waits_for_what_it_receives, waits_for_nothing])
def test_sends_that_no_rank_receives_before_its_own_are_a_cycle(step):
    (text,) = found(step)
    assert text.startswith("2 of the rehearsed ranks wait for each other for ever")
    for rank in (0, 1):
        assert f"rank {rank} (data {rank}) in send of [4] float32" in text
        assert f"until rank {rank} (data {rank}) comes to receive" in text


def test_sends_and_receives_of_a_batch_begin_together():
    def step(rank):
        ends = [dist.P2POp(call, on_device(4), 1 - rank) for call in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    assert found(step) == []


def test_a_send_of_a_batch_needs_a_receive_of_a_batch():
    """Single ones have a communicator for each two ranks."""

    def step(rank):
        if rank == 0:
            dist.batch_isend_irecv([dist.P2POp(dist.isend, on_device(4), 1)])
        else:
            dist.recv(on_device(4), 0)

    assert len(found(step)) == 2


def test_sends_of_two_groups_or_of_the_host_go_on_beside_each_other():
    def step(rank):
        other = dist.new_group([0, 1])
        works = [dist.isend(on_device(4), 1 - rank, group=other if rank else None)]
        works += [dist.irecv(on_device(4), 1 - rank, group=None if rank else other)]
        works += [dist.isend(torch.zeros(2), 1 - rank), dist.irecv(torch.zeros(2), 1 - rank)]
        for work in works:
            work.wait()

    assert found(step) == []


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("issue", [p2p_communication._p2p_ops, p2p_communication._batched_p2p_ops])
def test_megatrons_orders_of_sends_have_no_cycle(size, issue):
    """Each stage sends to both neighbours and receives from both, as between two passes of a pipeline."""

    def step(rank):
        p2p_communication.torch = torch  # Not the one that does without a GPU, whose functions are others.
        names = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
        ends = {"prev_pipeline_rank": (rank - 1) % size, "next_pipeline_rank": (rank + 1) % size}
        works = issue(**{name: on_device(4) for name in names}, **ends, group=dist.new_group(range(size)))
        for work in works.values() if isinstance(works, dict) else works:
            work.wait()

    assert found(step, Roles(ParallelConfig(pipeline=size), size)) == []


def test_other_orders_of_two_groups_are_a_cycle():
    def step(rank):
        groups = [dist.new_group([0, 1], group_desc=name) for name in ("ONE_GROUP", "OTHER_GROUP")]
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(on_device(4), group=group)

    (text,) = found(step)
    assert all(part in text for part in ("one group of 2", "other group of 2"))


def test_the_original_process_may_be_in_a_group_of_its_own():
    def work(rank, exchange):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        world = World(rank, 2, exchange)
        world.start()
        total = torch.tensor([1.0])
        dist.all_reduce(total)
        return total.item()

    assert together(PAIR, work) == {0: 2.0, 1: 2.0}


@functools.lru_cache(maxsize=1)
def remembered(group):
    """As Megatron's rotary embeddings remember models, and with them their groups."""


def test_what_the_original_process_remembers_is_not_freed():
    """The end of one of its groups, whose threads no forked process has, would end a rehearsed rank."""

    def original():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        remembered(dist.group.WORLD)
        dist.destroy_process_group()
        gc.freeze()
        assert together(PAIR, lambda rank, exchange: remembered(rank)) == {0: None, 1: None}

    process = multiprocessing.get_context("fork").Process(target=original)
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_a_rank_that_fails_is_named():
    def step(rank):
        if rank == 1:
            raise ValueError("no such layer")

    with pytest.raises(Stuck, match=r"rank 1.*no such layer"):
        found(step)


def test_of_a_large_world_each_kind_of_rank_is_rehearsed():
    roles = Roles(ParallelConfig(tensor=4, pipeline=2, context=2, sequence=True), 64)
    # 64 = tensor 4 x context 2 x data 4 x pipeline 2.
    assert roles.rehearsed == [0, 1, 4, 8, 32, 33, 36, 40]
    assert roles.stand_in(3, range(4)) == 1
    assert roles.stand_in(12, [4, 12, 20, 28]) == 4
    assert roles.stand_in(24, [0, 8, 16, 24]) == 8
    assert roles.describe(40) == "rank 40 (stage 1, data 1, context 0, tensor 0)"


def test_what_modules_have_freed_is_not_freed_again(tmp_path):
    """Futures that were awaited, in a process of its own, as it may end."""
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, gc\n"
        "from dapo_mega.config import ParallelConfig\n"
        "from dapo_mega.rehearsal.roles import Roles\n"
        "from dapo_mega.rehearsal.together import together\n"
        "async def wait():\n"
        "    await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(50)))\n"
        "for _ in range(3):\n"
        "    asyncio.run(wait())\n"
        "    together(Roles(ParallelConfig(), 1), lambda rank, exchange: rank)\n"
        "    gc.collect()\n"
    )
    assert subprocess.run([sys.executable, program], timeout=60).returncode == 0
