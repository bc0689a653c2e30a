"""Code of one's own in all five choices, in tensor, pipeline and data parallelism."""

import pytest
import yaml

from dapo_mega.metrics import read_metrics

from .runs import decisive, finish, kill_when, prepare, start, steps_done

pytestmark = pytest.mark.integration

CODE = """
def loss(tokens, weight):
    return -tokens.ratios() * tokens.advantages, {"weighted": weight * tokens.advantages}

def advantage(rewards, group, scale):
    return scale * (rewards - rewards.mean())

def kept(group, least):
    ended = [scored for scored in group.trajectories if scored.stop == "done"]
    scores = [sum(turn.parts["reward"] for turn in scored.turns) for scored in ended]
    return bool(scores) and max(scores) - min(scores) >= least

class Backwards:
    def __init__(self, start):
        self.start = start

    def __call__(self, prompts, epoch, seed):
        return [(self.start - i) % len(prompts) for i in range(len(prompts))]

class Parity:
    def __init__(self, digits):
        self.digits = digits

    def reset(self, task, seed):
        self.wanted = seed % 2

    def step(self, action):
        is_right = sum(action["token_ids"]) % 2 == self.wanted
        return {"reward": float(is_right), "correct": is_right, "text": self.digits, "done": action["turn"] == 1}
"""


def values_of(folder):
    file = prepare(folder)
    code = folder / "code.py"
    code.write_text(CODE)

    def own(name, **settings):
        return {"kind": "function", "path": f"{code}:{name}", "settings": settings}

    values = yaml.safe_load(file.read_text())
    values["algorithm"] = {
        "policy_loss": own("loss", weight=2.0),
        "advantage": own("advantage", scale=0.5),
        "dynamic_sampling_on": own("kept", least=0.5),
    }
    values["data"]["sampling"] = {"order": own("Backwards", start=5)}
    values["environment"] = {**own("Parity", digits="12"), "max_turn_tokens": 3}
    values["reward"] = {"components": [{"kind": "environment"}]}
    file.write_text(yaml.safe_dump(values))
    return file


def records_of(folder):
    return [decisive(record) for record in read_metrics(folder / "metrics.jsonl")]


def test_code_of_ones_own_trains_in_every_kind_of_parallelism_and_resumes_exactly(tmp_path):
    file = values_of(tmp_path)
    layout = ["parallel={tensor: 2, pipeline: 2}", "num_steps=2", "checkpoint={every: 1, save_hf_at_end: false}"]
    finish(start(file, 8, tmp_path / "whole", *layout), tmp_path / "whole")
    whole = records_of(tmp_path / "whole")
    assert [record["step"] for record in whole] == [0, 1, 2]
    assert all("policy/own_weighted" in record and record["rollout/turns_mean"] == 2 for record in whole[1:])
    workers = start(file, 8, tmp_path / "parts", *layout)
    kill_when(workers, lambda: steps_done(tmp_path / "parts") >= 1)
    finish(start(file, 8, tmp_path / "parts", *layout), tmp_path / "parts")
    assert records_of(tmp_path / "parts") == whole
    finish(start(file, 1, tmp_path / "one", "num_steps=1", *layout[2:]), tmp_path / "one")
    one = records_of(tmp_path / "one")
    assert {name: value for name, value in one[1].items() if name in SAME} == pytest.approx(
        {name: value for name, value in whole[1].items() if name in SAME}, rel=1e-4
    )


SAME = ("policy/loss", "policy/grad_norm", "policy/own_weighted", "rollout/reward_mean", "groups/kept_share")
