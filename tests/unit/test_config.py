import json
import traceback
from pathlib import Path
from typing import get_args

import pytest
import yaml

from dapo_mega.algorithms.policy_losses import ClipLoss
from dapo_mega.config import PRESETS, AlgorithmConfig, RunConfig, SftConfig, dump_config, load_config
from dapo_mega.config.base import differences, may_change_at_resume, merged
from dapo_mega.config.choices import owner_of
from dapo_mega.config.files import read_yaml
from dapo_mega.errors import InputError
from dapo_mega.planning.plan import describe_run
from dapo_mega.training.resume import is_free, refuse_changes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MINIMAL = {"output_dir": "o", "num_steps": 1, "model": {"path": "m"}, "data": {"train": {"path": "d"}}}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.clip_hihg=0.3", "unknown key 'algorithm.clip_hihg'; did you mean 'algorithm.policy_loss.high'?"),
        ("algoritm.preset=dapo", "unknown key 'algoritm'; did you mean 'algorithm'?"),
        ("algorithm.kl.beta=1", "unknown key 'algorithm.kl.beta'; valid keys: coefficient, estimator"),
        ("data.train.columns.promt=x", "did you mean 'data.train.columns.prompt'?"),
        ("batch.mini_batch_groups=30", "the nearest size that does is 32"),
        ("batch.tokens_per_microbatch=100", "set it to at least 22528"),
        ("checkpoint={every: 20, keep_every: 50}", "not a multiple of checkpoint.every=20"),
        ("reward.overlong_cache_tokens=30000", "larger than rollout.max_response_tokens=20480"),
        ("parallel.sequence=true", "needs parallel.tensor >= 2"),
        ("parallel.virtual_pipeline=2", "it needs parallel.pipeline >= 2, or must be 1"),
        ("parallel={tensor: 4, expert_tensor: 2}", "parallel.expert_tensor=2 must be 1 or parallel.tensor=4"),
        ("parallel={context: 3, world_size: 8}", "x context 3 = 3; start 6 or 9 processes"),
        (
            "parallel={pipeline: 2, pipeline_layout: [1, 2, 1]}",
            "=[1, 2, 1] must have the layers of parallel.pipeline=2 x",
        ),
        ("parallel={pipeline: 3, pipeline_layout: [1, 0, 2]}", "at least 1 in each but the first and the last"),
        ("parallel={pipeline: 2, pipeline_layout: Ett|m|L}", "='Ett|m|L' is not a layout; give E for the embedding"),
        ("parallel={pipeline: 2, pipeline_layout: [-1, 3]}", "=[-1, 3] must have the layers of"),
        ("parallel={expert: 3, world_size: 8}", "choose expert sizes from [1, 2, 4, 8]"),
        ("compute.fp8.scaling=mxfp8", "compute.fp8.scaling='mxfp8'"),
        ("compute.fp8.params=true", "need compute.fp8.scaling to be delayed, tensorwise or blockwise"),
        ("compute.fp8={scaling: delayed, bf16_layers_at_ends: 1}", "use tensorwise or blockwise"),
        ("compute.overlap_param_gather=true", "needs compute.overlap_grad_reduce=true"),
        ("compute={recompute: selective, recompute_modules: []}", "needs at least one of"),
        ("compute.recompute_modules=[attention]", "compute.recompute_modules.0='attention'"),
        (
            "batch={groups_per_step: 1000, mini_batch_groups: 1000, generation_groups: 24}",
            "more than a step can have: 240",
        ),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate=-1: input should be greater than 0"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate='fast'"),
        ("evaluation.every=5", "data.evaluation names no dataset"),
        ("data.train=null", "data.train is missing; add it to the file or as data.train.path=FILE"),
        ("data.mixture.a.path=a.jsonl", "data.train and data.mixture are both given"),
        ("data={train: null, mixture: {math: {path: m}, mth: {weight: 2}}}", "did you mean data.mixture.math?"),
        ("data={train: null, mixture: {a.b: {path: m}}}", "data.mixture: 'a.b' is no name; use letters"),
        ("data={train: null, mixture: {a: {path: m, weight: 0}}}", "data.mixture.a.weight=0: input should be greater"),
        ("data={train: null, mixture: {a: {path: m, wieght: 1}}}", "did you mean 'data.mixture.a.weight'?"),
        ("data.mixture=[m]", "data.mixture=['m']: input should be a valid dictionary"),
        ("data={train: null, mixture: [m]}", "data.mixture=['m']: input should be a valid dictionary"),
        ("data.sampling.floor=0.5", "data.sampling.order.floor is a key of kind prioritised, and the kind is shuffle"),
        (
            "data.sampling.order={kind: prioritised, floor: 1.5}",
            "data.sampling.order.floor=1.5: input should be less than or equal to 1",
        ),
        ("data.sampling.retire_after=0", "data.sampling.retire_after=0: input should be greater than or equal to 1"),
        (
            "data.sampling.order=random",
            "data.sampling.order.kind='random' must be one of shuffle, curriculum, prioritised, function",
        ),
        ("data.sampling.order=curriculum", "set data.train.columns.difficulty to a column of numbers"),
        ("reward.correct=-2", "must be larger than reward.incorrect"),
        ("reward={components: [{kind: environment}]}", "environment=single_turn gives nothing"),
        ("algorithm.importance_cap=0", "algorithm.importance_cap=0 must be positive, auto or null"),
        ("algorithm.sequence_mask=[1.5, 2]", "[1.5, 2.0] must be [low, high] with 0 <= low < 1"),
        ("rollout.mismatch_stop=0", "rollout.mismatch_stop=0: input should be greater than 0"),
        ("rollout.dtype=fp8", "rollout.dtype=fp8 needs engines of a fleet"),
        ("rollout.schedule=partial", "rollout.schedule=partial is for rollout.placement=fleet, not embedded"),
        ("rollout.fleet.urls=http://a:1", "rollout.fleet.urls is for rollout.placement=fleet or colocated"),
        ("rollout.placement=fleet", "give their addresses in rollout.fleet.urls, or rollout.fleet.rendezvous"),
        ("rollout={placement: fleet, fleet: {urls: [a:1]}}", "URL 0 of rollout.fleet.urls is no URL of a server"),
        ("rollout={placement: fleet, fleet: {urls: ['http://u:p@a:1']}}", "give the key as rollout.fleet.api_key_env"),
        ("rollout={placement: fleet, fleet: {urls: [http://a:1, http://a:1]}}", "names an engine twice"),
        ("rollout.fleet={hung_after_s: 3, heartbeat_s: 5}", "must be larger than rollout.fleet.heartbeat_s=5"),
        ("rollout={placement: colocated, schedule: partial, fleet: {urls: [http://a:1]}}", "use rollout.placement"),
        ("rollout.offload_trainer=true", "rollout.placement=embedded has none; leave it out"),
        ("weight_sync.full_every=5", "these are embedded, in bf16, and get weights by distributed; set"),
        ("nonsense", "not of the form section.key=value"),
        ("algorithm.preset=dapoo", "algorithm.preset='dapoo'"),
        ("algorithm.token_mask=[1.5, 2]", "algorithm.token_mask=[1.5, 2.0] must be [low, high] with 0 <= low < 1"),
        (
            "algorithm.policy_loss={kind: clip_cov, bounds: [5, 1]}",
            "algorithm.policy_loss.bounds=[5.0, 1.0] must be [low, high]",
        ),
        (
            "algorithm.policy_loss={kind: sapo, gate: [1, 0]}",
            "algorithm.policy_loss.gate=[1.0, 0.0] must be two positive numbers",
        ),
        ("algorithm={old_policy: engine, importance_cap: 2}", "would count the engine's probabilities twice"),
        ("reward.length_phase_in=[4, 2]", "reward.length_phase_in=[4, 2] must be [first, last]"),
        ("reward.components=[{kind: answr}]", "must be one of answer, r1_format, "),
        ("reward.components=[{kind: answer, wieght: 1}]", "did you mean 'reward.components.0.weight'?"),
        ("reward.components=[{kind: answer}, {kind: answer}]", "are called 'answer'; give each a name of its own"),
        ("reward.components=[{kind: answer}, {kind: answer, name: b}]", "set reward.correct_from to one of answer, b"),
        ("reward.components=[{kind: length_dapo}]", "has length rewards only"),
        ("reward.components=[{kind: answer}, {kind: repetition, weight: -1}]", "would train against repetition"),
        ("reward.components=[{kind: answer}, {kind: length_dapo, cache_tokens: 30000}]", "choose a smaller cache"),
        ("reward.components=[{kind: r1_format}]", "no component of the reward says which responses are correct; set"),
        ("reward.components=[{kind: r1_format}, {kind: length_kimi}]", "needs to know which responses are correct"),
        ("reward.components=[{kind: function, path: a.py}]", "'a.py' must be FILE.py:NAME or package.module:NAME"),
        ("reward.function=rewards/mine:score", "names neither a file that ends in .py nor a module"),
        ("reward={function: a.b:c, components: [{kind: answer}]}", "are both given; put the function into the list"),
        ("reward={function: a.b:c, extraction: boxed}", "reward.extraction=boxed is not read with reward.function"),
        ("reward={function: a.b:c, correct_from: score}", "choose one of function"),
        (
            "algorithm.score_threshold=1",
            "threshold is a key of kind score_threshold, and the kind is correctness",
        ),
        ("algorithm.dynamic_sampling_on=score_threshold", "algorithm.dynamic_sampling_on.threshold is missing"),
        ("reward.correct=.inf", "reward.correct=inf"),
        ("reward.incorrect=.nan", "reward.incorrect=nan"),
        ("batch.group_size=1", "leaves algorithm.advantage=group_norm no other response to compare with"),
        ("distillation={teachers: {default: {}}}", "a teacher has either path, a folder, or urls"),
        (
            "distillation={teachers: {default: {path: t, urls: [http://h:1]}}}",
            "a teacher has either path, a folder, or",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_allowed(file, override, message):
    with pytest.raises(InputError) as caught:
        load_config(RunConfig, file, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.preset=reinforce", "algorithm.dynamic_sampling=true"], "no group with right and wrong responses"),
        (["algorithm.preset=rloo"], "leaves algorithm.advantage=leave_one_out no other response"),
        (
            ["algorithm.preset=reinforce_pp", "batch.groups_per_step=1", "batch.mini_batch_groups=1"],
            "makes every advantage 0 in a step of one response",
        ),
    ],
)
def test_one_response_per_prompt_is_for_methods_without_a_group_baseline(file, overrides, message):
    with pytest.raises(InputError, match=message):
        load_config(RunConfig, file, ["batch.group_size=1", *overrides])
    for preset in ("reinforce", "reinforce_pp", "remax", "topr"):
        run = load_config(RunConfig, file, ["batch.group_size=1", f"algorithm.preset={preset}"])
        assert run.batch.group_size == 1


