"""Estimates the time of a rollout step: floating-point operations / rate, bytes / bandwidth, and what small models are
bound by: launches, latencies and the step's own work. No figure is beyond the rates of the machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dapo_mega.config import ParallelConfig
from dapo_mega.planning.activations import LayerKind, megatron_pads_values
from dapo_mega.planning.communication import Traffic, step_traffic
from dapo_mega.planning.memory import EngineLayout, cache_bytes_per_token, engine_weight_bytes
from dapo_mega.planning.parameters import DTYPE_BYTES, attention_matrices, delta_matrices, stage_bytes
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.workload import Workload

if TYPE_CHECKING:
    from dapo_mega.models import Architecture

# Seconds that a layer takes however small it is: in a decoding step with CUDA graphs, and in a forward pass that
# launches its kernels one by one. Those of vLLM and transformers on one A100, by what Qwen2.5-0.5B and 7B take for a
# token (github.com/QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst).
ENGINE_LAYER_S = 110e-6
EAGER_LAYER_S = 800e-6
# The least that a token of a response takes on the engine's CPU: assumed. With it the plan says half of the 9.1 s that
# 16 H200 took for 5,760 responses of Qwen3-0.6B (verl's figure in github.com/THUDM/slime/issues/385).
RESPONSE_S = 15e-6
# Rewards, filter, packing and hand-over of a step, measured on one H100 (tools/benchmarks/README.md).
STEP_S = 0.15


@dataclass(frozen=True)
class Calibration:
    """How many times as long as planned a real run's parts took, and seconds of each of its steps besides them."""

    scoring: float = 1.0
    updates: float = 1.0
    weights: float = 1.0
    decoding_base: float = 1.0
    decoding_per_response: float = 1.0
    besides_s: float = STEP_S


