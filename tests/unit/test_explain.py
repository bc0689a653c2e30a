"""`dapo-mega explain` finds keys, metrics and methods by their names, and near ones for a wrong name."""

import sys

import pytest

from dapo_mega.commands import explain
from dapo_mega.config import PRESETS, RunConfig
from dapo_mega.errors import InputError
from dapo_mega.metrics.catalogue import CATALOGUE


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "algorithm.policy_loss.high",
            ["key algorithm.policy_loss.high of clip, gspo", "Default: 0.28.", "may not change"],
        ),
        ("algorithm.clip_high", ["key algorithm.policy_loss.high of clip, gspo, clip_cov\n"]),
        ("path", ["key model.path\n", "It must be given.", "key data.mixture.NAME.path\n"]),
        ("algorithm.policy_loss.settings", ["Keyword arguments of the function", "Default: {}."]),
        ("reward.components.judge.urls", ["key reward.components.urls of judge, remote\n"]),
        ("policy/entropy", ["metric policy/entropy\n", "Unit: "]),
        ("reward/part_sevens", ["metric reward/part_sevens\n"]),
        ("gspo", ["method algorithm.preset=gspo\n", "policy_loss.high=0.0004", "kind gspo of algorithm.policy_loss\n"]),
        ("rollout.fleet", ["section rollout.fleet\n", "Keys: "]),
        ("batch_samples", ["key batch_samples\n"]),
    ],
)
def test_what_has_the_name_is_explained(name, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dapo-mega explain", name])
    explain.main()
    printed = capsys.readouterr().out
    assert [text for text in said if text not in printed] == []
    assert max(map(len, printed.splitlines())) <= 100


def test_everything_has_an_explanation():
    names = [*PRESETS, *(name for metric in CATALOGUE for name in metric.names() if "<" not in name)]
    names += [f"{key}.{name}" for key in ("rollout", "optimizer") for name in _fields(key)]
    assert all(explain.explained(name) for name in names)


def _fields(section):
    return type(RunConfig.model_fields.get(section).default or 0).model_fields


def test_a_wrong_name_is_answered_with_near_ones():
    with pytest.raises(InputError, match=r"is called 'clip_hihg'; near it are policy_loss\.high"):
        explain.explained("clip_hihg")
    with pytest.raises(InputError, match="see configs/"):
        explain.explained("qqqqqq")
