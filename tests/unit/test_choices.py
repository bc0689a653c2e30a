"""Choices by kind: one section each, the keys that earlier versions had beside them, and layers of both."""

import pytest
import yaml

from dapo_mega.algorithms.policy_losses.clip import ClipLoss, GspoLoss
from dapo_mega.algorithms.policy_losses.covariance import KlCovLoss
from dapo_mega.algorithms.policy_losses.mirror_descent import MirrorDescentLoss
from dapo_mega.algorithms.policy_losses.soft_gate import SapoLoss
from dapo_mega.config import AlgorithmConfig, RunConfig, load_config
from dapo_mega.config.choices import FLAT, choices_of
from dapo_mega.config.data import PromptSamplingConfig
from dapo_mega.errors import InputError

BASE = {"output_dir": "x", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}
FLAT_DEFAULTS = {
    "policy_loss": "clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0, "soft_gate": [1.0, 1.05],
    "mirror_temperature": 0.1, "covariance_share": 2e-4, "covariance_bounds": [1.0, 5.0], "covariance_kl": 1.0,
    "advantage": "group_norm", "gae_discount": 1.0, "gae_decay": 1.0, "dynamic_sampling_on": "correctness",
    "score_threshold": None,
}  # fmt: skip
"""What earlier versions wrote into every record beside the section's other keys."""


def load(folder, algorithm, *overrides, is_record=False, **rest):
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**BASE, **rest, "algorithm": algorithm}))
    if is_record:
        (folder / "versions.json").touch()
    return load_config(RunConfig, file, overrides).algorithm


@pytest.mark.parametrize(
    ("flat", "nested"),
    [
        ({}, {"policy_loss": {"kind": "clip", "low": 0.2, "high": 0.28, "dual_clip": 10.0}}),
        ({"clip_high": 0.3}, {"policy_loss": {"high": 0.3}}),
        ({"preset": "grpo", "clip_low": 0.1}, {"preset": "grpo", "policy_loss": {"kind": "clip", "low": 0.1}}),
        ({"policy_loss": "gspo", "clip_low": 0.1}, {"policy_loss": {"kind": "gspo", "low": 0.1}}),
        ({"policy_loss": "sapo", "soft_gate": [2, 3]}, {"policy_loss": {"kind": "sapo", "gate": [2, 3]}}),
        ({"preset": "kimi", "mirror_temperature": 0.5}, {"preset": "kimi", "policy_loss": {"temperature": 0.5}}),
        (
            {"policy_loss": "clip_cov", "covariance_share": 0.1, "covariance_bounds": [2, 3], "dual_clip": 3},
            {"policy_loss": {"kind": "clip_cov", "share": 0.1, "bounds": [2, 3], "dual_clip": 3}},
        ),
        ({"preset": "kl_cov", "covariance_kl": 2}, {"preset": "kl_cov", "policy_loss": {"kl": 2}}),
        ({"preset": "ppo", "gae_decay": 0.9}, {"preset": "ppo", "advantage": {"decay": 0.9}}),
        (
            {"dynamic_sampling_on": "score_threshold", "score_threshold": 0.5},
            {"dynamic_sampling_on": {"kind": "score_threshold", "threshold": 0.5}},
        ),
    ],
)
def test_keys_of_earlier_versions_mean_the_same(tmp_path, flat, nested):
    assert load(tmp_path, flat) == load(tmp_path, nested)
    overrides = [f"algorithm.{key}={value}" for key, value in flat.items()]
    assert load(tmp_path, {}, *overrides) == load(tmp_path, nested)


def test_orders_of_earlier_versions_mean_the_same():
    flat = {"order": "curriculum", "stages": [1, 2], "easiest": "lowest", "curriculum_epochs": 3, "floor": 0.1}
    nested = {"order": {"kind": "curriculum", "stages": [1, 2], "easiest": "lowest", "epochs": 3}}
    assert PromptSamplingConfig(**flat) == PromptSamplingConfig(**nested)
    assert PromptSamplingConfig(order="prioritised", floor=0.3).order.floor == 0.3


