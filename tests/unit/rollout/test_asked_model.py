"""A model that is asked and not trained: the same answers for the same batch, and whose weights they are."""

import numpy as np
import pytest

from dapo_mega.config import RunConfig
from dapo_mega.data.tokenizer import build_byte_tokenizer
from dapo_mega.errors import InputError
from dapo_mega.rollout.asked_model import asked_model, model_fingerprint
from dapo_mega.types import GenerationRequest, SamplingParams
from tests.distributed.tiny import make_model


def config(model, **rollout):
    return RunConfig.model_validate(
        {
            "output_dir": "o",
            "num_steps": 1,
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": {"path": "d"}},
            "reward": {"overlong_punishment": False},
            "rollout": {"max_response_tokens": 8, **rollout},
        }
    )


def test_batches_are_answered_one_by_one_and_alike_each_time(tmp_path):
    folder = make_model(tmp_path / "model", tied=True)
    sampling = SamplingParams(max_new_tokens=8)
    requests = [GenerationRequest(i, np.array([1, 2, i], np.int32), i, sampling) for i in range(6)]
    with asked_model(config(folder)) as model:
        first = list(model.answers([requests[:4], requests[4:]]))
    with asked_model(config(folder)) as model:
        second = list(model.answers([requests[4:]]))
    assert [answer.request_id for answer in first] == list(range(6))
    for one, other in zip(first[4:], second, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_checkpoints_have_fingerprints_of_their_own(tmp_path):
    one, same, other = (
        make_model(tmp_path / name, tied=True, seed=seed) for name, seed in zip("abc", (0, 0, 1), strict=True)
    )
    build_byte_tokenizer().save_pretrained(same)
    assert model_fingerprint(one) == model_fingerprint(same) != model_fingerprint(other)


def test_engines_are_not_asked_without_urls_or_a_key(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "model", tied=True)
    monkeypatch.delenv("DAPO_MEGA_API_KEY", raising=False)
    for fleet, message in (
        ({"rendezvous": "127.0.0.1:21600"}, r"rollout\.fleet\.urls names no engine"),
        ({"urls": ["http://127.0.0.1:9"]}, "DAPO_MEGA_API_KEY is not set"),
    ):
        with pytest.raises(InputError, match=message), asked_model(config(folder, placement="fleet", fleet=fleet)):
            pass