def test_texts_that_end_responses_are_not_empty(file):
    assert load_config(RunConfig, file, ['rollout.stop=["</s>", "\\n\\n"]']).rollout.stop == ("</s>", "\n\n")
    with pytest.raises(InputError, match="an empty text, which would end every response at once"):
        load_config(RunConfig, file, ['rollout.stop=["a", ""]'])


def test_every_preset_can_be_given_and_sets_what_it_lists(file):
    assert set(PRESETS) == set(get_args(AlgorithmConfig.model_fields["preset"].annotation))
    for preset, settings in PRESETS.items():
        algorithm = load_config(RunConfig, file, [f"algorithm.preset={preset}"]).algorithm.model_dump()
        for key, value in settings.items():
            if owner := owner_of(AlgorithmConfig, key):  # A bound that the preset's loss has not is no key of it.
                assert algorithm[owner[0]].get(owner[1], value) == value, (preset, key)
            elif isinstance(algorithm[key], dict):
                given = {"kind": value} if isinstance(value, str) else value
                assert merged(algorithm[key], given) == algorithm[key], (preset, key)
            else:
                assert algorithm[key] == value, (preset, key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy_loss.high", 0.2),
        ("aggregation", "sequence_mean_token_mean"),
        ("dynamic_sampling", False),
        ("policy_loss.dual_clip", None),
    ],
)
def test_a_part_of_dapo_is_switched_off_by_itself(file, key, value):
    whole = load_config(RunConfig, file, []).algorithm
    part = load_config(RunConfig, file, [f"algorithm.{key}={json.dumps(value)}"]).algorithm
    assert set(differences(whole, part)) == {key}


