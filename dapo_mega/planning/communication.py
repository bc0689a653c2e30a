"""Computes the bytes that each GPU sends per rollout step, with ring collectives: (n - 1) / n of the data over n
ranks."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dapo_mega.config import ParallelConfig, RunConfig
from dapo_mega.planning.activations import LayerKind
from dapo_mega.planning.parameters import (
    DTYPE_BYTES,
    ParameterBytes,
    fp8_elements,
    num_trained_parameters,
    stage_buffers,
)
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.workload import Workload

if TYPE_CHECKING:
    from dapo_mega.models import Architecture

_WEIGHT_SYNC = "weight sync"
_SCALE_BYTES = 4 / 128
"""Of an element in FP8 that is scaled by block: a float32 for 128."""


@dataclass(frozen=True)
class Traffic:
    """One kind of communication of the busiest process: bytes and collectives per step, and how many consecutive ranks
    its group spans, which decides whether it leaves a node."""

    name: str
    num_bytes: float
    span: int
    overlaps: bool = False
    num_calls: float = 0.0

    @property
    def is_weight_sync(self) -> bool:
        """Whether these are the weights for the engines."""
        return self.name.startswith(_WEIGHT_SYNC)


def step_traffic(workload: Workload, kind: LayerKind, num_parameters: int, num_engines: int = 1) -> list[Traffic]:
    """Everything of a step that takes any bytes: scoring (one forward pass), updates, weight sync."""
    sync = _weight_sync(workload, num_parameters, num_engines)
    everything = [*_model_parallel(workload, kind), *_data_parallel(workload), sync]
    return [traffic for traffic in everything if traffic.num_bytes > 0]


def _data_parallel(workload: Workload) -> list[Traffic]:
    placement, config, compute = workload.placement, workload.config, workload.config.compute
    dense, spread = _largest_buffers(workload, placement)
    if config.uses_critic:
        of_critic = _largest_buffers(workload, workload.critic)
        dense, spread = dense + of_critic[0], spread + of_critic[1]
    # Megatron numbers processes tensor, context, data, pipeline; of experts expert-tensor, expert, data, pipeline.
    stage_size = placement.world_size // placement.parallel.pipeline
    # Experts that are spread have an optimizer of their own, and each one's step gathers all weights.
    calls = float(config.batch.updates_per_step)
    gatherings = 2 if placement.has_spread_experts and not compute.overlap_param_gather else 1
    traffic = []
    for name, held, shards in (
        ("DP x CP", dense, placement.optimizer_shards),
        ("expert DP", spread, placement.expert_shards),
    ):
        sent = config.batch.updates_per_step * (shards - 1) / shards
        weights = held.parameters * gatherings
        traffic += [
            Traffic(
                f"gradient reduce-scatter ({name})",
                held.gradients * sent,
                stage_size,
                compute.overlap_grad_reduce,
                calls,
            ),
            Traffic(f"parameter all-gather ({name})", weights * sent, stage_size, compute.overlap_param_gather, calls),
        ]
    return traffic


def _largest_buffers(workload: Workload, placement: RankLayout) -> tuple[ParameterBytes, ParameterBytes]:
    """`stage_buffers` of the stage with the most gradients, its weights as they are gathered."""
    config, buffers = workload.config, []
    for stage in range(placement.parallel.pipeline):
        held = stage_buffers(placement, stage, config.model, config.compute, config.lora)
        in_fp8 = (
            fp8_elements(placement, stage, config.compute) if config.compute.fp8.params and not config.lora else (0, 0)
        )
        saved = DTYPE_BYTES[config.model.dtype] - 1
        buffers.append([replace(b, parameters=b.parameters - n * saved) for b, n in zip(held, in_fp8, strict=True)])
    dense, spread = (max((stage[part] for stage in buffers), key=lambda held: held.gradients) for part in (0, 1))
    return dense, spread


def _model_parallel(workload: Workload, kind: LayerKind) -> list[Traffic]:
    """Within a replica. t and s are a process's tokens of a whole step, without and with sequence parallelism."""
    placement, config = workload.placement, workload.config
    arch, parallel = placement.arch, placement.parallel
    element = DTYPE_BYTES[config.model.dtype]
    # Over the step's tokens: forward (scoring, a reference, teachers, updates), backward, repeated forward of layers. A
    # critic scores and learns like the policy; it and teachers are counted as large as that.
    models, epochs = 1 + config.uses_critic, float(config.batch.epochs)
    frozen = config.algorithm.uses_reference + len(workload.teachers)
    forward, backward = models * (1 + epochs) + frozen, models * epochs
    passes = forward + backward * (2 if config.compute.recompute == "full" else 1)
    tokens = workload.responses_per_step * workload.mean_length / placement.data_size / parallel.context
    shared = tokens / placement.sequence_size
    layers = max(map(len, placement.stage_layers))
    hidden = tokens * arch.hidden_size * element
    ring = (parallel.tensor - 1) / parallel.tensor
    # An all-reduce, or a gathering and a scattering, around attention and MLP or shared expert; sequence parallelism
    # gathers the inputs once more for the gradients of weights that learn.
    experts = arch.experts
    with_experts = max(sum(map(arch.has_experts, layers)) for layers in placement.stage_layers)
    has_shared = experts is not None and experts.shared_ffn_hidden_size is not None
    blocks = 2 * layers - (0 if has_shared else with_experts)
    num_reductions = passes * blocks + _at_ends(parallel, forward, epochs)
    tensor = num_reductions * 2 * hidden * ring
    # Of latent attention the latent vectors are gathered in place of the hidden states, and scattered backwards.
    latents, repeated = _attention_inputs(arch)
    tensor += (passes if parallel.sequence else 2 * backward) * layers * (latents - 1) * hidden * ring
    if parallel.sequence and not config.lora:
        tensor += backward * (blocks + layers * (repeated - 1)) * hidden * ring
        # Each process has gradients of its own tokens of the products that make latent vectors, and of routers.
        own = with_experts * experts.number * arch.hidden_size if experts else 0.0
        if arch.latent_attention:
            own += layers * (latents - (arch.latent_attention.query_rank is None)) * arch.hidden_size**2
        tensor += config.batch.updates_per_step * own * 4 * 2 * ring
    tensor -= _saved_by_fp8(config, placement, passes - backward, backward) * hidden * ring
    # Gathering the projection of processes that share key heads, and scattering its gradient.
    gathers = passes * layers * placement.gathers_projection
    projection = gathers * tokens * placement.projected_heads * arch.head_dim * element * ring
    keys = 2 * placement.key_heads * arch.head_dim * element * tokens
    # The ring of Transformer Engine passes keys and values again backwards, beside their gradients.
    context = (passes + backward * (kind != "local")) * layers * keys * (parallel.context - 1)
    routed = shared * experts.per_token * arch.hidden_size * element if experts else 0.0
    ring_experts = (parallel.expert - 1) / parallel.expert
    expert = passes * with_experts * 2 * routed * ring_experts
    cut = passes * with_experts * 2 * routed * (parallel.expert_tensor - 1)
    # Stages between others send outputs forward and gradients backward; of two, the first has nobody before its first.
    virtual = parallel.virtual_pipeline
    sends = forward * virtual + backward * (virtual if parallel.pipeline > 2 else virtual - 1)
    stages = sends * shared * arch.hidden_size * element * (parallel.pipeline > 1)
    name = "TP + SP gather and scatter" if parallel.sequence else "TP all-reduce"
    # Collectives of one micro-batch; with sequence parallelism each is a gathering and a scattering.
    calls = [
        num_reductions * (1 + parallel.sequence), gathers, passes * layers * (parallel.context - 1),
        passes * with_experts * 2, passes * with_experts * 2, sends,
    ]  # fmt: skip
    num_micro_batches = workload.micro_batches(workload.mean_length) * config.batch.updates_per_step / epochs
    everything = [
        Traffic(name, tensor, parallel.tensor),
        Traffic("TP gather and scatter of shared keys", projection, parallel.tensor),
        Traffic("CP keys and values", context, parallel.tensor * parallel.context, kind != "local"),
        Traffic("EP all-to-all", expert, parallel.expert * parallel.expert_tensor),
        Traffic("expert-TP gather and scatter", cut, parallel.expert_tensor),
        Traffic("PP sends", stages, placement.world_size, virtual > 1),
    ]
    return [
        replace(traffic, num_calls=number * num_micro_batches)
        for traffic, number in zip(everything, calls, strict=True)
    ]


