"""An engine that serves the policy's model is never taken for one that serves another."""

import json

import pytest
from transformers import AutoConfig

from dapo_mega.engines.sglang.engine_model import described_model, model_difference
from dapo_mega.engines.sglang.weight_protocol import MODEL_FIELD
from dapo_mega.models import load_architecture
from tests.distributed import tiny


@pytest.mark.parametrize("family", tiny.FAMILY_MODELS)
def test_a_model_as_an_engine_describes_it_is_that_of_its_folder(tmp_path, monkeypatch, family):
    monkeypatch.setattr(tiny, "save_random", lambda config, folder, *_, **__: config.save_pretrained(folder))
    tiny.FAMILY_MODELS[family](tmp_path)
    arch = load_architecture(tmp_path)[1]
    # What SGLang has: read by transformers, quantized perhaps, and with a context length of its own.
    described = AutoConfig.from_pretrained(tmp_path).to_dict() | {"quantization_config": {"quant_method": "fp8"}}
    told = described_model([{}, {MODEL_FIELD: json.dumps(described, default=str)}])
    assert model_difference(told, arch) == ""
    assert "num_layers is 9 instead of" in model_difference(
        {**told, "num_hidden_layers": 9, "no_rope_layers": None, "layer_types": None}, arch
    )
