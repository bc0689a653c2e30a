"""Every key that decides a step is changed at a resume, and the step that follows is another one.

A run is saved after its first step; each case loads the checkpoint with the settings that it was saved with and with
one of them changed, and compares what the rest of the run begins with, an evaluation and the next step.
"""

import contextlib
import copy
import json
import logging
import shutil
from dataclasses import asdict
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from dapo_mega.batching.samples import samples_of_groups
from dapo_mega.checkpoints import store
from dapo_mega.config import RunConfig, load_config
from dapo_mega.engines.embedded import engine
from dapo_mega.errors import FleetError, InputError, StarvedError
from dapo_mega.megatron.core.decoder import unwrapped
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.training import loop
from dapo_mega.training.build import build_run
from dapo_mega.training.recording import open_recorder
from dapo_mega.training.run import close, run_training
from tests.distributed.tables import every_third
from tests.distributed.tiny import make_deepseek_v3_model, make_moe_model

from .runs import prepare

pytestmark = pytest.mark.integration

# Settings of the saved run -> key -> its value after the resume, and the first of what that must change.
CHANGES = {
    (): {
        "model.dtype": ("bf16", "trainer.bf16"),
        "compute.recompute": ("full", "trainer.recompute_granularity"),
        "compute.overlap_grad_reduce": (True, "gradients.overlap_grad_reduce"),
        "compute.deterministic": (True, "deterministic"),
        "parallel.world_size": (2, "error"),
        "compute.fused_output_layer": (False, "is_fused"),
        "threads_per_process": (2, "threads"),
        "weight_sync.bucket_mib": (0.01, "buckets"),
        "rollout.temperature": (0.9, "rollout/tokens"),
        "rollout.top_p": (0.9, "rollout/tokens"),
        "rollout.top_k": (5, "rollout/tokens"),
        "rollout.stop": (["1", "2"], "rollout/tokens"),
        "rollout.max_response_tokens": (9, "rollout/tokens"),
        "rollout.dtype": ("bf16", "rollout/logprob_abs_diff_mean"),
        "rollout.mismatch_warning": (1e-9, "warnings"),
        "rollout.mismatch_stop": (1e-9, "error"),
        "rollout.max_batch_rows": (3, "most_rows"),
        "reward.correct": (0.9, "rollout/reward_mean"),
        "reward.incorrect": (-0.9, "evaluation/reward_mean"),
        "reward.overlong_cache_tokens": (3, "rollout/reward_mean"),
        "reward.overlong_punishment": (False, "rollout/reward_mean"),
        "reward.overlong_filtering": (True, "policy/loss"),
        "reward.length_weight": (0.2, "rollout/reward_mean"),
        "reward.source": ("verifier", "error"),
        "algorithm.preset": ("grpo", "policy/loss"),
        "algorithm.advantage.kind": ("group_mean", "policy/loss"),
        "algorithm.normalize_advantages": (True, "policy/loss"),
        "algorithm.aggregation": ("sequence_mean_token_mean", "policy/loss"),
        "algorithm.policy_loss.low": (0.001, "policy/clip_low_share"),
        "algorithm.policy_loss.high": (0.001, "policy/clip_high_share"),
        "algorithm.policy_loss.dual_clip": (1.001, "policy/dual_clip_share"),
        "algorithm.policy_loss.kind": ("reinforce", "policy/grad_norm"),
        "algorithm.max_staleness": (0, "asked"),
        "algorithm.dynamic_sampling": (False, "groups/kept_share"),
        "algorithm.entropy_coefficient": (0.001, "policy/loss"),
        "algorithm.importance_cap": (1e-3, "mismatch/truncated_share"),
        "algorithm.token_mask": ([0.9999999, 1.0000001], "policy/loss"),
        "algorithm.sequence_mask": ([0.9999999, 1.0000001], "mismatch/masked_response_share"),
        "algorithm.kl.coefficient": (0.02, "policy/kl_to_reference"),
        "batch.groups_per_step": (3, "asked"),
        "batch.group_size": (6, "asked"),
        "batch.generation_groups": (9, "buffer/size"),
        "batch.mini_batch_groups": (2, "updates"),
        "batch.epochs": (2, "updates"),
        "batch.tokens_per_microbatch": (64, "batch/packing_efficiency"),
        "evaluation.samples_per_prompt": (3, "evaluation/k"),
        "evaluation.temperature": (0.5, "evaluation/response_length_mean"),
        "evaluation.top_p": (0.5, "evaluation/response_length_mean"),
        "evaluation.top_k": (3, "evaluation/response_length_mean"),
        "data.sampling.order.kind": ("prioritised", "asked"),
        "data.sampling.retire_after": (1, "sampling/left_train"),
        "samples.enabled": (False, "records"),
    },
    ("batch.groups_per_step=12", "batch.generation_groups=6"): {"algorithm.max_generation_rounds": (2, "error")},
    ("compute.recompute=full",): {"compute.recompute_layers": (2, "trainer.recompute_num_layers")},
    ("compute.recompute=selective",): {"compute.recompute_modules": (["mlp"], "trainer.recompute_modules")},
    ("compute.overlap_grad_reduce=true",): {
        "compute.overlap_param_gather": (True, "gradients.overlap_param_gather"),
    },
    ("algorithm.kl.coefficient=0.02",): {
        "algorithm.kl.estimator": ("k2", "policy/kl_to_reference"),
        "algorithm.kl.placement": ("reward", "policy/grad_norm"),
    },
    ("algorithm.entropy_target=9", "algorithm.entropy_coefficient=0.001"): {
        "algorithm.entropy_target": (0.01, "next_entropy_bonus"),
        "algorithm.entropy_step": (0.003, "next_entropy_bonus"),
        "algorithm.entropy_max": (0.0011, "next_entropy_bonus"),
    },
    ("rollout.dtype=bf16", "algorithm.importance_cap=2"): {"algorithm.importance_level": ("sequence", "policy/loss")},
    ("rollout.dtype=bf16", "algorithm.importance_cap=null"): {"algorithm.old_policy": ("engine", "policy/loss")},
    ("algorithm.policy_loss=sapo",): {"algorithm.policy_loss.gate": ([3.0, 4.0], "policy/loss")},
    ("algorithm.policy_loss=mirror_descent",): {"algorithm.policy_loss.temperature": (0.5, "policy/loss")},
    ("algorithm.policy_loss=clip_cov",): {
        "algorithm.policy_loss.bounds": ([-9.0, 9.0], "policy/grad_norm"),
    },
    ("algorithm.policy_loss=kl_cov",): {
        "algorithm.policy_loss.kl": (9.0, "policy/loss"),
        "algorithm.policy_loss.share": (0.5, "policy/loss"),
    },
    ("reward.length_weight=0.2",): {"reward.length_phase_in": ([0, 9], "rollout/reward_mean")},
    ("reward.source=verifier", "algorithm.dynamic_sampling=false"): {
        "reward.extraction": ("none", "reward/num_no_answer"),
    },
    ("data.sampling.order=curriculum", "algorithm.max_staleness=0"): {
        "data.sampling.order.easiest": ("lowest", "asked"),
        "data.sampling.order.stages": ([5.5], "asked"),
        "data.sampling.order.epochs": (2, "asked"),
    },
    ("data.sampling.order=prioritised",): {"data.sampling.order.floor": (1.0, "asked")},
    ("algorithm.advantage=gae", "critic.learning_rate=0.02", "critic.warmup_steps=0"): {
        "algorithm.advantage.discount": (0.8, "policy/loss"),
        "algorithm.advantage.decay": (0.5, "policy/loss"),
        "critic.learning_rate": (0.01, "critic/learning_rate"),
        "critic.warmup_steps": (5, "critic/learning_rate"),
        "critic.pretraining_steps": (2, "policy/grad_norm"),
        "critic.value_clip": (1e-4, "critic/value_loss"),
        "critic.path": ("{folder}/copy of the model", "critic_path"),
    },
    ("model.path={folder}/experts",): {
        "compute.moe.aux_loss_coefficient": (0.1, "policy/grad_norm"),
        "compute.moe.z_loss_coefficient": (0.1, "policy/grad_norm"),
        "model.path": ("{folder}/copy of experts", "path"),
    },
    ("model.path={folder}/biased", "algorithm.dynamic_sampling=false"): {
        "compute.moe.router_bias_update_rate": (0.1, "weights"),
    },
    ("reward.function={folder}/reward.py:score", "algorithm.dynamic_sampling_on=unequal_scores"): {
        "reward.function": ("{folder}/reward.py:other", "rollout/reward_mean"),
        "reward.call_responses": (3, "rollout/reward_mean"),
    },
}  # fmt: skip
JUDGES = "[{kind: answer}, {kind: function, name: own, path: '{folder}/reward.py:right'}]"
OWN_REWARD = ("algorithm.dynamic_sampling=false", "reward.call_responses=4", "reward.function={folder}/reward.py:")
CHANGES |= {
    ("algorithm.dynamic_sampling=false", f"reward.components={JUDGES}", "reward.correct_from=answer"): {
        "reward.correct_from": ("own", "rollout/accuracy_mean"),
        "reward.components": (JUDGES.replace(":right", ":score"), "rollout/reward_mean"),
    },
    (*OWN_REWARD[:2], f"{OWN_REWARD[2]}numbered"): {"reward.num_workers": (1, "processes")},
    (*OWN_REWARD[:2], f"{OWN_REWARD[2]}slow", "reward.retries=0"): {"reward.call_time_limit_s": (0.05, "error")},
    (*OWN_REWARD[:2], f"{OWN_REWARD[2]}large", "reward.retries=0"): {"reward.memory_limit_mib": (64, "error")},
    (*OWN_REWARD[:2], f"{OWN_REWARD[2]}single"): {"reward.retries": (0, "error")},
    (*OWN_REWARD[:2], f"{OWN_REWARD[2]}some", "reward.retries=0", "reward.max_failed_share=1"): {
        "reward.max_failed_share": (0.1, "error"),
    },
}
OWN = "{kind: function, path: '{folder}/choices.py:NAME', settings: {scale: 2}}"
CHANGES |= {
    (f"algorithm.policy_loss={OWN.replace('NAME', 'loss')}",): {
        "algorithm.policy_loss.path": ("{folder}/choices.py:other_loss", "policy/loss"),
        "algorithm.policy_loss.settings": ({"scale": 3}, "policy/loss"),
        "algorithm.policy_loss.whole_responses": (True, "policy/loss"),
        "algorithm.policy_loss.inputs": (["entropy"], "policy/loss"),
    },
    (f"algorithm.advantage={OWN.replace('NAME', 'advantage')}",): {
        "algorithm.advantage.path": ("{folder}/choices.py:other_advantage", "policy/loss"),
        "algorithm.advantage.settings": ({"scale": 3}, "policy/loss"),
    },
    (f"algorithm.dynamic_sampling_on={OWN.replace('NAME', 'kept')}",): {
        "algorithm.dynamic_sampling_on.path": ("{folder}/choices.py:other_kept", "rollout/reward_mean"),
        "algorithm.dynamic_sampling_on.settings": ({"scale": 0}, "rollout/reward_mean"),
    },
}
CHANGES[(f"data.sampling.order={OWN.replace('NAME', 'order')}",)] = {
    "data.sampling.order.path": ("{folder}/choices.py:other_order", "asked"),
    "data.sampling.order.settings": ({"scale": 3}, "asked"),
}
# A digit is sampled, and two are observed, in each turn.
CHANGES[(f"environment={OWN.replace('NAME', 'Game')[:-1]}, max_turns: 3, max_turn_tokens: 1}}",)] = {
    "environment.path": ("{folder}/choices.py:OtherGame", "policy/loss"),
    "environment.settings": ({"scale": 3}, "policy/loss"),
    "environment.max_turns": (2, "rollout/turns_mean"),
    "environment.max_turn_tokens": (2, "rollout/turns_mean"),
    "environment.max_observation_tokens": (1, "rollout/turns_mean"),
    "environment.kind": ("single_turn", "rollout/tokens"),
    "environment.trajectory_limit_s": (1e-9, "rollout/turns_mean"),
    "environment.dialogue": ("renderers", "error"),
}
CHOICES = """
class Game:
    def __init__(self, scale):
        self.scale = scale

    def reset(self, task, seed):
        pass

    def step(self, action):
        return {"text": str(self.scale) * 2, "done": len(action["token_ids"]) > 1}

class OtherGame(Game):
    def step(self, action):
        return {"text": "7"}

def order(prompts, epoch, seed, scale):
    return sorted(range(len(prompts)), key=lambda i: (i * (scale + epoch + 5)) % 13)

def other_order(prompts, epoch, seed, scale):
    return order(prompts, epoch, seed, scale)[::-1]

def loss(tokens, scale):
    lengths = 0 if tokens.of_responses is None else tokens.response_lengths()
    entropy = 0 if tokens.entropy is None else tokens.entropy
    return (scale + lengths) * -tokens.ratios() * tokens.advantages - entropy

def other_loss(tokens, scale):
    return -loss(tokens, scale)

def advantage(rewards, group, scale):
    return scale * (rewards - rewards.mean() + 0.1)

def other_advantage(rewards, group, scale):
    return -advantage(rewards, group, scale)

def kept(group, scale):
    return (group.prompt.index + scale) % 3 > 0

def other_kept(group, scale):
    return not kept(group, scale)
"""
REWARDS = """
import os, pathlib, time

def score(records):
    return [len(records) + len(record["response"]) % 5 for record in records]

def other(records):
    return [-value for value in score(records)]

def right(records):
    return [{"score": 1.0, "correct": True} for record in records]

def numbered(records):
    pathlib.Path(__file__).with_name(f"process {os.getpid()}").touch()
    time.sleep(0.02)
    return score(records)

def slow(records):
    time.sleep(0.1)
    return score(records)

def large(records):
    return [float(len(bytearray(2**28)) > 0)] * len(records)

def single(records):
    if len(records) > 1:
        raise ValueError("too many at once")
    return score(records)

def some(records):
    if len(records[0]["response"]) % 3 == 0:
        raise ValueError("not this one")
    return score(records)
"""

