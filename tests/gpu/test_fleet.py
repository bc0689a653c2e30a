"""SGLang engines on GPUs: weights through CUDA IPC on the trainer's GPU, and through NCCL on another one."""

import pytest
import torch

from dapo_mega.training import loop
from tests.distributed.launching import free_port
from tests.integration.conftest import SharedEngines
from tests.integration.fleet_runs import fleet_values, train_to_the_end, training_run_of
from tests.integration.sglang_servers import API_KEY, serving_engines, tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("placement", "transport", "gpu"), [("colocated", "tensor", 0), ("fleet", "disk", 0), ("fleet", "distributed", 1)]
)
def test_an_engine_on_a_gpu_agrees_with_the_trainer_after_every_update(
    tmp_path, monkeypatch, placement, transport, gpu
):
    if gpu >= torch.cuda.device_count():
        pytest.skip(f"the engine needs GPU {gpu}, and there are {torch.cuda.device_count()}")
    monkeypatch.setenv("DAPO_MEGA_API_KEY", API_KEY)
    model = tiny_model(tmp_path / "model")
    sglang_options = ["--attention-backend", "triton", "--mem-fraction-static", "0.3", "--context-length", "512"]
    options = ["--dtype", "bf16", *(["--colocated"] if placement == "colocated" else []), "--", *sglang_options]
    with serving_engines(model, tmp_path / "served", 1, *options, gpus=str(gpu)) as launcher:
        values = fleet_values(
            tmp_path,
            SharedEngines(launcher, model, f"127.0.0.1:{free_port()}"),
            model={"dtype": "bf16"},
            rollout={"placement": placement, "fleet": {"min_engines": 1}, "offload_trainer": placement == "colocated"},
            weight_sync={"transport": transport},
        )
        with training_run_of(values) as pipeline:
            records = train_to_the_end(pipeline)
            if placement == "colocated":
                lent = torch.cuda.memory_reserved()
                loop.take_turn(pipeline)
                assert torch.cuda.memory_reserved() > lent + pipeline.trainer._lent.num_bytes // 2
    assert max(record.get("rollout/logprob_abs_diff_mean", 0) for record in records) < 0.05