@dataclass(frozen=True)
class Machine:
    """The assumed speeds of a GPU. Rates are in units per second; bandwidths are per GPU and direction; a collective
    takes `intra_node_s` or `inter_node_s` however little it sends."""

    flops: float
    flops_share: float
    intra_node_bytes: float
    inter_node_bytes: float
    gpus_per_node: int
    memory_bytes: float
    memory_rate: float
    memory_rate_share: float
    calibration: Calibration = Calibration()
    intra_node_s: float = 20e-6
    inter_node_s: float = 50e-6

    @property
    def reached_flops(self) -> float:
        """Operations per second that matrix products and attention reach."""
        return self.flops * self.flops_share

    @property
    def reached_memory_rate(self) -> float:
        """Bytes per second that kernels reach which compute little."""
        return self.memory_rate * self.memory_rate_share

    def seconds(self, traffic: Traffic) -> float:
        """Time of the collectives; a group that fits into a node stays within it."""
        is_inside = traffic.span <= self.gpus_per_node
        rate, latency_s = (
            (self.intra_node_bytes, self.intra_node_s) if is_inside else (self.inter_node_bytes, self.inter_node_s)
        )
        return traffic.num_bytes / rate + traffic.num_calls * latency_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step's parts, generation left out; a critic's scoring and updates are among the policy's.
    `weights` are sent to the engines, `communication` is within the trainer, `besides` is what no GPU computes."""

    scoring: float
    updates: float
    bubble: float
    communication: float
    weights: float
    besides: float = 0.0

    @property
    def total(self) -> float:
        return self.training + self.weights

    @property
    def training(self) -> float:
        """Everything but the weights for the engines."""
        return self.scoring + self.updates + self.bubble + self.communication + self.besides


def step_time(
    workload: Workload, machine: Machine, kind: LayerKind, num_parameters: int, num_engines: int = 1
) -> StepTime:
    """The slowest stage's work, the pipeline's bubble, and the communication that nothing hides."""
    config, placement, measured = workload.config, workload.placement, machine.calibration
    num_micro_batches = workload.micro_batches(workload.mean_length)
    passes = 1 + config.algorithm.uses_reference
    forward = _slowest_stage(workload, machine, 1.0, 1.0, launches=1) * passes
    for layout in workload.teachers:
        forward += _slowest_stage(replace(workload, placement=layout), machine, 1.0, 1.0, launches=1)
    backward = 2.0 - bool(config.lora)  # Frozen weights have no gradients.
    layers, head = 1.0 + backward + recomputed_share(workload), 1.0 + backward + config.compute.fused_output_layer
    launches = 2 + (config.compute.recompute == "full")
    update = _slowest_stage(workload, machine, layers, head, launches, learns=True) * config.batch.epochs
    if config.uses_critic:
        critic = replace(workload, placement=workload.critic)
        forward += _slowest_stage(critic, machine, 1.0, 0.0, launches=1)
        update += _slowest_stage(critic, machine, layers, 0.0, launches) * config.batch.epochs
    share = placement.bubble_share(num_micro_batches)
    # Scoring runs all of a step's micro-batches through the pipeline at once.
    score_share = placement.bubble_share(num_micro_batches * config.batch.updates_per_step)
    traffic = step_traffic(workload, kind, num_parameters, num_engines)
    # Overlapped traffic counts beyond half of the updates' computing time.
    exposed = sum(
        max(0.0, machine.seconds(entry) - update / 2) if entry.overlaps else machine.seconds(entry)
        for entry in traffic
        if not entry.is_weight_sync
    )
    forward_bubble = forward * score_share / (1 - score_share)
    return StepTime(
        scoring=forward * measured.scoring,
        updates=(update + _optimizer_seconds(workload, machine)) * measured.updates,
        bubble=update * share / (1 - share) * measured.updates + forward_bubble * measured.scoring,
        communication=exposed * measured.updates,
        weights=sum(machine.seconds(entry) for entry in traffic if entry.is_weight_sync) * measured.weights,
        besides=measured.besides_s,
    )


def layer_flops(placement: RankLayout, length: float, layers: Sequence[int] = ()) -> tuple[float, float]:
    """(linear layers, attention) of the forward pass of the mean of these layers, or of all, per token of a sequence of
    `length` tokens."""
    arch = placement.arch
    layers = layers or range(arch.num_layers)
    mlps = sum(_mlp_weights(arch, layer) for layer in layers) / len(layers)
    values = arch.head_dim
    if arch.latent_attention and not megatron_pads_values():
        values = arch.latent_attention.value_head_dim
    # A causal query sees half of the sequence: scores and weighted sum.
    attention = arch.num_attention_heads * (arch.head_dim + values) * length
    whole = RankLayout(arch, ParallelConfig(), 1)
    linear = 2.0 * sum(attention_matrices(whole))
    if delta := arch.gated_delta:
        # Of each head's state the products with key and query, and the correction.
        rule = 6.0 * delta.value_width * delta.key_head_dim
        share = sum(map(arch.has_delta, layers)) / len(layers)
        linear = (1 - share) * linear + share * (2.0 * sum(delta_matrices(whole, delta)) + rule)
        attention *= 1 - share
    return linear + 2.0 * mlps, attention


def _mlp_weights(arch: "Architecture", layer: int) -> int:
    """Weights that a token meets in a layer's MLP, or in its router and experts."""
    experts = arch.experts
    if experts is None or not arch.has_experts(layer):
        return 3 * arch.hidden_size * arch.ffn_hidden_size
    inner = experts.ffn_hidden_size * experts.per_token + (experts.shared_ffn_hidden_size or 0)
    return arch.hidden_size * (experts.number + experts.gates_shared + 3 * inner)


@dataclass(frozen=True)
class DecodingSpeed:
    """How long an engine takes for one token of each of its responses: `base_s` for its layers and their weights, and
    `per_response_s` for each response. At most `places` responses are decoded at once."""

    base_s: float
    per_response_s: float
    places: int

    def step_s(self, num_responses: int) -> float:
        """Seconds of a decoding step."""
        return self.base_s + self.per_response_s * num_responses

    @property
    def tokens_per_s(self) -> float:
        """Of an engine whose places are all taken."""
        return self.places / self.step_s(self.places)