FLEET = ["rollout.placement=fleet", "rollout.fleet={urls: [http://a:1]}"]


def test_changes_alone_go_to_engines_in_bf16_by_broadcast(file):
    delta = ["weight_sync.full_every=5", "rollout.dtype=bf16"]
    assert load_config(RunConfig, file, [*FLEET, *delta]).weight_sync.full_every == 5
    dtypes = "rollout.dtype=fp32", "rollout.dtype=fp8"
    for override in (*dtypes, "weight_sync.transport=disk", "rollout.placement=colocated"):
        with pytest.raises(InputError, match=r"or weight_sync\.full_every=1"):
            load_config(RunConfig, file, [*FLEET, *delta, override])


def test_adapters_alone_go_to_fleets_by_broadcast(file):
    adapters = ["lora={send: adapters}", "rollout.dtype=bf16"]
    assert load_config(RunConfig, file, [*FLEET, *adapters]).sends_adapters
    assert not load_config(RunConfig, file, adapters).sends_adapters, "engines in the trainer get merged weights"
    ways = "weight_sync.transport=disk", "rollout.placement=colocated", "weight_sync.full_every=5"
    for override in (*ways, "rollout.dtype=fp8"):
        with pytest.raises(InputError, match=r"lora\.send=adapters .* lora\.send=merged"):
            load_config(RunConfig, file, [*FLEET, *adapters, override])