def _saved_by_fp8(config: RunConfig, placement: RankLayout, forward: float, backward: float) -> float:
    """What Transformer Engine's gathering in FP8 saves under sequence parallelism, in hidden states of the stage with
    the most layers: of inputs forwards and, where weights learn, again backwards, and of the outputs' gradients."""
    fp8, arch = config.compute.fp8, placement.arch
    if not (fp8.enabled and placement.parallel.sequence):
        return 0.0
    inner = range(fp8.bf16_layers_at_ends, arch.num_layers - fp8.bf16_layers_at_ends)
    layers = [layer for layer in max(placement.stage_layers, key=len) if layer in inner]
    has_shared = arch.experts is not None and arch.experts.shared_ffn_hidden_size is not None
    outputs = sum(2 - (arch.has_experts(layer) and not has_shared) for layer in layers)
    inputs = outputs + len(layers) * (_attention_inputs(arch)[1] - 1)
    is_blockwise, learns = fp8.scaling == "blockwise", not config.lora
    size = (1 + is_blockwise * _SCALE_BYTES) / DTYPE_BYTES[config.model.dtype]
    # By block gradients are gathered once with scales along rows and, for those of weights, once along columns.
    gradients = outputs * (1 - size * (1 + (is_blockwise and learns)))
    return forward * inputs * (1 - size) + backward * (gradients + learns * inputs * (1 - size))