@dataclass(frozen=True)
class Generation:
    """A round's decoding: seconds, responses that an engine decodes at once, bytes of each GPU for their cache, and the
    speed of an engine, which has places for as many as fit."""

    seconds: float
    rows: int
    cache_bytes: float
    speed: DecodingSpeed

    @property
    def tokens_per_second(self) -> float:
        """Of an engine that decodes `rows` responses."""
        return self.rows / self.speed.step_s(self.rows) if self.rows else 0.0


def generation(workload: Workload, engine: EngineLayout, machine: Machine, cache: float) -> Generation:
    """Time of one round on engines with `cache` bytes per GPU for keys and values; an embedded engine takes as many as
    its rows need.

    Every response's prompt is computed once. A round lasts as long as its longest response, which is assumed to have
    the maximum length.
    """
    placement = workload.placement
    num_engines = engine.num_engines(placement.data_size)
    wanted = -(-workload.generated_per_round // num_engines)
    places = engine.max_rows
    if not engine.is_embedded:
        fitting = cache // (cache_bytes_per_token(placement, engine) * workload.mean_length)
        places = int(min(fitting, workload.config.rollout.fleet.requests_per_engine))
    speed = decoding_speed(placement, engine, machine, workload.mean_prompt + workload.mean_response / 2, places)
    rows = min(places, wanted)
    if rows == 0:
        return Generation(float("inf"), 0, cache, speed)
    # Continuous batching on GPUs of their own; embedded, each batch of rows waits for its longest response.
    rounds = -(-wanted // rows) if engine.is_embedded else 1
    steps = workload.config.rollout.max_response_tokens
    if not engine.is_embedded:
        steps = max(steps, round(wanted / rows * workload.mean_response))
    prompts = wanted * workload.mean_prompt * token_flops(placement, workload.mean_prompt)
    prefill_s = prompts / engine.tensor / machine.reached_flops
    decoding_s = rounds * steps * speed.step_s(rows)
    if not engine.is_embedded:  # Few responses are left when the longest one ends.
        decoding_s = steps * speed.base_s + wanted * workload.mean_response * speed.per_response_s
    return Generation(prefill_s + decoding_s, rows, cache, speed)


def decoding_speed(
    placement: RankLayout, engine: EngineLayout, machine: Machine, cached_tokens: float, places: int
) -> DecodingSpeed:
    """Of an engine whose responses have `cached_tokens` tokens on average. A step reads all weights but those of the
    inputs' embedding; a response costs its keys and values, its operations, or the CPU's work: what takes longest."""
    arch, measured = placement.arch, machine.calibration
    embedding = 0 if arch.tied_embeddings else arch.vocab_size * arch.hidden_size
    element = DTYPE_BYTES["bf16" if engine.dtype == "fp8" else engine.dtype]
    weights = engine_weight_bytes(engine, arch) - embedding * element / engine.tensor
    layers_s = arch.num_layers * (EAGER_LAYER_S if engine.is_embedded else ENGINE_LAYER_S)
    # The newest token sees all others, twice as many as the mean one of a sequence.
    operations = token_flops(placement, 2 * cached_tokens) / engine.tensor
    cached = cache_bytes_per_token(placement, engine) * cached_tokens
    per_response_s = max(cached / machine.reached_memory_rate, operations / machine.reached_flops, RESPONSE_S)
    return DecodingSpeed(
        (layers_s + weights / machine.reached_memory_rate) * measured.decoding_base,
        per_response_s * measured.decoding_per_response,
        places,
    )


def token_flops(placement: RankLayout, length: float) -> float:
    """Operations of the whole model's forward pass, per token of a sequence of `length` tokens."""
    arch = placement.arch
    return arch.num_layers * sum(layer_flops(placement, length)) + 2.0 * arch.vocab_size * arch.hidden_size


def most_useful_engines(workload: Workload, rows: int) -> int:
    """Engines of `rows` responses at once with which a round's longest response takes as long as everything else: with
    more of them it still sets the pace."""
    in_turn = workload.config.rollout.max_response_tokens / workload.mean_response
    return math.ceil(workload.generated_per_round / (rows * in_turn))


def _slowest_stage(
    workload: Workload,
    machine: Machine,
    layer_passes: float,
    head_passes: float,
    launches: int,
    *,
    learns: bool = False,
) -> float:
    """Seconds of a step's tokens on the stage with the most to do; the last has the output layer too, and multi-token
    prediction if it `learns`. Layers take at least as long as launching their kernels, `launches` times for each
    micro-batch."""
    placement, config = workload.placement, workload.config
    arch, element = placement.arch, DTYPE_BYTES[config.model.dtype]
    sharing = placement.parallel.tensor * placement.parallel.context
    tokens = workload.responses_per_step * workload.mean_length / placement.data_size / sharing
    # Read and written around the products: by norms and residual sums 10 hidden sizes, by the attention with its two
    # products 9, by the MLP 2 and 6 inner sizes.
    inner = sum(_mlp_weights(arch, layer) for layer in range(arch.num_layers)) / (
        3 * arch.hidden_size * arch.num_layers
    )
    moved = (21 * arch.hidden_size + 6 * inner) * element
    layer_s = sum(layer_flops(placement, workload.mean_length)) / machine.reached_flops
    layer_s = tokens * layer_passes * (layer_s + moved / machine.reached_memory_rate)
    num_micro_batches = (
        workload.micro_batches(workload.mean_length) * config.batch.updates_per_step / config.batch.epochs
    )
    layer_s = max(layer_s, num_micro_batches * launches * EAGER_LAYER_S)
    stages = [len(layers) * layer_s for layers in placement.stage_layers]
    scored = tokens * (workload.mean_response / workload.mean_length if config.compute.fused_output_layer else 1.0)
    # Logits are written and read once.
    head_s = 2 * arch.vocab_size * (arch.hidden_size / machine.reached_flops + element / machine.reached_memory_rate)
    stages[-1] += scored * head_s * head_passes
    if placement.arch.trains_mtp and learns:
        stages[-1] += layer_s + scored * head_s * (head_passes - 1)
    return max(stages)


def _optimizer_seconds(workload: Workload, machine: Machine) -> float:
    """Of a step's updates: the state is read and written, gradients are scaled, summed, read and zeroed."""
    config = workload.config
    stages = [
        stage_bytes(workload.placement, stage, config.model, config.compute, config.lora)
        for stage in range(config.parallel.pipeline)
    ]
    moved = max(2 * held.optimizer + 4 * held.gradients + held.parameters for held in stages)
    return config.batch.updates_per_step * moved / machine.reached_memory_rate


def recomputed_share(workload: Workload, layers: Sequence[int] = ()) -> float:
    """Share of the forward operations of these layers, or of all, that the backward pass repeats."""
    compute, arch = workload.config.compute, workload.placement.arch
    if compute.recompute == "none":
        return 0.0
    if compute.recompute == "full":
        return 1.0
    layers = layers or range(arch.num_layers)
    linear, attention = layer_flops(workload.placement, workload.mean_length, layers)
    chosen: tuple[str, ...] = compute.recompute_modules
    repeated = attention * ("core_attn" in chosen)
    for layer in layers:
        if ("moe" if arch.has_experts(layer) else "mlp") in chosen:
            repeated += 2.0 * _mlp_weights(arch, layer) / len(layers)
        elif arch.experts and arch.has_experts(layer) and "shared_experts" in chosen:
            repeated += 6.0 * arch.hidden_size * (arch.experts.shared_ffn_hidden_size or 0) / len(layers)
    return repeated / (linear + attention)