def test_the_weights_beside_adapters_stay_what_they_are(file):
    for name in ("model.path", "critic.path"):
        assert is_free(name, load_config(RunConfig, file))
        assert not is_free(name, load_config(RunConfig, file, ["lora.rank=4", "algorithm.advantage=gae"]))


def test_a_teacher_alone_needs_no_unequal_rewards(file):
    teacher = "distillation={teachers: {default: {path: t}, math: {urls: [http://h:1]}, law: {path: t}}}"
    run = load_config(RunConfig, file, [teacher, "batch.group_size=1"])
    assert (run.algorithm.dynamic_sampling, run.algorithm.advantage.kind) == (False, "reward")
    assert [run.distillation.number_of(source) for source in ("", "math", "law")] == [0, 1, 0]
    once = [teacher, "batch.groups_per_step=32"]
    assert load_config(RunConfig, file, once).scores_before_updates
    assert not load_config(RunConfig, file, [*once, "distillation.top_k=4"]).scores_before_updates
    with pytest.raises(InputError, match=r"dynamic_sampling=true would drop groups whose rewards are equal"):
        load_config(RunConfig, file, [teacher, "algorithm.dynamic_sampling=true"])
    both = load_config(RunConfig, file, [teacher, "distillation.reward_weight=1"])
    assert (both.algorithm.dynamic_sampling, both.algorithm.advantage.kind) == (True, "group_norm")
    with pytest.raises(InputError, match=r"servers score tokens at temperature 1, and rollout\.temperature=0\.7"):
        load_config(RunConfig, file, [teacher, "rollout.temperature=0.7"])


def test_a_critic_has_the_policys_settings_but_its_own_learning_rate(file):
    config = load_config(RunConfig, file, ["optimizer.beta2=0.95", "model.dtype=fp32"])
    assert not config.uses_critic
    config = load_config(RunConfig, file, ["optimizer.beta2=0.95", "model.dtype=fp32", "algorithm.advantage=gae"])
    assert config.uses_critic
    assert config.critic_model == config.model
    own = {"learning_rate": 5e-6, "warmup_steps": 50}
    assert config.critic_optimizer.model_dump() == {**config.optimizer.model_dump(), **own}
    assert (config.optimizer.learning_rate, config.critic_optimizer.beta2) == (1e-6, 0.95)
    other = load_config(RunConfig, file, ["critic.path=/v", "model.dtype=fp32"])
    assert (other.critic_model.path, other.critic_model.dtype) == ("/v", "fp32")


def test_a_critic_leaves_steps_to_the_policy(file):
    load_config(RunConfig, file, ["critic.pretraining_steps=1"])
    with pytest.raises(InputError, match=r"pretraining_steps=1 leaves the policy none of num_steps=1"):
        load_config(RunConfig, file, ["critic.pretraining_steps=1", "algorithm.advantage=gae"])


