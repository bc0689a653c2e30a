"""What is saved of an evaluation's settings."""

from pathlib import Path

from dapo_mega.config import RunConfig, load_config
from dapo_mega.evaluation.settings import GROUPS, evaluation_settings


def test_everything_that_decides_a_score_is_saved():
    overrides = [
        "data.evaluation.template=qwen_math",
        "data.evaluation.chat_template=true",
        "data.evaluation.template_arguments={enable_thinking: false}",
        "reward.extraction=boxed",
        "reward.numeric_tolerance=0.01",
        "rollout.max_response_tokens=48",
        "evaluation.temperature=0.6",
        "evaluation.top_p=0.95",
        "evaluation.top_k=20",
    ]
    settings = evaluation_settings(load_config(RunConfig, Path("configs/quickstart.yaml"), overrides))
    assert {name: settings[name] for names in GROUPS.values() for name in names} == {
        "template": "qwen_math",
        "chat_template": True,
        "template_arguments": {"enable_thinking": False},
        "grader": {"kind": "answer", "extraction": "boxed", "numeric_tolerance": 0.01},
        "max_response_tokens": 48,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
    }