CHAT = "{% for m in messages %}{{ m['content'] }}={% endfor %}{{ ending }}"

# The keys of a dataset -> other values. Of the prompts to train on those of `FREE` may change, and others are refused.
OTHER_DATA = {
    "path": "{folder}/copied", "split": "other", "columns.prompt": "other_prompt",
    "columns.ground_truth": "other_answer", "columns.difficulty": "other_difficulty", "columns.data_source": "note",
    "columns.extra": ["note"], "ground_truth_style": "unchecked", "several_answers": "any", "max_rows": 5,
    "template": "== {problem}", "chat_template": True, "deduplicate": False,
}  # fmt: skip
FREE = ("path", "columns.data_source", "columns.extra")
# Two prompts of evaluations have more than 9 tokens, none to train on has. Key -> as in CHANGES.
LONG_PROMPTS = (
    "data.max_prompt_tokens=9", "data.long_prompts=drop", "data.evaluation.max_rows=13",
    "data.evaluation.template==={problem}",
)  # fmt: skip
CHANGED_LIMITS = {"data.max_prompt_tokens": (10, "evaluation_prompts"), "data.long_prompts": ("refuse", "error")}
CHANGED_DATA = [
    *(
        f"data.{section}.{key}"
        for section in ("train", "mixture", "evaluation")
        for key in (*OTHER_DATA, "template_arguments")
    ),
    *CHANGED_LIMITS,
    "data.mixture.weight",
]


