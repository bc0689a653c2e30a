import pytest

from dapo_mega.config import ParallelConfig
from dapo_mega.planning.rank_layout import RankLayout

from .models import dense


def placement(world_size=1, **parallel):
    return RankLayout(dense(), ParallelConfig(**parallel), world_size)


def peaks(stage, num_micro_batches, **parallel):
    return max(placement(8, **parallel).held_forwards(stage, num_micro_batches), key=sum)


@pytest.mark.parametrize(("stage", "held"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_a_1f1b_stage_holds_a_forward_pass_for_each_stage_to_the_last(stage, held):
    assert peaks(stage, 8, pipeline=4) == [held]
    assert peaks(stage, 2, pipeline=4) == [min(held, 2)]


def test_interleaved_stages_hold_warm_up_and_one_more_forward_pass():
    # Narayanan et al. 2021, figure 4: 2 (p - r - 1) + (v - 1) p warm-up passes.
    assert sum(peaks(0, 8, pipeline=2, virtual_pipeline=2)) == 2 + 2 + 1
    assert sum(peaks(1, 8, pipeline=2, virtual_pipeline=2)) == 2 + 1
    assert peaks(0, 8, pipeline=2, virtual_pipeline=2) == [3, 2]
    # With one round, all of it is warm-up.
    assert peaks(0, 2, pipeline=2, virtual_pipeline=2) == [2, 2]


def test_after_the_warm_up_every_forward_pass_is_followed_by_one_backward_pass():
    moments = list(placement(8, pipeline=2, virtual_pipeline=4).held_forwards(0, 6))
    assert [sum(held) for held in moments] == [*range(1, 9), *[9] * 8], "8 of warm-up, then one repetition"
    assert all(min(held) >= 0 for held in moments)
    assert list(placement(8, pipeline=2, virtual_pipeline=4).held_forwards(0, 600)) == moments


def test_chunks_cover_every_layer_once_and_ends_are_first_and_last():
    layout = placement(8, pipeline=2, virtual_pipeline=2)
    chunks = sorted((c for stage in range(2) for c in layout.chunks(stage)), key=lambda c: c.layers.start)
    assert [c.layers for c in chunks] == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    assert [c.is_first for c in chunks] == [True, False, False, False]
    assert [c.is_last for c in chunks] == [False, False, False, True]
    assert layout.chunks(0)[0] == chunks[0]
    assert layout.chunks(1)[1] == chunks[3]


@pytest.mark.parametrize(
    ("num_layers", "parallel", "sizes"),
    [
        (61, {"pipeline": 4}, [15, 16, 15, 15]),
        (94, {"pipeline": 4}, [23, 24, 24, 23]),
        (27, {"pipeline": 4}, [7, 7, 7, 6]),
        (3, {"pipeline": 2}, [2, 1]),
        (8, {"pipeline": 2, "virtual_pipeline": 3}, [1, 2, 2, 1, 1, 1]),
        (9, {"pipeline": 3, "pipeline_layout": "Et*3|t*4|ttL"}, [3, 4, 2]),
        (6, {"pipeline": 3, "virtual_pipeline": 2, "pipeline_layout": "E|(tt|)*2,(t|)*2 L"}, [0, 2, 2, 1, 1, 0]),
    ],
)
def test_layers_are_spread_as_evenly_as_they_can_be_or_as_the_layout_says(num_layers, parallel, sizes):
    layers = ParallelConfig(**parallel).chunk_layers(num_layers)
    assert list(map(len, layers)) == sizes
    assert [layer for chunk in layers for layer in chunk] == list(range(num_layers))


def test_bubble_share_is_that_of_the_papers_formula():
    # p = 4, m = 8: 3 idle slots beside 8 working ones; two chunks a stage halve them.
    assert placement(8, pipeline=4).bubble_share(8) == pytest.approx(3 / 11)
    assert placement(8, pipeline=4, virtual_pipeline=1).bubble_share(1) == pytest.approx(3 / 4)
    assert placement(8, pipeline=2, virtual_pipeline=2).bubble_share(4) == pytest.approx(0.125 / 1.125)
    assert placement().bubble_share(1) == 0.0
