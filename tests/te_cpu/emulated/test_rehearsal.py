"""A rehearsal with Transformer Engine's layers does what processes with them do, and holds what was planned."""

import pytest

from dapo_mega.planning.memory import activation_parts
from dapo_mega.rehearsal import report
from tests.distributed.launching import run_distributed
from tests.distributed.test_rehearsal import LONG, compare, really
from tests.distributed.tiny import make_qwen3_model

LAYOUT = {"tensor": 2, "sequence": True, "context": 2}
CASE = {"parallel": LAYOUT, "dtype": "bf16", **LONG}


def test_transformer_engines_layers_are_rehearsed_as_they_run(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 2048, "num_attention_heads": 8}
    model = make_qwen3_model(tmp_path, **sizes, head_dim=32, max_position_embeddings=1024)
    models = {False: str(model)}
    real = run_distributed(really, 4, {"one": CASE}, models)
    rehearsal = compare(CASE, "one", models, real)
    assert "with Transformer Engine's layers" in next(report.report(rehearsal))
    played = rehearsal.played.values()
    # The context rank with no prompts scores as many tokens as the plan's; operations are the mean of both.
    held = max(rank.peaks["update"].num_bytes - sum(rank.always.values()) for rank in played)
    parts = activation_parts(rehearsal.workload, rehearsal.workload.placement, 0)
    assert held == pytest.approx(sum(parts), rel=0.03)
    for phase, flops in report.planned_flops(rehearsal, 0).items():
        assert sum(rank.flops[phase] for rank in played) / len(played) == pytest.approx(flops, rel=0.0001), phase
    for name, (sent, planned) in report.traffic(rehearsal).items():
        assert sent == pytest.approx(planned, rel=0.01), name
