"""The command line, and the layouts that it proposes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dapo_mega.commands import plan
from dapo_mega.config import RunConfig, load_config
from dapo_mega.errors import InputError
from dapo_mega.models.architecture import Experts
from dapo_mega.models.families import read_architecture
from dapo_mega.planning.memory import GIB, trainer_memory
from dapo_mega.planning.parameters import num_parameters
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.step_time import Machine, step_time
from dapo_mega.planning.workload import Workload

REPOSITORY = Path(__file__).resolve().parents[3]
TOOL = REPOSITORY / "tools" / "plan_run.py"
CONFIG = str(REPOSITORY / "configs" / "qwen2.5-32b-dapo-128gpu.yaml")
ARCHITECTURE = f"model.architecture={REPOSITORY / 'configs' / 'architectures' / 'qwen2.5-32b.json'}"
# A layout of four stages, with engines of the size that a plan chooses.
LAYOUT = [
    "parallel={world_size: 128, tensor: 8, pipeline: 4, virtual_pipeline: 1, context: 1}",
    "rollout.fleet.engine_tensor=null",
]  # fmt: skip
OWN_ENGINES = ["--engine-gpus", "32", "--engine-tensor", "4"]


@pytest.fixture(scope="module")
def tool():
    return plan


def lines(tool, capsys, *arguments):
    tool.main([CONFIG, ARCHITECTURE, *LAYOUT, *arguments])
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def small(tmp_path):
    """A run of a model small enough for its numbers to be seen through."""
    (tmp_path / "model.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "num_hidden_layers": 4,
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 4096,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-6,
            }
        )
    )
    run = {
        "output_dir": "o",
        "num_steps": 1,
        "model": {"path": "absent", "architecture": str(tmp_path / "model.json")},
        "data": {"train": {"path": "d"}, "max_prompt_tokens": 256},
        "rollout": {"max_response_tokens": 768, "max_batch_rows": 8},
        "reward": {"overlong_punishment": False},
        "batch": {"groups_per_step": 16, "group_size": 4, "mini_batch_groups": 8, "tokens_per_microbatch": 2048},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return str(tmp_path / "run.yaml")


EMBEDDED = ["rollout.placement=embedded", "rollout.fleet.rendezvous=null"]


def number(pattern, text):
    return float(re.search(pattern, text)[1].replace(",", ""))


def test_the_papers_run_fits_as_it_is_shipped_with_its_engines(tool, capsys):
    tool.main([CONFIG, ARCHITECTURE])
    text = capsys.readouterr().out
    assert "FIT" not in text
    assert number(r"  fits: ([\d.]+) GiB on stage 0", text) < 75
    assert (
        "rollout engine: 64 GPUs of their own, 8 engine(s) (rollout.fleet, --engine-gpus plans others), tensor 8"
        in text
    )
    assert number(r"  engines fit: ([\d.]+) GiB", text) < 72
    assert number(r"with (\d+) engines on", text) > 8
    # Neither side waits for the other for more than half of the step.
    training = number(r"step time without generation: ([\d.,]+) s", text)
    both = number(r"with one round of generation ([\d.,]+) s", text)
    assert 1.5 < both / training < 3
    head = lines(tool, capsys, "--propose", "--gpus", "128")[0]
    assert number(r"(\d+) of them fit", head) > 0


def test_separate_engines_take_only_buckets_of_the_trainers_memory(tool, capsys):
    here, embedded = lines(tool, capsys), lines(tool, capsys, *EMBEDDED)
    columns, of_embedded = (
        next(line for line in text if "parameters   gradients" in line) for text in (here, embedded)
    )
    assert columns.split() == of_embedded.replace("rollout engine", "").replace("KV cache", "").split()
    # Two buckets of the largest tensor, the embedding.
    assert number(r"([\d.]+) +[\d.]+$", here[here.index(columns) + 1]) == round(2 * 152064 * 5120 * 2 / GIB, 2)


def test_a_teacher_in_a_folder_takes_what_a_reference_takes_and_one_on_a_server_nothing(tool, capsys):
    def planned(override):
        text = lines(tool, capsys, override)
        at = next(i for i, line in enumerate(text) if "parameters   gradients" in line)
        step = next(line for line in text if "step time without generation" in line)
        return [line.split()[1:] for line in text[at + 1 : at + 5]], step

    reference = planned("algorithm.kl.coefficient=0.1")
    teacher = planned("distillation={teachers: {default: {path: absent}}, reward_weight: 1}")
    assert teacher == reference
    plain, served = (
        planned("seed=0"),
        planned("distillation={teachers: {default: {urls: [http://h:1]}}, reward_weight: 1}"),
    )
    assert served == plain != teacher


def test_an_embedded_engine_that_does_not_fit_is_named_with_advice(tool, capsys):
    text = lines(tool, capsys, *EMBEDDED)
    verdict = next(line for line in text if "FIT" in line)
    assert "on stage 0" in verdict
    assert "lower rollout.max_batch_rows" in verdict
    assert "rollout.placement=fleet or colocated" in verdict
    assert any("rollout engine: embedded" in line for line in text)


def test_engines_on_the_trainers_gpus_take_turns_with_training(tool, capsys):
    options = ["rollout.placement=colocated", "--engine-tensor", "4"]
    text = lines(tool, capsys, *options)
    at = next(i for i, line in enumerate(text) if "engine asleep" in line)
    for line in text[at + 1 : at + 5]:
        _, parameters, gradients, optimizer, asleep, activations, awake, total = map(float, line.split())
        resident = parameters + gradients + optimizer + asleep
        assert total == pytest.approx(resident + max(activations, awake), abs=0.03)
    assert any("32 engine(s) on the trainer's GPUs" in line for line in text)
    shared = next(line for line in text if "a GPU is shared in turns" in line)
    # 80 GiB less the reserve and what stays on the fullest GPU.
    assert number(r"--memory-fraction ([\d.]+) or less", shared) == 0.80
    assert any("weight_sync.transport=disk" in line for line in text), "128 GPUs are on several machines"
    small = lines(tool, capsys, *options, "--gpu-memory-gib", "40")
    assert any("DOES NOT FIT" in line for line in small)


def test_what_a_trainer_lends_is_left_to_engines(tool, capsys):
    options = ["rollout.placement=colocated", "--engine-tensor", "4"]
    kept, lent = lines(tool, capsys, *options), lines(tool, capsys, *options, "rollout.offload_trainer=true")
    at = next(i for i, line in enumerate(lent) if "weights to engines" in line)
    assert "engine awake, at least" in lent[at]
    for line in lent[at + 1 : at + 5]:
        _, parameters, gradients, optimizer, asleep, activations, sending, awake, total = map(float, line.split())
        training = parameters + gradients + optimizer + asleep + activations
        assert total == pytest.approx(max(training, sending, awake), abs=0.03)
        assert awake < sending - parameters
    fractions = [
        number(r"--memory-fraction ([\d.]+) or less", next(line for line in text if "a GPU is shared in turns" in line))
        for text in (kept, lent)
    ]
    # 80 GiB less the reserve, and engines asleep.
    left = number(r"([\d.]+) GiB are left to", "\n".join(lent)) + 2
    assert fractions[0] < fractions[1] == pytest.approx(1 - left / 80, abs=0.01)


def test_a_critic_is_planned_beside_the_policy(tool, capsys, small):
    def plan(*arguments):
        tool.main([small, *arguments])
        return capsys.readouterr().out.splitlines()

    def parts(text):
        at = next(i for i, line in enumerate(text) if line.startswith("  stage"))
        names = re.split(r"\s{3,}", text[at].strip())[1:]
        return dict(zip(names, map(float, text[at + 1].split()[1:]), strict=True))

    big = ["model.dtype=fp32", "rollout.placement=fleet", "rollout.fleet.rendezvous=h:1"]
    alone, both = plan(*big), plan(*big, "algorithm.advantage=gae", "critic.pretraining_steps=0")
    before, after = parts(alone), parts(both)
    kept = ("parameters", "gradients", "optimizer")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    # Float32: weights, gradients and two moments of the layers and one embedding of two.
    layers = num_parameters(load_architecture_of(small)) - 4096 * 256
    assert after["critic"] == round(16 * layers / GIB, 2)
    assert after["total"] == pytest.approx(before["total"] + after["critic"], abs=0.011)
    assert 0 < after["critic's activations"] < after["activations and working set"]
    assert any(line.startswith("critic: starts from model.path; learning rate 5e-06 after 50") for line in both)
    seconds = [number(r"without generation: ([\d.]+) s", "\n".join(text)) for text in (alone, both)]
    assert 1.3 < seconds[1] / seconds[0] < 2


def test_a_critic_of_other_sizes_is_planned_with_its_own(small, tmp_path):
    critic, config = tmp_path / "critic", json.loads((tmp_path / "model.json").read_text())
    critic.mkdir()
    (critic / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    arch = load_architecture_of(small)
    mixture = replace(arch, experts=Experts(number=4, per_token=2, ffn_hidden_size=512, normalised=True))
    overrides = ["algorithm.advantage=gae", "parallel.expert=2", "model.dtype=fp32"]
    machine = Machine(1e6, 1.0, 1e9, 1e9, 8, 1e9, 1e30, 1.0)

    def planned(*more):
        config = load_config(RunConfig, Path(small), [*overrides, *more])
        work = Workload(config, RankLayout(mixture, config.parallel, 2), 128, 384)
        return work.critic, trainer_memory(work, 0)["critic"], step_time(work, machine, "local", 1)

    (absent, of_mixture, longer), (found, held, shorter) = planned(), planned(f"critic.path={critic}")
    assert absent.arch == mixture.with_value_head()
    assert found.arch == replace(arch, num_layers=2).with_value_head()
    assert (absent.parallel.expert, found.parallel.expert) == (2, 1)
    # Float32: weights and gradients, and two moments shared by two processes.
    assert held == pytest.approx(12 * num_parameters(found.arch), rel=1e-3)
    assert held < of_mixture
    assert shorter.scoring < longer.scoring
    assert shorter.updates < longer.updates


def test_a_critic_must_fit_the_policy(tool, capsys, small, tmp_path):
    critic = tmp_path / "critic"
    options = [small, "algorithm.advantage=gae", f"critic.path={critic}", "num_steps=2"]
    tool.main(options)
    assert f"note: critic.path={critic} is not on this machine" in capsys.readouterr().out
    critic.mkdir()
    config = json.loads((tmp_path / "model.json").read_text())
    (critic / "config.json").write_text(json.dumps({**config, "vocab_size": 4095}))
    with pytest.raises(InputError, match=r"a vocabulary of 4095 tokens, and the policy one of 4096"):
        tool.main(options)
    (critic / "critic_config.json").write_text(json.dumps(config))  # A run's checkpoint: config.json is its policy's.
    tool.main(options)
    (critic / "critic_config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(InputError, match=r"parallel\.pipeline=4 .* are more than the model's num_hidden_layers=3"):
        tool.main([*options, "parallel.pipeline=4", "parallel.world_size=4"])


def load_architecture_of(file):
    return read_architecture(Path(file).with_name("model.json"))[1]


def test_engines_that_hold_no_longest_response_do_not_fit(tool, capsys):
    text = lines(tool, capsys, "--engine-tensor", "1", "--gpu-memory-gib", "70")
    assert any("ENGINES DO NOT FIT" in line and "--engine-tensor" in line for line in text)
    assert any("  fits: " in line for line in text), "the trainer does"


def test_fp8_engines_keep_embedding_and_output_layer_in_bf16(tool, capsys):
    text = next(line for line in lines(tool, capsys, "rollout.dtype=fp8") if line.startswith("rollout engine"))
    outer = 2 * 152064 * 5120
    assert number(r"per GPU ([\d.]+) GiB", text) == pytest.approx((32763.9e6 + outer) / GIB, abs=0.06)
    assert "KV cache 256 KiB" in text, "one GPU holds all heads, in bf16"


def test_with_more_engines_and_recompute_the_papers_run_fits(tool, capsys):
    text = lines(tool, capsys, *OWN_ENGINES, "compute.recompute=full")
    assert any("  fits: " in line for line in text)
    assert any("rollout engine: 32 GPUs of their own, 8 engine(s) (--engine-gpus), tensor 4" in line for line in text)
    assert any("checked against what Transformer Engine's Python keeps" in line for line in text)
    local = lines(tool, capsys, *OWN_ENGINES, "model.layer_implementation=local")
    assert any("checked against real allocations on the CPU" in line for line in local)


@pytest.mark.parametrize(
    "in_the_file",
    [
        [],
        ["parallel={tensor: 2, pipeline: 2, sequence: true, world_size: 32}"],
        ["compute={recompute: selective, recompute_modules: [layernorm]}", "parallel={context: 4, world_size: 4}"],
    ],
)
def test_a_proposal_is_sorted_fits_and_copied_gives_the_same_figures(tool, capsys, small, in_the_file):
    tool.main([small, *in_the_file, "--gpus", "4", "--propose"])
    head, *proposals = capsys.readouterr().out.splitlines()
    assert head.startswith("layouts of 4 GPUs: ")
    seconds = [float(line.split(" s ")[0].replace(",", "")) for line in proposals]
    assert seconds == sorted(seconds)
    assert min(seconds) > 0
    assert len(proposals) == 10
    for line in proposals:
        overrides = [pair for pair in line.split(" (data")[0].split() if "=" in pair]
        tool.main([small, *in_the_file, *overrides])
        plan = capsys.readouterr().out
        assert "parallel layout: 4 processes" in plan
        assert f"  fits: {re.search(r'[0-9.]+ GiB on stage [0-9]', line)[0]}" in plan
        assert f"step time without generation: {line.split(' s ')[0].strip()} s" in plan


def test_only_layouts_without_contradictions_are_proposed(tool, capsys, small):
    # Four heads, two key heads and four layers: tensor 1, 2, 4; pipeline 1, 2, 4; context the rest.
    tool.main([small, "--gpus", "8", "--propose", "--gpu-memory-gib", "80"])
    head = capsys.readouterr().out.splitlines()[0]
    # (tensor, pipeline): any divisor of what remains as context; pipeline 2 in 1 or 2 chunks a stage.
    tensor_1 = 4 + 2 * 3 + 2
    tensor_2 = 3 + 2 * 2 + 1
    tensor_4 = 2 + 2
    assert f"{tensor_1 + tensor_2 + tensor_4} are valid" in head
    tool.main([small, "parallel={pipeline: 2, pipeline_layout: [1, 3]}", "--gpus", "2", "--propose"])
    assert "parallel.pipeline=1 parallel.pipeline_layout=null" in capsys.readouterr().out


def test_a_division_of_gpus_copied_gives_the_same_figures(tool, capsys, small):
    tool.main([small, "--total-gpus", "8", "--rounds", "2"])
    head, *found = capsys.readouterr().out.splitlines()
    assert head.startswith("divisions of 8 GPUs between trainer and engines: ")
    shown = [line for line in found if "steps/hour" in line]
    rates = [float(line.split(" steps/hour")[0]) for line in shown]
    assert rates == sorted(rates, reverse=True)
    assert any("in turns on all" in line for line in shown)
    assert any("  trainer " in line for line in shown)
    for line, overrides in zip(shown, found[1::2], strict=False):
        count, tensor = (int(number(pattern, line)) for pattern in (r"(\d+) engine\(s\)", r"of tensor (\d+)"))
        engines = ["--engine-tensor", str(tensor)]
        if split := re.search(r"trainer (\d+) \+ engines (\d+)", line):
            assert int(split[1]) + int(split[2]) == 8
            assert int(split[2]) == count * tensor
            engines += ["--engine-gpus", split[2]]
        tool.main([small, *overrides.split(), *engines])
        plan = capsys.readouterr().out
        assert f"parallel layout: {split[1] if split else 8} processes" in plan
        assert re.search(r"[0-9.]+ GiB on stage [0-9]", line)[0] in plan
        training = number(r"step time without generation: ([\d.,]+) s", plan)
        both = number(r"with one round of generation ([\d.,]+) s", plan)
        assert number(r": ([\d.,]+) s = ", line) == pytest.approx(training + 2 * (both - training), rel=0.05)
    tool.main([small, "--total-gpus", "8", "--gpu-memory-gib", "5.01"])
    assert "0 fit" in capsys.readouterr().out


def test_gpus_of_several_machines_are_divided_by_machines(tool, capsys, small):
    tool.main([small, "--total-gpus", "16", "--gpus-per-node", "4"])
    text = capsys.readouterr().out
    assert {int(count) % 4 for count in re.findall(r"trainer (\d+) \+", text)} == {0}
    # The handles of a colocated engine's weights do not leave a machine.
    assert re.search(r"rollout\.placement=colocated .*weight_sync\.transport=disk", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--total-gpus", "100"], "--total-gpus=100 is not a number of whole machines of 8 GPUs"),
        (["--engine-failures-per-hour", "1"], "--engine-failures-per-hour is of --simulate and --scaling; add one"),
        (["--total-gpus", "128", "--gpus", "64"], "proposes layouts itself; leave --gpus out"),
        (["parallel.tensor=3", "parallel.world_size=96"], "choose one of [1, 2, 4, 8]"),
        (["--gpus", "100"], "not a multiple of tensor 8 x pipeline 4 = 32"),
        (["--flops-share", "0"], "--flops-share=0 must be larger than 0"),
        (["--memory-share", "1.1"], "--memory-share=1.1 is a share; give at most 1"),
        (["--engine-gpus", "6", "--engine-tensor", "4"], "must be a multiple of --engine-tensor=4"),
        (["--engine-gpus", "0"], "--engine-gpus=0 must be larger than 0"),
        ([*EMBEDDED, "--engine-gpus", "8"], "and rollout.placement=embedded; add rollout.placement=fleet"),
        (["rollout.placement=colocated", "--engine-gpus", "8"], "rollout.placement=colocated uses the trainer's"),
        (["--mean-response-tokens", "30000"], "larger than the configuration's longest response, 20480"),
        (["model.architecture=null"], "give model.architecture"),
        (["batch.tokens_per_microbatch=9"], "set it to at least 22528"),
    ],
)
def test_a_mistake_is_one_line(tool, capsys, arguments, message):
    with pytest.raises(InputError) as caught:
        lines(tool, capsys, *arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_arithmetic_loads_neither_torch_nor_megatron():
    code = (
        "import sys, dapo_mega.planning.estimate, dapo_mega.planning.proposals, dapo_mega.planning.report\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron', 'transformers')]\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
