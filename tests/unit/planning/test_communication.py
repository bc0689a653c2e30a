from dataclasses import replace

import pytest

from dapo_mega.algorithms.advantages import GaeAdvantage
from dapo_mega.config import RunConfig
from dapo_mega.planning import step_time as times
from dapo_mega.planning.communication import step_traffic
from dapo_mega.planning.memory import EngineLayout, cache_bytes_per_token
from dapo_mega.planning.parameters import num_parameters, stage_bytes
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.step_time import Machine, layer_flops, step_time
from dapo_mega.planning.workload import Workload

from .models import dense, hybrid, latent, mixture, shared

# 8 groups x 2 responses of 6 + 10 tokens: 256 tokens a step in two updates.
RUN = {
    "output_dir": "o",
    "num_steps": 1,
    "model": {"path": "m", "dtype": "bf16"},
    "data": {"train": {"path": "d"}, "max_prompt_tokens": 12},
    "rollout": {"max_response_tokens": 20},
    "reward": {"overlong_punishment": False},
    "batch": {"groups_per_step": 8, "group_size": 2, "mini_batch_groups": 4, "tokens_per_microbatch": 32},
}
HIDDEN = 256 * 8 * 2
"""Bytes of the hidden states of a step's tokens between two layers."""


def workload(arch=None, world_size=1, compute=None, **parallel):
    run = RunConfig.model_validate({**RUN, "parallel": parallel, "compute": compute or {}})
    return Workload(run, RankLayout(arch or dense(), run.parallel, world_size), 6, 10)


def traffic(arch=None, kind="local", **settings):
    work = workload(arch, **settings)
    return {entry.name: entry.num_bytes for entry in step_traffic(work, kind, num_parameters(work.placement.arch))}


def test_one_process_sends_nothing():
    assert traffic() == {}


def test_micro_batches_follow_from_tokens_and_budget():
    # 8 responses of 16 tokens per update, two in 32 tokens.
    assert workload().micro_batches(16) == 4
    assert workload(world_size=2).micro_batches(16) == 2
    assert workload(world_size=2, pipeline=2, virtual_pipeline=2).micro_batches(16) == 4
    # Of 17 tokens only one fits.
    assert workload().micro_batches(17) == 8
    assert workload(world_size=2).micro_batch_tokens == 32


def test_tensor_parallelism_reduces_twice_a_layer_and_once_at_either_end():
    # Scoring, forward and backward pass; a ring all-reduce of two processes sends each byte once.
    sent = 3 * (2 * 4 + 1) * HIDDEN
    assert traffic(world_size=2, tensor=2)["TP all-reduce"] == sent
    # Linear layers gather their inputs once more for the weights' gradients.
    extra = 2 * 4 * HIDDEN / 2
    assert traffic(world_size=2, tensor=2, sequence=True)["TP + SP gather and scatter"] == sent + extra


def test_of_stages_the_one_that_reduces_the_most_counts():
    # Four layers and the output layer; the embedding is alone on the first stage.
    sent = traffic(world_size=4, tensor=2, pipeline=2, pipeline_layout=[0, 4])
    assert sent["TP all-reduce"] == (3 * 2 * 4 + 1) * HIDDEN


def test_adapters_reduce_what_is_between_their_matrices():
    config = RunConfig.model_validate({**RUN, "lora": {"rank": 4, "targets": ["down_proj"]}, "parallel": {"tensor": 2}})
    work = Workload(config, RankLayout(dense(), config.parallel, 2), 6, 10)
    sent = {entry.name: entry.num_bytes for entry in step_traffic(work, "local", 1)}["TP all-reduce"]
    # Half a hidden state in the forward passes of four layers: scoring and updates.
    assert sent == traffic(world_size=2, tensor=2)["TP all-reduce"] + 2 * 4 * HIDDEN / 2


def test_two_stages_with_tied_embeddings_sum_their_gradients():
    name, tied = "gradient all-reduce of tied embeddings", dense(tied_embeddings=True)
    assert name not in traffic(tied)
    assert name not in traffic(world_size=2, pipeline=2)
    # 20 rows of 8 in float32, twice a step.
    assert traffic(tied, world_size=2, pipeline=2)[name] == 2 * 4 * 160


def test_shared_key_heads_gather_a_projection_and_scatter_its_gradient():
    name = "TP gather and scatter of shared keys"
    assert name not in traffic(world_size=2, tensor=2)
    # Four processes and two key heads: of 4 + 2 x 2 heads of size 2 each has a quarter; four layers, three passes.
    product = 256 * 8 * 2 * 2
    assert traffic(world_size=4, tensor=4)[name] == 3 * 4 * product * 3 / 4
    assert traffic(world_size=4, tensor=4, compute={"recompute": "full"})[name] == 4 * 4 * product * 3 / 4


