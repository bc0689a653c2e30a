"""On-policy distillation as whole runs: a teacher in a folder, and one on a real SGLang server."""

import asyncio
import json
import shutil
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dapo_mega.algorithms.advantages import GroupNormAdvantage
from dapo_mega.config import DistillationConfig, RunConfig, load_config
from dapo_mega.data.tokenizer import build_byte_tokenizer, load_tokenizer
from dapo_mega.engines.sglang.teachers import TeacherServers
from dapo_mega.errors import FleetError, InputError
from dapo_mega.megatron.processes import stop_processes
from dapo_mega.metrics import read_metrics
from dapo_mega.training.replay import replay
from dapo_mega.training.run import run_training
from dapo_mega.types import Group, Prompt, ScoredTrajectory, Turn
from tests.distributed.tiny import make_moe_model
from tests.unit.rewards.local_server import serving

from .runs import decisive, finish, prepare, prepare_data, start
from .sglang_servers import API_KEY, serving_engines, sglang_python, tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.distributed]

KEY = {"api_key_env": "DAPO_MEGA_API_KEY"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The configuration file of a run in which all responses are wrong, and a teacher of another size."""
    folder = tmp_path_factory.mktemp("distillation")
    config = prepare(folder)
    teacher = folder / "teacher"
    prepare_data("init-model", "--output", teacher, "--seed", 7, "--hidden-size", 48, "--layers", 3, "--kv-heads", 4)
    file = teacher / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"] *= 5  # So that it has preferences.
    save_file(weights, file, {"format": "pt"})
    return config, teacher


NO_EVALUATION = ("evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false")


def test_tokens_learn_from_their_teacher_in_every_layout_and_a_run_goes_on_to_the_bit(task, tmp_path):
    config, teacher = task
    values = (f"distillation.teachers.default.path={teacher}", "reward.source=verifier", "num_steps=3", *NO_EVALUATION)
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    finish(start(config, 2, whole, *values), whole)
    for steps in (2, 3):
        finish(start(config, 2, interrupted, *values, f"num_steps={steps}"), interrupted)
    records, again = (read_metrics(run / "metrics.jsonl") for run in (whole, interrupted))
    assert decisive(records[-1]) == decisive(again[-1])
    for layout in ("tensor", "pipeline", "context"):
        finish(start(config, 2, tmp_path / layout, *values, "num_steps=1", f"parallel.{layout}=2"), tmp_path / layout)
        (first,) = read_metrics(tmp_path / layout / "metrics.jsonl")
        for name in ("policy/kl_to_teacher", "policy/teacher_logprob", "policy/loss", "policy/grad_norm"):
            assert first[name] == pytest.approx(records[0][name], rel=1e-4, abs=1e-6), (layout, name)
    # All rewards are equal, and all groups are trained on.
    assert [(r["groups/all_wrong_share"], r["groups/kept_share"]) for r in records] == [(1, 1)] * 3
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    distances = []
    for row in pq.read_table(whole / "samples" / "step_00000003.parquet").to_pylist():
        if row["trainer_logprobs"]:
            expected = logprobs_of(model, [*row["prompt_ids"], *row["token_ids"]])[len(row["prompt_ids"]) - 1 :]
            distances.append(np.array(row["trainer_logprobs"]) - expected)
            np.testing.assert_allclose(row["advantages"], -distances[-1], atol=1e-4)
    assert len(distances) == 24
    assert np.concatenate(distances).mean() == pytest.approx(records[-1]["policy/kl_to_teacher"], abs=1e-4)


def logprobs_of(model, tokens):
    """Of all but the first."""
    return all_logprobs(model, tokens)[range(len(tokens) - 1), tokens[1:]].numpy()


@torch.no_grad()
def all_logprobs(model, tokens):
    """Of the whole vocabulary at all tokens but the first."""
    return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


class Teacher:
    """Answers like SGLang: a token's log-prob is minus a hundredth of its id, or what a model gives it. Of the requests
    from number `fails_from` on, `failures` are refused."""

    def __init__(self, tokenizer, model=None):
        self.model = model
        self.tokenizer, self.num_answers, self.fails_from, self.failures = tokenizer, 0, 0, 0
        self.pause_s, self.at_once, self.most_at_once = 0.0, 0, 0

    async def answer(self, request):
        given = await request.json()
        if self.num_answers >= self.fails_from and self.failures:
            self.failures -= 1
            return web.Response(status=503, text="out of memory")
        self.num_answers += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.pause_s)
        finally:
            self.at_once -= 1
        ids = given["input_ids"] or self.tokenizer(given["text"])["input_ids"]
        start, top_k = given["logprob_start_len"], given.get("top_logprobs_num", 0)
        known = [-token / 100 for token in ids[1:]] if self.model is None else logprobs_of(self.model, ids).tolist()
        said = {"input_token_logprobs": [[None, ids[start], None], *zip_triples(known[start:], ids[start + 1 :])]}
        if top_k:
            values, tokens = all_logprobs(self.model, ids)[start:].topk(top_k)
            said["input_top_logprobs"] = [None, *map(zip_triples, values.tolist(), tokens.tolist())]
        return web.json_response({"output_ids": [], "meta_info": said})


def zip_triples(logprobs, tokens):
    return [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]


def test_the_most_probable_tokens_teach_the_same_from_a_server_and_in_every_layout(task, tmp_path):
    file, folder = task
    top_k, key = 5, "distillation.teachers.default"
    values = (f"distillation.top_k={top_k}", "batch.mini_batch_groups=6", *NO_EVALUATION)
    from_folder = (f"{key}.path={folder}", *values, "num_steps=1")
    finish(start(file, 1, tmp_path / "one", *from_folder), tmp_path / "one")
    (first,) = read_metrics(tmp_path / "one" / "metrics.jsonl")
    teacher, policy = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, file.parent / "model")
    )
    distances = []
    for row in pq.read_table(tmp_path / "one" / "samples" / "step_00000001.parquet").to_pylist():
        if row["trainer_logprobs"]:
            tokens = [*row["prompt_ids"], *row["token_ids"]]
            p, q = (all_logprobs(model, tokens)[len(row["prompt_ids"]) - 1 :].double() for model in (policy, teacher))
            q, ids = q.topk(top_k)
            p = p.gather(1, ids)
            rest, of_teacher = ((1 - x.exp().sum(-1)).log() for x in (p, q))
            distances.append((p.exp() * (p - q)).sum(-1) + rest.exp() * (rest - of_teacher))
            assert row["advantage"] == 0
    assert first["policy/kl_to_teacher"] == pytest.approx(float(torch.cat(distances).mean()), abs=1e-5)
    # The loss is it.
    assert first["policy/loss"] == pytest.approx(first["policy/kl_to_teacher"], abs=1e-6)
    assert "policy/grad_norm" in first
    served = tmp_path / "served"
    stand_in = Teacher(load_tokenizer(str(file.parent / "model")), teacher)
    with serving(stand_in.answer) as url:
        given = [f"{key}.urls=[{url}]", *values, "num_steps=2", "checkpoint.every=1", f"output_dir={served}"]
        run_training(load_config(RunConfig, file, given))
        stop_processes()
    for layout in ("tensor", "pipeline", "context"):
        finish(start(file, 2, tmp_path / layout, *from_folder, f"parallel.{layout}=2"), tmp_path / layout)
    for run in ("served", "tensor", "pipeline", "context"):
        found = read_metrics(tmp_path / run / "metrics.jsonl")[0]
        for name in ("policy/kl_to_teacher", "policy/teacher_logprob", "policy/loss", "policy/grad_norm"):
            assert found[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), (run, name)
    # What the server said is kept: it is gone.
    replayed = replay(served, 2)
    assert {d.name for d in replayed.all} >= {"policy/kl_to_teacher"}
    assert [d for d in replayed.all if d.largest] == []
    stop_processes()
    with pytest.raises(InputError, match=r"distillation\.top_k=9999 is more than the \d+ tokens of model\.path; lower"):
        run_training(load_config(RunConfig, file, [*from_folder, "distillation.top_k=9999", f"output_dir={served}x"]))


@pytest.fixture(scope="module")
def experts(task):
    """A mixture of experts with the tokens of the run's model."""
    model = task[0].parent / "model"
    folder = make_moe_model(model.with_name("experts"), num_layers=2, vocab_size=sizes_of(model)["vocab_size"])
    for file in model.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def sizes_of(model):
    return json.loads((model / "config.json").read_text())


# The teacher is dense, and has three layers; a mixture and the run's model have two.
UNEVEN = "parallel={pipeline: 2, pipeline_layout: [0, 2]}"
LAYOUTS = {
    "dense": (UNEVEN, "parallel={context: 2}"),
    "experts": ("parallel={expert: 2}", "parallel={expert: 2, tensor: 2, sequence: true}", UNEVEN),
}


@pytest.mark.whole_table
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize(("kind", "rank"), [("dense", 4), ("experts", 0), ("experts", 4)])
def test_a_teacher_of_another_kind_teaches_mixtures_and_adapters_in_every_layout_and_after_a_resume(
    task, experts, tmp_path, kind, rank, top_k
):
    file, teacher = task
    given = [f"distillation={{teachers: {{default: {{path: {teacher}}}}}, top_k: {top_k}}}", "num_steps=2"]
    given += [f"model.path={experts}"] * (kind == "experts") + [f"lora={{rank: {rank}}}"] * bool(rank)
    runs = {}
    for layout in ("parallel={}", *LAYOUTS[kind]):
        output = tmp_path / str(len(runs))
        finish(start(file, 1 + bool(runs), output, *given, *NO_EVALUATION, layout), output)
        runs[layout] = read_metrics(output / "metrics.jsonl")
    for layout, records in runs.items():
        for record, expected in zip(records, runs["parallel={}"], strict=True):
            for name in ("policy/kl_to_teacher", "policy/loss", "policy/grad_norm"):
                assert record[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (layout, name)
    assert runs["parallel={}"][1]["policy/grad_norm"] != runs["parallel={}"][0]["policy/grad_norm"]
    layout, parts = LAYOUTS[kind][0], tmp_path / "parts"
    for steps in (1, 2):
        finish(start(file, 2, parts, *given, *NO_EVALUATION, layout, f"num_steps={steps}"), parts)
    assert decisive(read_metrics(parts / "metrics.jsonl")[-1]) == decisive(runs[layout][-1])


def test_a_teacher_that_dies_in_a_step_is_told_and_nothing_is_lost(task, tmp_path):
    file, _ = task
    teacher = Teacher(load_tokenizer(str(file.parent / "model")))
    with serving(teacher.answer) as url:
        values = [f"distillation.teachers.default.urls=[{url}]", *NO_EVALUATION, "num_steps=3", "checkpoint.every=0"]
        whole, died = (load_config(RunConfig, file, [*values, f"output_dir={tmp_path / n}"]) for n in ("whole", "died"))
        teacher.failures = 2  # Tried again.
        run_training(whole)
        assert teacher.num_answers == 1 + 3 * 24
        teacher.fails_from, teacher.failures = teacher.num_answers + 1 + 24 + 10, 10**6
        with pytest.raises(
            FleetError, match=r"teachers\.default did not score 14 of 24 .*503: out of memory \(after 3 at"
        ):
            run_training(died)
        stop_processes()
        with pytest.raises(InputError, match=r"teachers\.default cannot be asked: .*out of memory"):
            run_training(died)
        stop_processes()
        teacher.failures = 0
        run_training(died)
    expected, got = (
        [decisive(record) for record in read_metrics(tmp_path / n / "metrics.jsonl")] for n in ("whole", "died")
    )
    assert got == expected
    replayed = replay(tmp_path / "died", 3)  # What a teacher said is kept: nobody is asked.
    assert {d.name for d in replayed.all} >= {"policy/kl_to_teacher"}
    assert [d for d in replayed.all if d.largest] == []


def test_changed_teachers_take_effect_at_a_resume(task, tmp_path):
    file, folder = task
    teacher = Teacher(load_tokenizer(str(file.parent / "model")))
    key = "distillation.teachers.default"

    def resumed(*overrides):
        given = [*NO_EVALUATION, f"output_dir={tmp_path / 'run'}", "checkpoint.every=1", *overrides]
        run_training(load_config(RunConfig, file, given), accept_changes=True)

    with serving(teacher.answer) as url:
        resumed(f"{key}.urls=[{url}]", "num_steps=1")
        for override, message in {
            "api_key_env=NO_SUCH_KEY": "environment variable NO_SUCH_KEY holds no key",
            "api_key_file=/no/such/key": "the file /no/such/key cannot be read",
            "timeout_s=0.2": "within timeout_s=0.2",
            "deadline_s=0.2": "within deadline_s=0.2",
            "attempts=2": "after 2 attempts",
        }.items():
            teacher.pause_s, teacher.failures = 0.5 * override.endswith("_s=0.2"), 2 * override.startswith("attempts")
            with pytest.raises(InputError, match=message):
                resumed(f"{key}.urls=[{url}]", f"{key}.{override}", "num_steps=2")
            stop_processes()
        teacher.pause_s, teacher.most_at_once = 0.02, 0
        resumed(f"{key}.urls=[{url}]", f"{key}.concurrency=3", "num_steps=2")
        assert teacher.most_at_once == 3
    # Not the server any more; beside the reward.
    changes = ("distillation.coefficient=0.5", "distillation.reward_weight=2", "num_steps=3")
    resumed(f"{key}.path={folder}", *changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = pq.read_table(tmp_path / "run" / "samples" / "step_00000003.parquet").to_pylist()
    groups = groupby((row for row in rows if row["trainer_logprobs"]), lambda row: row["group"])
    for members in (list(members) for _, members in groups):
        advantages = GroupNormAdvantage().of_group([row["reward"] for row in members])
        for row, advantage in zip(members, advantages, strict=True):
            expected = logprobs_of(model, [*row["prompt_ids"], *row["token_ids"]])[len(row["prompt_ids"]) - 1 :]
            distances = np.array(row["trainer_logprobs"]) - expected
            np.testing.assert_allclose(row["advantages"], 2 * advantage - 0.5 * distances, atol=1e-4)
    # Over the most probable tokens the teacher is in the loss, and advantages are the reward's.
    resumed(f"{key}.path={folder}", *changes[:2], "distillation.top_k=3", "num_steps=4")
    rows = pq.read_table(tmp_path / "run" / "samples" / "step_00000004.parquet").to_pylist()
    groups = groupby((row for row in rows if row["trainer_logprobs"]), lambda row: row["group"])
    for members in (list(members) for _, members in groups):
        advantages = GroupNormAdvantage().of_group([row["reward"] for row in members])
        np.testing.assert_allclose([row["advantage"] for row in members], 2 * np.array(advantages), atol=1e-5)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A real server of a model, and the model's folder."""
    sglang_python()
    folder = tmp_path_factory.mktemp("teacher")
    model = tiny_model(folder / "model", hidden_size=96)
    with serving_engines(model, folder / "served", 1, "--with-text") as launcher:
        yield launcher, model


def trajectory(number, tokens, sampled, segments):
    sampled = np.array(sampled, bool)
    tokens = np.array(tokens, np.int32)
    ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False)) + 1
    return ScoredTrajectory(
        number, tokens, np.zeros(len(tokens), np.float32), sampled, tuple(Turn(int(e), "stop") for e in ends),
        ((0, len(tokens)),), (), segments, text="", correct=None, accuracy_reward=0.0, reward=0.0,
    )  # fmt: skip


def test_a_real_server_scores_what_its_model_gives_the_sampled_tokens(served, monkeypatch):
    launcher, folder = served
    monkeypatch.setenv(KEY["api_key_env"], API_KEY)
    config = DistillationConfig(teachers={"math": {"urls": launcher.urls, **KEY}})
    teachers = TeacherServers(config, load_tokenizer(str(folder)))
    prompt = np.array([20, 30, 40], np.int32)
    answers = (
        trajectory(0, [50, 60, 1], [1, 1, 1], (3,)),
        trajectory(1, [50, 60, 70, 80, 90, 1], [1, 1, 0, 0, 1, 1], (6,)),
        # Its history was rewritten: the second piece is a sequence of its own.
        trajectory(2, [50, 60, 25, 35, 90, 1], [1, 1, 0, 0, 1, 1], (2, 6)),
    )
    others = (trajectory(3, [50, 1], [1, 1], (2,)),)
    given = {"math": answers, "law": others}
    groups = [Group(Prompt(0, "", prompt, "", data_source=source), members) for source, members in given.items()]
    scored, unscored = teachers.scored(groups)
    assert unscored.trajectories == others
    expected = partial(logprobs_of, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    one, two, three = (member.teacher_logprobs for member in scored.trajectories)
    np.testing.assert_allclose(one, expected([*prompt, 50, 60, 1])[2:], atol=1e-4)
    whole_tokens = [*prompt, 50, 60, 70, 80, 90, 1]
    whole = expected(whole_tokens)[2:]
    np.testing.assert_allclose(two, whole * answers[1].sampled, atol=1e-4)
    np.testing.assert_allclose(three[:2], one[:2], atol=1e-4)
    np.testing.assert_allclose(three[2:], [0, 0, *expected([25, 35, 90, 1])[1:]], atol=1e-4)
    assert teachers.scored([scored])[0].trajectories[0] is scored.trajectories[0]
    # What is known without the most probable tokens is asked again with them.
    asking = TeacherServers(config.model_copy(update={"top_k": 4}), load_tokenizer(str(folder)))
    with_top = asking.scored([scored])[0]
    of_model = all_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), whole_tokens)
    expected_top = of_model[2:].topk(4)
    member = with_top.trajectories[1]
    ids, logprobs = (x.reshape(6, 4) for x in (member.teacher_top_ids, member.teacher_top_logprobs))
    is_sampled = torch.from_numpy(member.sampled)
    assert ids.tolist() == (expected_top.indices * is_sampled[:, None]).tolist()
    np.testing.assert_allclose(logprobs, expected_top.values * is_sampled[:, None], atol=1e-4)
    np.testing.assert_allclose(member.teacher_logprobs, two, atol=1e-5)
    assert asking.scored([with_top])[0].trajectories[1] is member
    with pytest.raises(InputError, match=r"distillation.teachers.math has another tokenizer than the policy: it reads"):
        TeacherServers(config, build_byte_tokenizer())