def _attention_inputs(arch: "Architecture") -> tuple[float, float]:
    """What tensor-parallel processes gather of a token for attention, and once more for the gradients of weights that
    learn, in hidden states."""
    latent = arch.latent_attention
    if latent is None:
        return 1.0, 1.0
    query = 1.0 if latent.query_rank is None else latent.query_rank / arch.hidden_size
    keys = latent.key_value_rank / arch.hidden_size
    return query + keys + latent.rotated_head_dim / arch.hidden_size, query + keys


def _at_ends(parallel: ParallelConfig, forward: float, backward: float) -> float:
    """Reductions around embedding and output layer, in passes over the step's tokens; a critic's output layer has none.
    The embedding's is in the forward pass and the output layer's in the backward pass, or half of each under sequence
    parallelism. Of several stages the first has the embedding only."""
    if parallel.pipeline == 1:
        return forward + backward
    return (forward + backward) / 2 if parallel.sequence else forward


def _weight_sync(workload: Workload, num_parameters: int, num_engines: int) -> Traffic:
    """Embedded: each replica's leader receives all weights of its replica. `distributed`: every process receives its
    share of its stage's weights, or of its adapters, and sends it to all engines of its replica, and each engine
    receives all. Otherwise the leader of each pipeline stage of one replica receives the stage's weights and sends them
    on: to a disk once, to engines on its own machine through memory."""
    placement, config = workload.placement, workload.config
    parallel = placement.parallel
    replica = parallel.tensor * parallel.pipeline
    if config.lora and config.sends_adapters:
        num_parameters = num_trained_parameters(placement.arch, config.lora)
    size = num_parameters * DTYPE_BYTES[config.model.dtype]
    received = (parallel.tensor - 1) / parallel.tensor
    if config.rollout.placement != "embedded" and config.sync_transport == "distributed":
        engines = math.ceil(num_engines / placement.data_size)
        num_sharing = parallel.tensor * parallel.context
        num_places = num_sharing * parallel.pipeline
        share = size / num_places
        by_process = share * (received + engines)
        if by_process > size:
            return Traffic(f"{_WEIGHT_SYNC} (by every process)", by_process, placement.world_size)
        return Traffic(f"{_WEIGHT_SYNC} (to each engine)", size, placement.world_size)
    if config.rollout.placement != "embedded":
        sent = {"disk": 1, "tensor": 0}[config.sync_transport]
        return Traffic(
            f"{_WEIGHT_SYNC} (by a stage's leader)", size / parallel.pipeline * (received + sent), placement.world_size
        )
    return Traffic(f"{_WEIGHT_SYNC} (received by a leader)", size * (replica - 1) / replica, placement.world_size)
