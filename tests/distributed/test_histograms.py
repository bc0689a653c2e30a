"""The histograms that all ranks count together are those of one process, in every layout."""

import pytest
import torch
import torch.distributed as dist

from dapo_mega.batching.microbatch import context_slice, pack
from dapo_mega.batching.plan import PackingLayout
from dapo_mega.batching.samples import flatten
from dapo_mega.distributed.processes import Processes
from dapo_mega.megatron.objectives import TokenBatch
from dapo_mega.training.histograms import StepCounts

from .launching import run_distributed
from .tiny import make_samples

pytestmark = pytest.mark.distributed


def histograms(data_size, context_size, tensor_size, pipeline_size):
    """Of 12 samples, of which each replica has every `data_size`-th, in two mini-batches."""
    rank, sizes = dist.get_rank(), (data_size, pipeline_size, context_size, tensor_size)
    place = torch.unravel_index(torch.tensor(rank), sizes)
    data_rank, pipeline_rank, context_rank, tensor_rank = (int(index) for index in place)
    world = dist.group.WORLD
    processes = Processes(
        rank, dist.get_world_size(), data_rank, data_size, tensor_rank, tensor_size, pipeline_rank, pipeline_size,
        context_rank, context_size, 0, 1, torch.device("cpu"), world, world, world,
    )  # fmt: skip
    samples = flatten(make_samples(12)).split([6, 6])
    layout = PackingLayout(multiple_of=2 * context_size, segment_multiple=2 * context_size)
    mini_batches, counts = [], StepCounts()
    for mini_batch in samples:
        own = mini_batch.select(range(data_rank, 6, data_size))
        micro = context_slice(pack(own, layout, max_response_tokens=64), context_rank, context_size)
        mini_batches.append([TokenBatch(micro)])
        response = micro.targets.response_mask
        counts.ratios.add(micro.targets.rollout_logprobs[response], micro.targets.loss_mask[response])
        counts.importance_weights.add(micro.targets.rollout_logprobs[response] + 1)
    return counts.histograms(mini_batches, processes)


def test_every_layout_counts_each_token_once():
    (whole,) = run_distributed(histograms, 1, 1, 1, 1, 1)
    samples = make_samples(12)
    num_responses = sum(int(sample.response_mask.sum()) for sample in samples)
    num_in_loss = sum(int(sample.loss_mask.sum()) for sample in samples)
    totals = {name: histogram.total for name, histogram in whole.items()}
    assert totals == {
        "policy/advantage": num_in_loss,
        "policy/ratio": num_in_loss,
        "mismatch/importance_weight": num_responses,
    }
    for layout in ((4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (1, 1, 2, 2)):
        assert run_distributed(histograms, 4, *layout) == [whole] * 4, layout