def test_partial_rollouts_need_groups_that_may_be_a_step_old(file):
    partial = load_config(RunConfig, file, [*FLEET, "rollout.schedule=partial"])
    assert partial.weight_sync.in_flight == "finish"
    with pytest.raises(InputError, match=r"max_staleness=0 drops them all; the smallest possible is 1"):
        load_config(RunConfig, file, [*FLEET, "rollout.schedule=partial", "algorithm.max_staleness=0"])


def test_runs_of_earlier_versions_say_partial_in_place_of_the_schedule(file):
    for given, schedule in (("true", "partial"), ("false", "synchronous")):
        rollout = load_config(RunConfig, file, [*FLEET, f"rollout.partial={given}"]).rollout
        assert rollout.schedule == schedule
        assert "partial" not in rollout.model_dump()
    both = [*FLEET, "rollout.partial=true", "rollout.schedule=asynchronous"]
    with pytest.raises(InputError, match=r"rollout.schedule=asynchronous is given too; leave rollout.partial out"):
        load_config(RunConfig, file, both)


def test_a_resume_with_another_seed_is_not_told_to_accept_what_cannot_be_accepted(file):
    (file.parent / "versions.json").write_text("{}")
    (file.parent / "config.yaml").write_text(dump_config(load_config(RunConfig, file)))
    for accepted in (False, True):
        with pytest.raises(InputError, match=r"another seed \(seed: 0 -> 3\), and --accept-changes does not cover it"):
            refuse_changes(load_config(RunConfig, file, ["seed=3"]), file.parent, accepted=accepted)
    other = load_config(RunConfig, file, ["data.train.template=r1"])
    with pytest.raises(InputError, match=r"add --accept-changes .*, which other training prompts do not allow"):
        refuse_changes(other, file.parent)
    refuse_changes(other, file.parent, accepted=True)


def test_what_chooses_teachers_or_is_the_reference_does_not_change_unsaid(file):
    """A teacher with servers, all of whose keys are free; of preferences the model that training starts from; and the
    number of steps, by whichever key, where the learning rate depends on it."""
    teachers = "distillation.teachers={default: {urls: [http://a:1]}%s}"

    def changed(kind, before, after):
        (file.parent / "config.yaml").write_text(dump_config(load_config(kind, file, before)))
        refuse_changes(load_config(kind, file, after), file.parent)

    def refused(kind, before, after, said):
        with pytest.raises(InputError, match=said):
            changed(kind, before, after)

    one, two = [teachers % ""], [teachers % ", math: {urls: [http://b:1]}"]
    changed(RunConfig, one, [(teachers % "").replace("a:1", "c:1")])
    refused(RunConfig, one, two, r"distillation\.teachers: \['default'\] -> \['default', 'math'\]")
    refused(RunConfig, two, one, r"distillation\.teachers: ")
    refused(RunConfig, one, [*one, "data.train.columns.data_source=kind"], r"columns\.data_source: None -> 'kind'")
    changed(RunConfig, [], ["data.train.columns.data_source=kind"])
    changed(SftConfig, [], ["model.path=other"])
    pairs = ["dpo={}", "data.train.columns.rejected=worse"]
    refused(SftConfig, pairs, [*pairs, "model.path=other"], r"model\.path: .*other'")
    changed(SftConfig, ["epochs=1"], ["epochs=2"])
    falling = ["optimizer.schedule=cosine"]
    refused(SftConfig, [*falling, "epochs=1"], [*falling, "epochs=2"], r"epochs: 1\.0 -> 2\.0")


def test_the_entropy_bonus_of_a_run_that_knew_no_bound_stays_unbounded_until_it_is_accepted(file):
    given = load_config(RunConfig, file, ["algorithm.entropy_target=0.3", "algorithm.entropy_coefficient=0.004"])
    recorded = yaml.safe_load(dump_config(given))
    del recorded["algorithm"]["entropy_max"]
    recorded["algorithm"]["entropy_coefficient"] = 0.02
    (file.parent / "versions.json").write_text("{}")
    (file.parent / "config.yaml").write_text(yaml.safe_dump(recorded))
    before = load_config(RunConfig, file.parent / "config.yaml")
    assert before.algorithm.entropy_max is None
    assert differences(before, given)["algorithm.entropy_max"] == (None, 0.005)
    with pytest.raises(InputError, match=r"algorithm.entropy_max: None -> 0.005\); .*add --accept-changes"):
        refuse_changes(given, file.parent)