def write_rows(folder, note="a"):
    """Two splits of which two rows stand twice; two columns of each kind."""
    folder.mkdir()
    for split, shift in (("train", 0), ("other", 1)):
        rows = range(shift, 14 + shift)
        columns = {
            "prompt": [f"{i % 12} + {3 * (i % 12) % 7} =" for i in rows],
            "other_prompt": [f"{i} - {i % 3} =" for i in rows],
            "answer": [[str(i % 12), "7"] for i in rows],
            "other_answer": [[str(i), "3"] for i in rows],
            "difficulty": [float(i % 12 * 5 % 12) for i in rows],
            "other_difficulty": [float(i * 7 % 12) for i in rows],
            "data_source": [f"source {i % 2}" for i in rows],
            "note": [f"{note}{i % 12}" for i in rows],
        }
        pq.write_table(pa.table(columns), folder / f"{split}-0.parquet")


class Resumes:
    """Saved runs, and what happens after a resume."""

    def __init__(self, folder):
        self.folder, self.outputs = folder, {}
        self.file = prepare(folder)
        write_rows(folder / "rows")
        write_rows(folder / "copied", note="b")
        (folder / "reward.py").write_text(REWARDS)
        (folder / "choices.py").write_text(CHOICES)
        values = yaml.safe_load(self.file.read_text())
        columns = {"ground_truth": "answer", "difficulty": "difficulty"}
        dataset = {"path": str(folder / "rows"), "template": "bare", "columns": columns}
        values |= {"num_steps": 4, "optimizer": {"learning_rate": 0.02, "warmup_steps": 0}}
        values["data"] = {"max_prompt_tokens": 16, "evaluation": {**dataset, "max_rows": 3}, "train": dataset}
        self.file.write_text(yaml.safe_dump(values))
        mixture = {"a": dataset, "b": {**dataset, "columns": {**columns, "prompt": "other_prompt"}}}
        self.mixed = folder / "mixed.yaml"
        data = {"max_prompt_tokens": 16, "evaluation": values["data"]["evaluation"], "mixture": mixture}
        self.mixed.write_text(yaml.safe_dump({**values, "data": data}))
        self.own = folder / "own.yaml"
        self.own.write_text(yaml.safe_dump({name: value for name, value in values.items() if name != "reward"}))
        tokenizer = folder / "model" / "tokenizer_config.json"
        tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "chat_template": CHAT}))
        vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        make_moe_model(folder / "experts", num_layers=2, vocab_size=vocab_size)
        make_deepseek_v3_model(folder / "biased", vocab_size=vocab_size)
        for name in ("experts", "biased"):
            for file in (folder / "model").glob("*token*"):
                shutil.copyfile(file, folder / name / file.name)
        for name in ("the model", "experts"):
            shutil.copytree(folder / name.removeprefix("the "), folder / f"copy of {name}")

    def config(self, overrides, file=None):
        is_own = any(override.startswith(("reward.function=", "reward.components=")) for override in overrides)
        file = file or (self.own if is_own else self.file)
        return load_config(RunConfig, file, [o.replace("{folder}", str(self.folder)) for o in overrides])

    def saved(self, overrides, file=None):
        """The override that names the folder of a run that has made its first step."""
        if (overrides, file) not in self.outputs:
            output = f"output_dir={self.folder}/run {len(self.outputs)}"
            ends = ("num_steps=1", "checkpoint.save_hf_at_end=false", "evaluation.at_start=false", "evaluation.every=0")
            run_training(self.config([*overrides, output, *ends], file))
            self.outputs[overrides, file] = output
        return self.outputs[overrides, file]

    def resumed(self, overrides, file=None, *, has_step=True, until=()):
        """What is seen of a run that continues: its settings in use, its prompts, the next step, an evaluation; no more
        than `until` the part that shows the last of these."""
        seen, run, parts = {"error": ""}, None, set()
        with heard() as seen["warnings"]:
            try:
                config = self.config(overrides, file)
                run = build_run(config, 1)
                loop.restore(run, run.trainer.load(run.trainer.store.latest()))
                for part in chain([beginning(run)], step(run) if has_step else []):
                    seen |= part
                    parts |= part.keys()
                    if until and parts.issuperset(until):
                        break
            except (InputError, FleetError, StarvedError) as error:
                seen["error"] = str(error)
            finally:
                seen["processes"] = len(list(self.folder.glob("process *")))
                for process in self.folder.glob("process *"):
                    process.unlink()
                seen["threads"] = torch.get_num_threads()
                seen["deterministic"] = torch.are_deterministic_algorithms_enabled()
                torch.set_num_threads(1)
                torch.use_deterministic_algorithms(False)
                if run:
                    close(run)
                stop_processes()
        return seen


