"""The experts of a trajectory's tokens, from turn to turn and from piece to piece."""

import numpy as np
import pytest

from dapo_mega.environments.rows import Pieces, turns_of
from dapo_mega.types import GenerationRequest, Response, SamplingParams

NO_ROUTE = -1


def answer(request, turn, length):
    """A turn of so many tokens: what was asked for of it, token by token, is the place of the token + 100 x turn."""
    places = np.arange(request.routes_from, len(request.prompt_token_ids) + length - 1, dtype=np.int16)
    routes = (100 * turn + places)[:, None, None]
    return Response(
        request.request_id, np.zeros(length, np.int32), np.zeros(length, np.float32), "stop", 0, routes=routes
    )


@pytest.mark.parametrize("is_behind_row", [True, False])
def test_tokens_keep_the_experts_of_the_request_that_first_named_them(is_behind_row):
    prompt = np.zeros(2, np.int32)
    pieces = Pieces(GenerationRequest(0, prompt, 0, SamplingParams(), routes_from=0))
    rows = pieces.begin([1], is_behind_row=is_behind_row)
    rows.add(answer(rows.next_request(0, 9), 0, 2))
    rows.append([1, 1])
    rows.add(answer(rows.next_request(1, 9), 1, 2))
    rewritten = pieces.begin([1, 1])
    rewritten.add(answer(rewritten.next_request(2, 9), 2, 1))
    trajectory = pieces.trajectory()
    first = [0, 1, 2, 3, 104, 105, 106, 107, NO_ROUTE]
    if not is_behind_row:
        first = [NO_ROUTE, NO_ROUTE, 0, 1, 102, 103, 104, 105, NO_ROUTE]
    assert trajectory.routes.flatten().tolist() == [*first, 200, 201, NO_ROUTE]
    again = Pieces(GenerationRequest(0, prompt, 0, SamplingParams(), routes_from=0), trajectory)
    assert np.array_equal(again.trajectory().routes, trajectory.routes)
    assert again.last.next_request(3, 9).routes_from == 2


def test_turns_of_an_earlier_life_keep_their_experts_where_they_are_repeated_in_another_order():
    """Two go on behind the first: the one that is asked for first in its piece, the other in a piece of its own."""
    asked = GenerationRequest(0, np.zeros(2, np.int32), 0, SamplingParams(), routes_from=0)
    pieces = Pieces(asked)
    for turn, observed in enumerate(([], [1], [0, 0, 0, 0, 2])):
        rows = pieces.last if turn == 1 else pieces.begin(observed, is_behind_row=not turn)
        rows.append(observed if turn == 1 else [])
        rows.add(answer(rows.next_request(turn, 9), turn, 2))
    first, second, third = (turn.response for turn in turns_of(pieces.trajectory(), asked))
    again = Pieces(asked)
    rows = again.begin([], is_behind_row=True)
    rows.add(first)
    rows.append([2])
    rows.add(third)
    again.begin([0, 0, 0, 0, 1]).add(second)
    routes = again.trajectory().routes.flatten().tolist()
    assert routes == [0, 1, 2, 203, 204, 205, NO_ROUTE, *[NO_ROUTE] * 3, 103, 104, 105, NO_ROUTE]


def test_without_experts_there_are_none():
    pieces = Pieces(GenerationRequest(0, np.zeros(2, np.int32), 0, SamplingParams()))
    request = pieces.begin([1], is_behind_row=True).next_request(0, 9)
    assert request.routes_from is None
    pieces.last.add(Response(0, np.zeros(2, np.int32), np.zeros(2, np.float32), "stop", 0))
    assert not pieces.trajectory().routes.size