def test_a_changed_default_that_acts_on_nothing_refuses_no_earlier_run(file):
    recorded = yaml.safe_load(dump_config(load_config(RunConfig, file)))
    recorded["algorithm"]["entropy_step"] = 0.005
    (file.parent / "versions.json").write_text("{}")
    (file.parent / "config.yaml").write_text(yaml.safe_dump(recorded))
    refuse_changes(load_config(RunConfig, file), file.parent)
    recorded["algorithm"]["entropy_target"] = 0.3
    (file.parent / "config.yaml").write_text(yaml.safe_dump(recorded))
    with pytest.raises(
        InputError, match=r"entropy_step: 0.005 -> 0.0001.*; .*default has changed since: write the for"
    ):
        refuse_changes(load_config(RunConfig, file, ["algorithm.entropy_target=0.3"]), file.parent)


def test_responses_of_an_asynchronous_run_continue_over_weight_updates(file):
    asynchronous = [*FLEET, "rollout.schedule=asynchronous"]
    assert load_config(RunConfig, file, asynchronous).weight_sync.in_flight == "continue"
    strict = load_config(RunConfig, file, [*asynchronous, "algorithm.max_staleness=0"])
    assert strict.rollout.schedule == "asynchronous"
    with pytest.raises(InputError, match=r"in_flight=finish waits for all responses .* set weight_sync.in_flight"):
        load_config(RunConfig, file, [*asynchronous, "weight_sync.in_flight=finish"])


@pytest.mark.parametrize(
    ("overrides", "cap", "mask"),
    [
        (["model.dtype=fp32"], None, None),
        (["model.dtype=bf16"], None, None),
        (["model.dtype=fp32", "rollout.dtype=bf16"], 2.0, (0.5, 2.0)),
        (["compute.fp8.scaling=blockwise"], 2.0, (0.5, 2.0)),
        (["rollout.dtype=fp8", *FLEET], 2.0, (0.5, 2.0)),
        (["rollout.dtype=fp8", "algorithm.importance_cap=null", *FLEET], None, (0.5, 2.0)),
        (["rollout.dtype=fp8", "algorithm.sequence_mask=null", *FLEET], 2.0, None),
        (["model.dtype=fp32", "algorithm.importance_cap=3"], 3.0, None),
        (["algorithm.sequence_mask=[0.1, 5]"], None, (0.1, 5.0)),
    ],
)
def test_mismatch_is_corrected_where_dtypes_differ(file, overrides, cap, mask):
    objective = load_config(RunConfig, file, overrides).objective
    assert (objective.importance_cap, objective.sequence_mask) == (cap, mask)


def test_a_key_that_stands_twice_is_refused_at_any_depth(tmp_path):
    path = tmp_path / "run.yaml"
    twice = {
        "seed: 1\nmodel: {path: m}\nseed: 2": "'seed' stands twice, in lines 1 and 3",
        "reward: {correct: 1}\nmodel: {path: m}\nreward: {incorrect: 0}": "'reward' stands twice, in lines 1 and 3",
        "data:\n  train:\n    path: a\n    template: b\n    path: c": "'path' stands twice, in lines 3 and 5",
        "model: {path: a, path: b}": "'path' stands twice, in lines 1 and 1",
        "reward:\n  components:\n  - {kind: length, weight: 1}\n  - {kind: x, 'kind': y}": "'kind' stands twice",
    }
    for text, message in twice.items():
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            load_config(RunConfig, path)
    path.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(InputError, match=r"override 'batch=.*'group_size' stands twice"):
        load_config(RunConfig, path, ["batch={group_size: 4, group_size: 8}"])
    # Keys that a merge brings may be given again.
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {<<: *a, x: 4}")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 4, "y": 2}}