def test_full_recompute_repeats_the_forward_pass():
    again = traffic(world_size=2, tensor=2, compute={"recompute": "full"})["TP all-reduce"]
    assert again == (4 * 2 * 4 + 3) * HIDDEN


def test_data_parallelism_scatters_and_gathers_once_an_update():
    sent = traffic(world_size=4)
    padded = sent["gradient reduce-scatter (DP x CP)"] / (2 * 3 / 4 * 4)
    assert num_parameters(dense()) <= padded <= num_parameters(dense()) * 1.3
    assert sent["parameter all-gather (DP x CP)"] == sent["gradient reduce-scatter (DP x CP)"] / 2


def test_context_parallelism_passes_keys_and_values():
    # 2 key heads of size 2, keys and values in bf16, half of the tokens, to one other process.
    once = 4 * 128 * 2 * 2 * 2 * 2
    assert traffic(world_size=2, context=2)["CP keys and values"] == 3 * once
    assert traffic(world_size=2, context=2, kind="transformer_engine")["CP keys and values"] == 4 * once


def test_the_optimizers_step_gathers_spread_experts_weights_again():
    once, twice = (
        traffic(
            mixture(), world_size=4, expert=2, compute={"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
        )
        for overlap in (True, False)
    )
    name = "parameter all-gather (DP x CP)"
    assert twice[name] == 2 * once[name]


def test_experts_get_their_rows_and_send_them_back():
    # Half of the tokens, two rows each, half of which go to the other process.
    assert traffic(mixture(), world_size=2, expert=2)["EP all-to-all"] == 3 * 4 * 2 * (HIDDEN / 2 * 2) / 2


def test_a_stage_sends_its_output_forward_and_its_gradient_backward():
    # Scoring and updates; the first of two stages has nobody to send gradients to, but for its second chunk.
    assert traffic(world_size=2, pipeline=2)["PP sends"] == 2 * HIDDEN
    assert traffic(world_size=2, pipeline=2, virtual_pipeline=2)["PP sends"] == (2 * 2 + 1) * HIDDEN
    assert traffic(world_size=4, pipeline=4)["PP sends"] == 3 * HIDDEN


@pytest.mark.parametrize(
    ("parallel", "world_size", "num_engines", "num_bytes"),
    [
        ({}, 8, 1, 2**30),  # The engine gets everything,
        ({}, 8, 8, 2**30),  # as each of eight does from a replica of its own.
        ({}, 8, 9, 2 * 2**30),
        ({}, 1, 9, 9 * 2**30),
        ({"pipeline": 2, "context": 2}, 8, 8, 2**30),  # Four engines for each replica of four processes.
        ({"pipeline": 2, "context": 2}, 8, 10, 5 * 2**28),
        # A process has a quarter of what it sends.
        ({"tensor": 4, "sequence": True}, 4, 4, 2**28 * (4 + 0.75)),
    ],
)
def test_all_processes_send_to_the_engines(parallel, world_size, num_engines, num_bytes):
    rollout = {**RUN["rollout"], "placement": "fleet", "fleet": {"rendezvous": "h:1"}}
    config = RunConfig.model_validate({**RUN, "rollout": rollout, "parallel": parallel})
    work = Workload(config, RankLayout(dense(), config.parallel, world_size), 8, 10)
    traffic = step_traffic(work, "local", num_parameters=2**29, num_engines=num_engines)
    assert sum(entry.num_bytes for entry in traffic if entry.is_weight_sync) == num_bytes


def test_adapters_alone_are_what_is_sent():
    rollout = {**RUN["rollout"], "placement": "fleet", "fleet": {"rendezvous": "h:1"}}
    lora = {"rank": 4, "send": "adapters", "targets": ["down_proj"]}
    config = RunConfig.model_validate({**RUN, "rollout": rollout, "lora": lora})
    work = Workload(config, RankLayout(arch := dense(), config.parallel, 1), 6, 10)
    (sent,) = [e for e in step_traffic(work, "local", num_parameters=10**9, num_engines=1) if e.is_weight_sync]
    assert sent.num_bytes == 2 * arch.num_layers * 4 * (arch.hidden_size + arch.ffn_hidden_size)


def test_a_stages_leader_sends_its_weights_to_a_disk_but_not_through_memory():
    sent = {}
    for transport in ("distributed", "disk", "tensor"):
        rollout = {**RUN["rollout"], "placement": "fleet", "fleet": {"rendezvous": "h:1"}}
        config = RunConfig.model_validate(
            {**RUN, "rollout": rollout, "parallel": {"pipeline": 2}, "weight_sync": {"transport": transport}}
        )
        work = Workload(config, RankLayout(dense(), config.parallel, 2), 6, 10)
        traffic = step_traffic(work, "local", num_parameters=1000, num_engines=3)
        sent[transport] = sum(entry.num_bytes for entry in traffic if entry.name.startswith("weight sync"))
    # Half of 1,000 numbers in bf16; a disk takes them once, engines on the same machine read memory.
    # Three engines of a replica of two processes: the third one gets everything after one that has a bucket.
    assert sent == {"distributed": 2000 + 1000, "disk": 1000, "tensor": 0}


def test_a_layers_operations_are_two_per_weight_and_token(monkeypatch):
    placement = workload().placement
    linear, attention = layer_flops(placement, 100)
    assert linear == 2 * (128 + 64 + 384)
    # 50 keys on average, 4 heads of size 2, a product and a sum for scores and for values.
    assert attention == 50 * 8 * 2 * 2
    mixed, _ = layer_flops(workload(mixture()).placement, 100)
    assert mixed == pytest.approx(2 * (128 + 64 + 32 + 288))
    # One layer in four with an MLP, the others with a router, two experts, a shared one and its gate.
    of_both_kinds, _ = layer_flops(workload(shared()).placement, 100)
    assert of_both_kinds == pytest.approx(2 * (128 + 64 + (384 + 3 * (32 + 288 + 240 + 8)) / 4))
    for pads in (False, True):
        monkeypatch.setattr(times, "megatron_pads_values", lambda pads=pads: pads)
        projected, attention = layer_flops(workload(latent()).placement, 100)
        assert projected == pytest.approx(2 * (48 + 112 + 48 + 120 + 128 + 32 + 288))
        # Heads of 5 for scores and of 4 for values, or padded to 5.
        assert attention == 50 * 4 * (5 + 4 + pads) * 2
    # Three layers in four without attention: the state's 4 heads of 2 x 3 are met three times.
    mostly_linear, attention = layer_flops(workload(hybrid()).placement, 100)
    rule = 4 * 2 * 3 * 3 * 2
    assert mostly_linear == pytest.approx(2 * 384 + (2 * (192 + 64) + 3 * (2 * (320 + 96) + rule)) / 4)
    assert attention == 50 * 8 * 2 * 2 / 4


def test_an_engine_keeps_the_latent_vectors_of_latent_attention():
    engine = EngineLayout(tensor=2, num_gpus=2, dtype="bf16", max_rows=1)
    assert cache_bytes_per_token(workload(latent()).placement, engine) == 4 * (4 + 2) * 2
    # Each of two GPUs has one of two key heads of size 2.
    assert cache_bytes_per_token(workload().placement, engine) == 4 * 2 * 2 * 2


def with_critic(work):
    algorithm = work.config.algorithm.model_copy(update={"advantage": GaeAdvantage()})
    return replace(work, config=work.config.model_copy(update={"algorithm": algorithm}))


def test_a_critic_scores_and_learns_like_the_policy_without_an_output_layer():
    work = workload(world_size=2, tensor=2)
    alone, both = (
        {entry.name: entry.num_bytes for entry in step_traffic(w, "local", 1)} for w in (work, with_critic(work))
    )
    # Scoring, forward and backward pass of both; the output layer's backward pass of the policy only.
    assert both["TP all-reduce"] == alone["TP all-reduce"] + (3 * 2 * 4 + 2) * HIDDEN
    work = workload(world_size=2)
    alone, both = (
        {entry.name: entry.num_bytes for entry in step_traffic(w, "local", 1)} for w in (work, with_critic(work))
    )
    name = "gradient reduce-scatter (DP x CP)"
    buffers = [
        stage_bytes(p, 0, work.config.model, work.config.compute) for p in (work.placement, work.placement.of_critic)
    ]
    assert both[name] / alone[name] == sum(held.gradients for held in buffers) / buffers[0].gradients


def test_a_critics_time_is_the_policys_without_the_output_layer():
    # So slow that its launches do not count, with a memory that takes no time.
    machine = Machine(1e6, 1.0, 1e9, 1e9, 8, 1e9, 1e30, 1.0)
    work = workload()
    alone, both = (step_time(w, machine, "local", 1) for w in (work, with_critic(work)))
    tokens, (linear, attention) = 256, layer_flops(work.placement, 16)
    layers = tokens * 4 * (linear + attention) / 1e6
    assert both.scoring == pytest.approx(alone.scoring + layers)
    assert both.updates == pytest.approx(alone.updates + 3 * layers)
