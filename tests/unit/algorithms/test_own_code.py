"""Code of the user's own is loaded, tried and named in one line when it cannot be used."""

import sys

import numpy as np
import pytest
import torch

from dapo_mega.algorithms.advantages import OwnAdvantage
from dapo_mega.algorithms.orders import OrderedPrompts, OwnOrder
from dapo_mega.algorithms.own import try_own_code
from dapo_mega.algorithms.policy_losses import LossInputs
from dapo_mega.config import AlgorithmConfig
from dapo_mega.config.files import validated
from dapo_mega.errors import InputError

CODE = """
import torch

def good(tokens, sharpness=1.0):
    loss = -torch.tanh(sharpness * (tokens.ratios() - 1)) / sharpness * tokens.advantages
    return loss, {"far": (tokens.log_ratios().abs() > 0.2).float()}

def mixing(tokens): return -tokens.ratios() * (tokens.advantages - tokens.advantages.mean())
def raising(tokens): return tokens.nothing
def nan(tokens): return tokens.logprobs.sqrt()
def endless(tokens): return (0.0 * tokens.logprobs).sqrt() + tokens.logprobs
def short(tokens): return (tokens.logprobs * tokens.advantages)[:-1]
def averaged(tokens): return (tokens.logprobs * tokens.advantages).mean()
def detached(tokens): return tokens.logprobs.detach()
def of_numbers(tokens): return 3.0
def misnamed(tokens): return tokens.logprobs, {"a b": tokens.logprobs}
def unnamed(tokens): return tokens.logprobs, tokens.logprobs
def of_responses(tokens): return tokens.logprobs * tokens.response_log_ratios()
def of_entropy(tokens): return -tokens.entropy - tokens.logprobs * (tokens.engine_logprobs - tokens.reference_logprobs)
class Scaled:
    def __init__(self, by): self.by = by
    def __call__(self, tokens): return -self.by * tokens.logprobs
class Uncallable: pass
constant = 3

def centred(rewards, group, scale=1.0): return scale * (rewards - rewards.mean())
def single(rewards, group): return rewards.mean()
def infinite(rewards, group): return rewards / 0.0
def text(rewards, group): return "none"
def changing(rewards, group):
    rewards -= rewards.mean()
    return rewards

def backwards(prompts, epoch, seed): return range(len(prompts))[::-1]
def too_few(prompts, epoch, seed): return [0]
def twice(prompts, epoch, seed): return [0] * len(prompts)
def fractions(prompts, epoch, seed): return [float(i) for i in range(len(prompts))]

def mixed(group, fewest=1): return fewest <= sum(s.correct for s in group.trajectories) < len(group.trajectories)
def counting(group): return 1
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "my_code.py"
    file.write_text(CODE)
    return file


def algorithm(key, path, **rest):
    return validated(AlgorithmConfig, {key: {"kind": "function", "path": str(path), **rest}})


@pytest.mark.parametrize(
    ("key", "name", "rest"),
    [
        ("policy_loss", "good", {"settings": {"sharpness": 3}}),
        ("policy_loss", "mixing", {"depends_on_split": True}),
        ("policy_loss", "of_responses", {"whole_responses": True}),
        ("policy_loss", "of_entropy", {"inputs": ["entropy", "engine", "reference"]}),
        ("policy_loss", "Scaled", {"settings": {"by": 3.0}}),
        ("advantage", "centred", {"settings": {"scale": 2}}),
        ("advantage", "changing", {}),
        ("dynamic_sampling_on", "mixed", {"settings": {"fewest": 2}}),
    ],
)
def test_what_can_be_used_is_used(code, key, name, rest):
    called = set()

    def note(frame, event, _):
        if frame.f_code.co_filename == str(code):
            called.add(frame.f_code.co_qualname.partition(".")[0])

    sys.setprofile(note)
    try:
        try_own_code([getattr(algorithm(key, f"{code}:{name}", **rest), key)], 4)
    finally:
        sys.setprofile(None)
    assert name in called


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("policy_loss", "mixing", "depends on which other tokens are in its micro-batch"),
        ("policy_loss", "raising", r"it raises AttributeError: .* \(line 9\)"),
        ("policy_loss", "nan", "its loss or its gradient is not finite"),
        ("policy_loss", "endless", "its loss or its gradient is not finite"),
        ("policy_loss", "short", r"the loss is \[11\]"),
        ("policy_loss", "averaged", r"the loss is \[\]"),
        ("policy_loss", "detached", "has no gradient"),
        ("policy_loss", "of_numbers", "the loss is float, not a tensor"),
        ("policy_loss", "misnamed", "'a b' cannot be a metric's name"),
        ("policy_loss", "unnamed", "not values .* by name"),
        ("policy_loss", "of_responses", r"must be is_sequence_level"),
        ("policy_loss", "of_entropy", r"it raises TypeError: bad operand type for unary -: 'NoneType' \(line \d+\)"),
        ("policy_loss", "Scaled", r"it takes \(by\) and is called with \(\)"),
        ("policy_loss", "Uncallable", "what the class makes cannot be called; give it a method __call__"),
        ("policy_loss", "goood", "there is no 'goood'; did you mean 'good'"),
        ("policy_loss", "constant", "it is int, not a function"),
        ("policy_loss", "centred", "is called with"),
        ("advantage", "single", "not 4 finite numbers"),
        ("advantage", "infinite", "not 4 finite numbers"),
        ("advantage", "text", "not 4 finite numbers"),
        ("advantage", "mixed", "is called with|it raises"),
        ("dynamic_sampling_on", "counting", "it returned 1, not True or False"),
        ("dynamic_sampling_on", "centred", "is called with"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_cannot_be_used_is_one_line_with_key_path_and_reason(code, key, name, said):
    with pytest.raises(InputError, match=said) as raised:
        try_own_code([getattr(algorithm(key, f"{code}:{name}"), key)], 4)
    assert str(raised.value).startswith(f"algorithm.{key}: {code}:{name}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy_loss": "clipp"}, "policy_loss.kind='clipp' must be one of clip, gspo, "),
        ({"policy_loss": 3}, "policy_loss=3 must be a kind, or a mapping with one: clip, gspo, "),
        ({"policy_loss": {"kind": "function"}}, "policy_loss.path is missing"),
        (
            {"policy_loss": {"kind": "clip", "path": "a.py:b"}},
            "policy_loss.path is a key of kind function, and the kind is clip, which has ",
        ),
        ({"policy_loss": {"path": "a.py:b", "setings": {}}}, "unknown key 'policy_loss.setings'; did you mean"),
        ({"advantage": {"path": "a.py"}}, "function 'a.py' must be FILE.py:NAME or package.module:NAME"),
    ],
)
def test_a_section_that_is_none_is_named(given, said):
    with pytest.raises(InputError) as raised:
        validated(AlgorithmConfig, given)
    assert str(raised.value).startswith(said)


def test_a_loss_has_its_values_as_metrics_over_the_tokens_in_the_loss(code):
    own = algorithm("policy_loss", f"{code}:good").policy_loss
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old, in_loss = torch.tensor([-1.0, -1.5, -2.0]), torch.tensor([True, True, False])
    losses = own.token_losses(LossInputs(logprobs, old, torch.ones(3), in_loss))
    assert own.sum_names == ("policy/own_far",)
    sums = {name: float(value) for name, value in losses.sums.items()}
    assert own.metrics({**sums, "loss_tokens": 2.0}) == {"policy/own_far": 0.5}
    torch.testing.assert_close(losses.loss, -torch.tanh((logprobs - old).exp() - 1))


def test_an_order_has_every_prompt_once(code):
    assert OwnOrder(path=f"{code}:backwards").of_epoch(OrderedPrompts([None] * 3, 0), 0).tolist() == [2, 1, 0]
    for name in ("too_few", "twice", "fractions"):
        with pytest.raises(InputError, match=f"data.sampling.order: .*{name}: it returned .*, not every index below 3"):
            OwnOrder(path=f"{code}:{name}").of_epoch(OrderedPrompts([None] * 3, 0), 0)


def test_the_rewards_of_a_group_stay_as_they_are(code):
    rewards = np.array([1.0, 0.0])
    assert OwnAdvantage(path=f"{code}:changing").of_group(rewards).tolist() == [0.5, -0.5]
    assert rewards.tolist() == [1.0, 0.0]