def test_no_message_repeats_a_password(file):
    for override in (
        "rollout.fleet.rendezvous=user:secret@host:21600",
        "rollout.fleet.rendezvous=[user:secret@host]",
        "rollout.fleet.urls=http://user:secret@host:1",
        "tracking.mlflow_uri=http://user:secret@host",
        "tracking.backends=http://user:secret@host",
        "batch.group_size=user:secret@host",
        "batch.group_size={user:secret@host",
        "http://user:secret@host",
    ):
        with pytest.raises(InputError) as refused:
            load_config(RunConfig, file, [override])
        assert "secret" not in "".join(traceback.format_exception(refused.value)), override


def test_a_missing_key_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_config(RunConfig, tmp_path / "none.yaml")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "model": {}}))
    with pytest.raises(InputError, match=r"model.path is missing"):
        load_config(RunConfig, path)
    path.write_text("a: [1")
    with pytest.raises(InputError, match="not valid YAML"):
        load_config(RunConfig, path)
    path.write_text("- 1")
    with pytest.raises(InputError, match="expected a mapping"):
        load_config(RunConfig, path)


def test_dotted_overrides_reach_every_level_and_keep_the_rest(file):
    run = load_config(
        RunConfig, file, ["algorithm.clip_high=0.3", "optimizer.learning_rate=1e-5", "data.train.columns.prompt=q"]
    )
    assert run.algorithm.policy_loss.high == 0.3
    assert run.algorithm.policy_loss.low == 0.2
    assert run.optimizer.learning_rate == 1e-5
    assert run.data.train.path == "d"
    assert run.data.train.columns.prompt == "q"


@pytest.mark.parametrize("given", ["http://a:1,http://b:2", "[http://a:1, http://b:2]", '["http://a:1", "http://b:2"]'])
def test_a_list_of_texts_is_overridden_as_text_or_as_a_list(file, given):
    fleet = ["rollout.placement=fleet", f"rollout.fleet.urls={given}"]
    assert load_config(RunConfig, file, fleet).rollout.fleet.urls == ("http://a:1", "http://b:2")
    back = [*fleet, "rollout.placement=embedded", "rollout.fleet.urls=[]"]
    assert load_config(RunConfig, file, back).rollout.fleet.urls == ()


@pytest.mark.parametrize("path", ["/a b/my project #2/x", "/c: d/y", "/123", "/1e-4", "/data/[x]"])
def test_a_path_is_taken_as_it_is_written(file, path):
    run = load_config(RunConfig, file, [f"model.path={path}", f"output_dir={path}", f"data.train.path={path}"])
    assert (run.model.path, run.output_dir, run.data.train.path) == (path, path, path)


def test_an_order_by_outcomes_needs_a_reward_that_says_what_is_right(file):
    reward = ["reward.components=[{kind: r1_format}]", "algorithm.dynamic_sampling=false"]
    for key in ("order=prioritised", "retire_after=1"):
        with pytest.raises(InputError, match="need to know which responses are correct"):
            load_config(RunConfig, file, [f"data.sampling.{key}", *reward])
        threshold = ["algorithm.dynamic_sampling_on=score_threshold", "algorithm.score_threshold=0.5"]
        load_config(RunConfig, file, [f"data.sampling.{key}", *reward, *threshold])


def test_the_datasets_of_a_mixture_are_overridden_by_name(file, tmp_path):
    mixture = {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl", "weight": 3}}
    file.write_text(yaml.safe_dump({**MINIMAL, "data": {"mixture": mixture}}))
    before, after = (
        load_config(RunConfig, file, overrides)
        for overrides in ([], ["data.mixture.a.weight=0.5", "data.mixture.a.columns.prompt=q", "data.mixture.b.path=1"])
    )
    assert after.data.weights == {"a": 0.5, "b": 3}
    assert (after.data.mixture["a"].columns.prompt, after.data.mixture["b"].path) == ("q", "1")
    changed = differences(before, after)
    assert {name: may_change_at_resume(RunConfig, name) for name in changed} == {
        "data.mixture.a.weight": False,
        "data.mixture.a.columns.prompt": False,
        "data.mixture.b.path": True,
    }
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(after))
    assert load_config(RunConfig, copy) == after