def assigned(key, value):
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


@contextlib.contextmanager
def heard():
    """The warnings of the package meanwhile."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dapo_mega").addHandler(handler)
    yield messages
    logging.getLogger("dapo_mega").removeHandler(handler)


def beginning(run):
    """What a continued run has before its first step."""
    policy, critic = run.trainer.policy, run.trainer.critic
    evaluated = run.evaluator._prompts if run.evaluator else []
    datasets = {"training": run.collector.prompts, "evaluation": evaluated}
    return {
        **{
            f"{name}_prompts": [
                (p.token_ids.tolist(), p.ground_truth, p.difficulty, p.data_source, dict(p.fields)) for p in prompts
            ]
            for name, prompts in datasets.items()
        },
        **{f"trainer.{name}": str(value) for name, value in vars(policy.config).items() if not callable(value)},
        **{f"gradients.{name}": value for name, value in vars(policy.chunks[0].ddp_config).items()},
        "is_fused": unwrapped(policy.chunks[-1])._fused,
        "path": policy.path,
        "records": records_samples(run),
        "critic_path": critic.path if critic else None,
    }


def records_samples(run):
    recorder = open_recorder(run.config, run.tokenizer, run.step)
    if recorder:
        recorder.close()
    return recorder is not None


def step(run):
    """Sends the weights, makes a step and evaluates: what is seen of each part, under names of its own."""
    buckets, rows = [], []
    with pytest.MonkeyPatch.context() as patch:
        policy, make_batch = run.trainer.policy, engine.RowBatch
        weights = policy.weights
        patch.setattr(policy, "weights", lambda size: (buckets.append(1) or bucket for bucket in weights(size)))
        patch.setattr(engine, "RowBatch", lambda *given: rows.append(given[3]) or make_batch(*given))
        loop.send_weights(run)
        yield {"buckets": len(buckets)}
        groups, collected = loop.collect(run)
    yield {**collected, "most_rows": max(rows), "asked": [group.prompt.index for group in groups]}
    stats = run.trainer.take(samples_of_groups(groups, run.config, run.step))
    measured, scored = loop.score_groups(run.trainer, run.config, groups, run.step)
    seen = {
        **scored,
        **loop.check_mismatch(run, measured),
        **{f"batch/{name}": value for name, value in asdict(stats).items()},
    }
    yield seen
    updated = loop.update(run, run.entropy.current())
    seen = {**seen, "updates": len(updated.updates), **updated.metrics}
    loop.adapt_entropy_bonus(run.entropy, run.config, seen)
    seen["next_entropy_bonus"] = run.entropy.current()
    yield {**seen, "weights": [float(t.double().sum()) for bucket in policy.weights(1 << 24) for _, t in bucket]}
    yield loop.evaluate(run)


@pytest.fixture(scope="module")
def resumes(tmp_path_factory):
    return Resumes(tmp_path_factory.mktemp("changes"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Each checkpoint is read from its files once."""
    contents, load = {}, store.load_restricted

    def loaded(wanted, path):
        if path not in contents:
            contents[path] = load(wanted, path)
        return copy.deepcopy(contents[path])

    monkeypatch.setattr(store, "load_restricted", loaded)


