"""Scripted servers, and a fleet's client that uses them."""

import pytest

from dapo_mega.config import RunConfig
from tests.unit.engines.sglang.client_of_scripted import Driver
from tests.unit.engines.sglang.scripted_server import DEADLINE_S, KEY, VOCAB_SIZE, Servers


@pytest.fixture
def servers():
    made = []

    def make(count, tokens_per_s=0.0):
        made.append(Servers(count, tokens_per_s))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.fixture
def drive():
    drivers = []

    def start(
        urls,
        weight_sync=None,
        rollout=None,
        run="",
        arch=None,
        check_stop=lambda: None,
        evaluation=None,
        lora=None,
        **fleet,
    ):
        config = RunConfig.model_validate(
            {
                "output_dir": "o",
                "num_steps": 1,
                "model": {"path": "m", "dtype": "fp32"},
                "data": {"train": {"path": "d"}, "max_prompt_tokens": 16},
                "rollout": {
                    "placement": "fleet",
                    "max_response_tokens": 64,
                    "fleet": {
                        "urls": urls,
                        "heartbeat_s": 0.1,
                        "hung_after_s": 60.0,
                        "wait_limit_s": DEADLINE_S,
                        **fleet,
                    },
                    **(rollout or {}),
                },
                "reward": {"overlong_punishment": False},
                "batch": {"tokens_per_microbatch": 128},
                "weight_sync": weight_sync or {},
                "evaluation": evaluation or {},
                "lora": lora,
            }
        )
        drivers.append(Driver(config, VOCAB_SIZE, KEY, run, arch, check_stop))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.close()