def test_a_resolved_configuration_reads_back_equal(file, tmp_path):
    run = load_config(RunConfig, file, ["algorithm.preset=grpo", "parallel={pipeline: 2, pipeline_layout: Et*3|tL}"])
    assert run.parallel.pipeline_layout == (3, 1)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(run))
    assert load_config(RunConfig, copy) == run


def test_the_papers_run_has_the_papers_numbers():
    run = load_config(RunConfig, CONFIGS / "qwen2.5-32b-dapo-128gpu.yaml")
    assert (run.batch.groups_per_step, run.batch.group_size, run.generation_groups) == (512, 16, 1536)
    assert run.batch.updates_per_step == 16
    assert run.batch.mini_batch_groups * run.batch.group_size == 512
    assert run.algorithm.policy_loss == ClipLoss(low=0.2, high=0.28, dual_clip=10.0)
    assert run.rollout.max_response_tokens - run.reward.overlong_cache_tokens == 16384
    assert (run.optimizer.learning_rate, run.optimizer.weight_decay, run.optimizer.warmup_steps) == (1e-6, 0.1, 20)
    assert (run.evaluation.samples_per_prompt, run.evaluation.top_p) == (32, 0.7)
    assert run.algorithm.kl.coefficient == 0
    engines = run.rollout.fleet.min_engines * run.rollout.fleet.engine_tensor
    assert run.parallel.world_size + engines == 128
    text = "\n".join(describe_run(run, 1))
    assert "64 processes = tensor 4 x pipeline 2 x context 4 x data 2" in text
    assert "updates per step: 16" in text
    assert "32,763.9 M parameters" in text


def test_a_world_that_does_not_divide_is_refused_with_sizes_that_do(file):
    run = load_config(RunConfig, file, ["parallel.tensor=2", "parallel.pipeline=2"])
    with pytest.raises(InputError, match=r"world size 6 is not a multiple.*= 4; start 4 or 8 processes"):
        describe_run(run, 6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.dtype=fp32"], "needs model.dtype=bf16"),
        (["model.layer_implementation=local"], "needs Transformer Engine's layers"),
    ],
)
def test_fp8_is_refused_around_a_model_that_cannot_use_it(file, overrides, message):
    load_config(RunConfig, file, ["compute.fp8.scaling=blockwise"])
    with pytest.raises(InputError, match=message):
        load_config(RunConfig, file, ["compute.fp8.scaling=blockwise", *overrides])


def test_weights_in_fp8_are_not_lent(file):
    lends = "rollout={placement: colocated, offload_trainer: true, fleet: {urls: [http://a:1]}}"
    assert load_config(RunConfig, file, [lends]).rollout.offload_trainer
    with pytest.raises(InputError, match=r"cannot lend weights that are kept in FP8; set compute\.fp8\.params=false"):
        load_config(RunConfig, file, [lends, "compute.fp8={scaling: blockwise, params: true}"])


def test_evaluations_beside_training_need_engines_to_spare(file):
    wanted = ["evaluation={beside_training: true, engines: 2}"]
    fleet = "rollout={placement: PLACEMENT, fleet: {urls: [http://a:1, http://b:1, http://c:1], min_engines: 2}}"
    cases = {
        (): "rollout.placement=embedded has none to spare; set rollout.placement=fleet",
        (fleet.replace("PLACEMENT", "colocated"),): "rollout.placement=colocated has none to spare",
        (fleet.replace("PLACEMENT", "fleet"),): "evaluation.engines=2 for evaluations, but rollout.fleet.urls names 3",
    }
    for given, message in cases.items():
        with pytest.raises(InputError, match=message):
            load_config(RunConfig, file, [*wanted, *given])
    enough = [fleet.replace("PLACEMENT", "fleet"), "rollout.fleet.min_engines=1"]
    assert load_config(RunConfig, file, [*wanted, *enough]).evaluation.beside_training


def test_an_own_reward_is_not_shaped_by_length_unless_asked(file):
    own = load_config(RunConfig, file, ["reward.function=a.b:c"])
    assert [part.kind for part in own.reward.parts] == ["function"]
    assert load_config(
        RunConfig, file, ["reward={function: a.b:c, overlong_punishment: true}"]
    ).reward.overlong_punishment
    (file.parent / "config.yaml").write_text(dump_config(own))
    assert load_config(RunConfig, file.parent / "config.yaml") == own