def test_each_changed_key_changes_the_rest_of_the_run(resumes, pytestconfig):
    lost = []
    for context, changes in CHANGES.items():
        changes = dict(every_third(changes.items(), pytestconfig))
        settings = (*context, resumes.saved(context))
        before = resumes.resumed(settings, until={name for _, name in changes.values()})
        for key, (value, name) in changes.items():
            after = resumes.resumed((*settings, assigned(key, value)), until={name})
            if before.get(name) == after.get(name) or (after["error"] and name != "error"):
                lost.append((key, name, before["error"], after["error"]))
    assert not lost, "\n".join(map(str, lost))


def test_other_prompts_are_asked_in_evaluations_and_refused_in_training(resumes):
    wrong = []
    for section, file in (("train", None), ("mixture.a", resumes.mixed), ("evaluation", None)):
        settings = (resumes.saved((), file), "data.evaluation.max_rows=13")
        before = resumes.resumed(settings, file, has_step=False)
        for key, value in OTHER_DATA.items():
            after = resumes.resumed((*settings, assigned(f"data.{section}.{key}", value)), file, has_step=False)
            what = "evaluation_prompts" if section == "evaluation" else "training_prompts"
            is_refused = "made with other training prompts than data.train gives now" in after["error"]
            is_other = not after["error"] and before[what] != after[what]
            if not (is_other if section == "evaluation" or key in FREE else is_refused):
                wrong.append((section, key, after["error"]))
    assert not wrong, "\n".join(map(str, wrong))