@pytest.mark.parametrize(
    ("record", "loss"),
    [
        ({}, ClipLoss()),
        ({"policy_loss": "sapo"}, SapoLoss()),
        ({"policy_loss": "sapo", "clip_high": 0.4, "covariance_share": 0.5}, SapoLoss()),
        (
            {"preset": "reinforce", "policy_loss": "mirror_descent", "clip_high": 0.2, "dual_clip": None},
            MirrorDescentLoss(),
        ),
        ({"preset": "kl_cov", "policy_loss": "kl_cov", "covariance_share": 0.002}, KlCovLoss(share=0.002)),
        ({"policy_loss": "gspo", "clip_low": 3e-4, "soft_gate": [2, 3]}, GspoLoss(low=3e-4)),
    ],
)
def test_a_record_of_an_earlier_version_has_keys_of_all_kinds_and_loads(tmp_path, record, loss):
    whole = {**FLAT_DEFAULTS, **record}
    assert load(tmp_path, whole).policy_loss == loss  # Also away from the run's folder.
    few = {key: value for key, value in whole.items() if key != "covariance_kl"}  # Of a version before the key.
    assert load(tmp_path, few, is_record=True).policy_loss == loss


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"policy_loss": {"kind": "clip", "gate": [1, 1]}}, "algorithm.policy_loss.gate is a key of kind sapo, and"),
        (
            {"policy_loss": {"kind": "reinforce", "low": 0.1}},
            "policy_loss.low is a key of kind clip or gspo or clip_cov or",
        ),
        (
            {"policy_loss": "sapo", "clip_high": 0.4},
            "algorithm.clip_high is a key of algorithm.policy_loss clip or gspo",
        ),
        (
            {"preset": "gspo", "soft_gate": [2, 2]},
            "algorithm.policy_loss.gate is a key of kind sapo, and the kind is gspo",
        ),
        (
            {"advantage": {"kind": "reward", "decay": 0.5}},
            "algorithm.advantage.decay is a key of kind gae, and the kind is",
        ),
        ({"policy_loss": {"kind": "clip", "hihg": 1}}, "unknown key 'algorithm.policy_loss.hihg'; did you mean 'alg"),
        (
            {"policy_loss": {"kind": "clib"}},
            "algorithm.policy_loss.kind='clib' must be one of clip, .*did you mean clip?",
        ),
        ({"clip_high": 0.3, "policy_loss": {"high": 0.3}}, "clip_high and policy_loss.high are the same key; give one"),
    ],
)
def test_a_key_of_another_kind_is_an_error_with_its_name(tmp_path, algorithm, said):
    with pytest.raises(InputError, match=said.replace("?", r"\?")) as raised:
        load(tmp_path, algorithm)
    assert "\n" not in str(raised.value)


def test_a_layer_above_chooses_another_kind_and_leaves_the_keys_of_the_old_one(tmp_path):
    file = {"policy_loss": {"kind": "clip", "low": 0.1, "high": 0.4}}
    assert load(tmp_path, file, "algorithm.policy_loss=sapo").policy_loss == SapoLoss()
    assert load(tmp_path, file, "algorithm.policy_loss=gspo").policy_loss == GspoLoss(low=0.1, high=0.4)
    assert load(tmp_path, {"clip_high": 0.4}, "algorithm.preset=sapo").policy_loss == SapoLoss()
    assert load(tmp_path, {"clip_high": 0.4}, "algorithm.policy_loss.low=0.1").policy_loss == ClipLoss(
        low=0.1, high=0.4
    )
    assert load(tmp_path, file, "algorithm.clip_high=0.5").policy_loss == ClipLoss(low=0.1, high=0.5)
    assert load(tmp_path, {}, "algorithm.policy_loss.path=math:tanh").policy_loss.path == "math:tanh"


def test_every_key_of_earlier_versions_is_in_a_kind():
    for section in (AlgorithmConfig, PromptSamplingConfig):
        for name, kinds in choices_of(section).items():
            having = {key for kind in kinds.values() for key in kind.model_fields}
            assert set(FLAT[name].values()) <= having
