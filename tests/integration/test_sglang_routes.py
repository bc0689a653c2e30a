"""A real SGLang engine says which experts its tokens went through, and the policy has its log-probs with them."""

import shutil

import numpy as np
import pytest
import torch

from dapo_mega.batching import microbatch
from dapo_mega.batching.samples import samples_to_score
from dapo_mega.config import ModelConfig, OptimizerConfig, ParallelConfig
from dapo_mega.engines.sglang.api import RouteSizes, generate_payload, joined, parse_answer
from dapo_mega.engines.sglang.versions import VersionRange
from dapo_mega.megatron.megatron_policy import MegatronPolicy
from dapo_mega.megatron.processes import start_processes, stop_processes
from dapo_mega.types import GenerationRequest, Prompt, SamplingParams, Trajectory
from tests.distributed.tiny import make_moe_model

from .sglang_servers import VOCAB_SIZE, Launcher, call, tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_the_policy_has_the_log_probs_of_an_engine_whose_routes_it_replays(tmp_path):
    tiny_model(tmp_path / "dense")
    model = make_moe_model(tmp_path / "experts", num_layers=2, vocab_size=VOCAB_SIZE)
    for file in (tmp_path / "dense").glob("*token*"):
        shutil.copyfile(file, model / file.name)
    prompt = np.array([5, 6, 7, 8], np.int32)
    request = GenerationRequest(0, prompt, 0, SamplingParams(max_new_tokens=16), routes_from=0)
    payload = {**generate_payload(request, [], "r."), "input_ids": prompt.tolist()}
    server = Launcher(model, tmp_path / "server", 1, "--dtype", "fp32", "--", "--enable-return-routed-experts")
    try:
        server.wait_until_serving()
        call(server.urls[0], "/update_weight_version", {"new_version": "0", "abort_all_requests": False})
        status, body = call(server.urls[0], "/generate", payload)
        server.stop()
    finally:
        server.kill()
    assert status == 200
    processes = start_processes(ParallelConfig(), 0)
    policy = MegatronPolicy(
        ModelConfig(path=str(model), dtype="fp32"), ParallelConfig(), OptimizerConfig(), processes,
        temperature=1.0, updates_per_step=1, num_steps=1,
    )  # fmt: skip
    sizes = RouteSizes.of(policy.arch)
    response = joined(0, [parse_answer(body, request, [], VOCAB_SIZE, VersionRange("", 0, 0), sizes=sizes)])
    samples = samples_to_score([(Prompt(0, "", prompt, ""), Trajectory.of(response))], 0)
    (score,) = policy.score([microbatch.pack(samples, max_response_tokens=64)])
    stop_processes()
    assert response.routes.shape == (19, 2, 2)
    assert (score.logprobs - torch.from_numpy(response.logprobs)).abs().max() < 1e-4