def test_other_template_arguments_are_asked_in_evaluations_and_refused_in_training(resumes):
    for section, file in (("train", None), ("mixture.a", resumes.mixed), ("evaluation", None)):
        settings = (f"data.{section}.chat_template=true",)
        settings = (*settings, resumes.saved(settings, file))
        before = resumes.resumed(settings, file, has_step=False)
        changed = (*settings, f"data.{section}.template_arguments={{ending: 7}}")
        after = resumes.resumed(changed, file, has_step=False)
        if section == "evaluation":
            assert not after["error"]
            assert after["evaluation_prompts"] != before["evaluation_prompts"]
        else:
            assert "made with other training prompts than data.train gives now" in after["error"], section


def test_longer_prompts_other_weights_and_other_datasets_take_effect(resumes):
    another = {"path": f"{resumes.folder}/rows", "template": "bare", "columns": {"ground_truth": "answer"}}
    cases = [
        *((None, LONG_PROMPTS, key, *changed) for key, changed in CHANGED_LIMITS.items()),
        (None, ("evaluation.every=0", "evaluation.at_start=false"), "data.evaluation", None, "evaluation_prompts"),
        (resumes.mixed, (), "data.mixture.a.weight", 9, "asked"),
        (resumes.mixed, (), "data.mixture.c", another, "error"),
    ]
    lost = []
    for file, context, key, value, name in cases:
        settings, has_step = (*context, resumes.saved((), file)), name == "asked"
        before = resumes.resumed(settings, file, has_step=has_step)
        after = resumes.resumed((*settings, assigned(key, value)), file, has_step=has_step)
        if before["error"] or before[name] == after[name]:
            lost.append((key, name, before["error"], after["error"]))
    assert not lost, "\n".join(map(str, lost))
