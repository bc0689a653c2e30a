"""Computes the bytes that each GPU sends per rollout step, with ring collectives: (n - 1) / n of the data over n
ranks."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dapo_mega.config import ComputeConfig, LoraConfig, RunConfig
from dapo_mega.planning.activations import LayerKind
from dapo_mega.planning.adapters import adapted_in, num_trained_parameters
from dapo_mega.planning.parameters import (
    DTYPE_BYTES,
    ParameterBytes,
    fp8_elements,
    sent_embedding,
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
    if placement.arch.tied_embeddings and placement.parallel.pipeline > 1 and not config.lora:
        # Of the first and the last stage, which have a copy each.
        size = placement.vocabulary * placement.arch.hidden_size * 4.0 * config.batch.updates_per_step
        traffic.append(Traffic("gradient all-reduce of tied embeddings", size, placement.world_size, num_calls=calls))
    if size := sent_embedding(placement, placement.parallel.pipeline - 1):
        size *= DTYPE_BYTES[config.model.dtype] * config.batch.updates_per_step
        traffic.append(Traffic("embedding to multi-token prediction", size, placement.world_size, num_calls=calls))
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
    """Within a replica, of the stage that sends the most of each kind."""
    config, placement = workload.config, workload.placement
    epochs = float(config.batch.epochs)
    # Of each model its adapters and the passes over the step's tokens: forward (scoring, updates) and backward.
    models = [(placement, config.lora, 1 + epochs, epochs)]
    models += [(workload.critic, config.critic_lora, 1 + epochs, epochs)] if config.uses_critic else []
    frozen = [placement] * config.algorithm.uses_reference + workload.teachers
    models += [(layout, None, 1.0, 0.0) for layout in frozen]
    by_model = []
    for model in models:
        stages = [_of_stage(workload, *model, kind, stage) for stage in range(placement.parallel.pipeline)]
        by_model.append([max(of_kind, key=lambda sent: sent.num_bytes) for of_kind in zip(*stages, strict=True)])
    return [
        replace(sent[0], num_bytes=sum(one.num_bytes for one in sent), num_calls=sum(one.num_calls for one in sent))
        for sent in zip(*by_model, strict=True)
    ]


def _of_stage(
    workload: Workload,
    placement: RankLayout,
    lora: LoraConfig | None,
    forward: float,
    backward: float,
    kind: LayerKind,
    stage: int,
) -> list[Traffic]:
    """Of a model's forward and backward passes on a stage."""
    config, arch, parallel = workload.config, placement.arch, placement.parallel
    element = DTYPE_BYTES[config.model.dtype]
    passes = forward + backward * (2 if config.compute.recompute == "full" else 1)
    tokens = workload.responses_per_step * workload.mean_length / placement.data_size / parallel.context
    numbers = placement.stage_layers[stage]
    layers, with_experts = len(numbers), sum(map(arch.has_experts, numbers))
    hidden = tokens * arch.hidden_size * element
    shared = hidden / placement.sequence_size  # Hidden states of a process's tokens under sequence parallelism.
    ring = (parallel.tensor - 1) / parallel.tensor
    mlps, mixtures = _repeated(config.compute, arch, numbers)
    reductions = _reductions(placement, lora, forward, backward, passes, stage) + 2 * backward * len(mlps)
    tensor = reductions + _beside_reductions(placement, lora, passes, backward, numbers, mlps)
    tensor -= _saved_by_fp8(config, placement, numbers, mlps, passes - backward, backward, lora is None)
    tensor *= hidden
    if parallel.sequence and backward:
        tensor += 2 * config.batch.updates_per_step * _gradients_of_own_tokens(placement, numbers, lora)
    tensor *= ring
    # Gathering the projection of processes that share key heads, and scattering its gradient.
    gathers = passes * layers * placement.gathers_projection
    projection = gathers * tokens * placement.projected_heads * arch.head_dim * element * ring
    keys = 2 * placement.key_heads * arch.head_dim * element * tokens
    # The ring of Transformer Engine passes keys and values again backwards, beside their gradients.
    context = (passes + backward * (kind != "local")) * layers * keys * (parallel.context - 1)
    mixed = passes * with_experts + backward * mixtures
    routed = mixed * 2 * shared * arch.experts.per_token if arch.experts else 0.0
    # Stages between others send outputs forward and gradients backward; of two, the first has nobody before its first.
    virtual = parallel.virtual_pipeline
    sends = forward * virtual + backward * (virtual if parallel.pipeline > 2 else virtual - 1)
    name = "TP + SP gather and scatter" if parallel.sequence else "TP all-reduce"
    num_micro_batches = (
        workload.micro_batches(workload.mean_length) * config.batch.updates_per_step / config.batch.epochs
    )
    # Collectives of one micro-batch; with sequence parallelism each reduction is a gathering and a scattering. Experts'
    # weights in the sum are sent beside the tokens, and shapes before what stages send.
    again = parallel.sequence and not lora
    calls = [
        reductions / 2 * (1 + parallel.sequence) + again * backward * _num_blocks(arch, numbers), gathers,
        passes * layers * (parallel.context - 1 if kind != "local" else parallel.context > 1),
        mixed * 3, mixed * 3, 2 * sends,
    ]  # fmt: skip
    everything = [
        Traffic(name, tensor, parallel.tensor),
        Traffic("TP gather and scatter of shared keys", projection, parallel.tensor),
        Traffic("CP keys and values", context, parallel.tensor * parallel.context, kind != "local"),
        Traffic(
            "EP all-to-all",
            routed * (parallel.expert - 1) / parallel.expert,
            parallel.expert * parallel.expert_tensor,
        ),
        # Outputs are summed in float32, as experts' weights are.
        Traffic(
            "expert-TP gather and scatter",
            routed * (1 + 4 / element) / 2 * (parallel.expert_tensor - 1),
            parallel.expert_tensor,
        ),
        Traffic("PP sends", sends * shared * (parallel.pipeline > 1), placement.world_size, virtual > 1),
    ]
    return [
        replace(traffic, num_calls=number * num_micro_batches)
        for traffic, number in zip(everything, calls, strict=True)
    ]


def _gradients_of_own_tokens(placement: RankLayout, numbers: list[int], lora: LoraConfig | None) -> float:
    """Bytes of these layers' gradients that each process has of its own tokens under sequence parallelism: of the
    products that make latent vectors, and of routers; or of the adapters' matrices that processes hold alike."""
    arch = placement.arch
    if lora:
        return 4 * sum(of.num_alike(placement, lora.rank) for layer in numbers for of in adapted_in(arch, layer, lora))
    numels = sum(map(arch.has_experts, numbers)) * arch.experts.number * arch.hidden_size if arch.experts else 0.0
    if latent := arch.latent_attention:
        numels += len(numbers) * (_attention_inputs(arch)[0] - (latent.query_rank is None)) * arch.hidden_size**2
    return 4 * numels


def _repeated(compute: ComputeConfig, arch: "Architecture", numbers: list[int]) -> tuple[list[int], int]:
    """Those of these layers whose MLP, or shared expert, selective recompute passes through once more, and the number
    of those whose experts it does."""
    chosen: tuple[str, ...] = compute.recompute_modules if compute.recompute == "selective" else ()
    mixtures = [layer for layer in numbers if arch.has_experts(layer)]
    mlps = [layer for layer in numbers if layer not in mixtures and "mlp" in chosen]
    if arch.experts and arch.experts.shared_ffn_hidden_size is not None and {"moe", "shared_experts"} & {*chosen}:
        mlps += mixtures
    return mlps, len(mixtures) * ("moe" in chosen)


def _num_blocks(arch: "Architecture", numbers: list[int]) -> int:
    """Attentions, and MLPs or shared experts, of these layers: around each is an all-reduce, or a gathering and a
    scattering."""
    has_shared = arch.experts is not None and arch.experts.shared_ffn_hidden_size is not None
    return 2 * len(numbers) - (0 if has_shared else sum(map(arch.has_experts, numbers)))


def _reductions(
    placement: RankLayout, lora: LoraConfig | None, forward: float, backward: float, passes: float, stage: int
) -> float:
    """Hidden states that a stage sends in its reductions, of which each sends two. Besides those of blocks there is one
    around the embedding in the forward pass and around the output layer in the backward pass, or half of each under
    sequence parallelism; a critic's output layer has none, and a frozen embedding needs no gradient."""
    arch, parallel = placement.arch, placement.parallel
    embedding, head = forward, backward
    if parallel.sequence:
        embedding, head = (forward + backward * (lora is None)) / 2, (forward + backward) / 2
    at_ends = (stage == 0) * embedding + (stage == parallel.pipeline - 1 and not arch.has_value_head) * head
    return 2 * (passes * _num_blocks(arch, placement.stage_layers[stage]) + at_ends)


def _beside_reductions(
    placement: RankLayout,
    lora: LoraConfig | None,
    passes: float,
    backward: float,
    numbers: list[int],
    repeated_mlps: list[int],
) -> float:
    """Hidden states that these layers send within the tensor group besides: of latent attention the latent vectors are
    gathered in place of the hidden states, and scattered backwards; what is between A and B of adapters is gathered or
    scattered forwards and backwards, or summed once; and sequence parallelism gathers inputs once more for the
    gradients of weights that learn."""
    arch, parallel = placement.arch, placement.parallel
    latents, repeated = _attention_inputs(arch)
    sent = (passes if parallel.sequence else 2 * backward) * len(numbers) * (latents - 1)
    if lora:
        for number, found in ((layer, of) for layer in numbers for of in adapted_in(arch, layer, lora)):
            if (weight := found.weight).is_cut and not found.is_expert:
                again = backward * (number in repeated_mlps and ".mlp." in found.name)
                times = 2 * (passes - backward + again if weight.is_row else backward)
                times = passes + again if parallel.sequence else times
                sent += times * len(weight.parts) * lora.rank / arch.hidden_size
    elif parallel.sequence:
        sent += backward * (_num_blocks(arch, numbers) + len(numbers) * (repeated - 1))
    return sent


def _saved_by_fp8(
    config: RunConfig,
    placement: RankLayout,
    numbers: list[int],
    repeated_mlps: list[int],
    forward: float,
    backward: float,
    learns: bool,
) -> float:
    """What Transformer Engine's gathering in FP8 saves under sequence parallelism, in hidden states of these layers: of
    inputs forwards and, where weights learn, again backwards, and of the outputs' gradients."""
    fp8, arch = config.compute.fp8, placement.arch
    if not (fp8.enabled and placement.parallel.sequence):
        return 0.0
    inner = range(fp8.bf16_layers_at_ends, arch.num_layers - fp8.bf16_layers_at_ends)
    layers = [layer for layer in numbers if layer in inner]
    has_shared = arch.experts is not None and arch.experts.shared_ffn_hidden_size is not None
    outputs = sum(2 - (arch.has_experts(layer) and not has_shared) for layer in layers)
    inputs = outputs + len(layers) * (_attention_inputs(arch)[1] - 1)
    is_blockwise = fp8.scaling == "blockwise"
    size = (1 + is_blockwise * _SCALE_BYTES) / DTYPE_BYTES[config.model.dtype]
    # By block gradients are gathered once with scales along rows and, for those of weights, once along columns.
    gradients = outputs * (1 - size * (1 + (is_blockwise and learns)))
    again = backward * sum(layer in inner for layer in repeated_mlps)
    return (forward * inputs + again) * (1 - size) + backward * (gradients + learns * inputs * (1 - size))


def _attention_inputs(arch: "Architecture") -> tuple[float, float]:
    """What tensor-parallel processes gather of a token for attention, and once more for the gradients of weights that
    learn, in hidden states."""
    latent = arch.latent_attention
    if latent is None:
        return 1.0, 1.0
    query = 1.0 if latent.query_rank is None else latent.query_rank / arch.hidden_size
    keys = latent.key_value_rank / arch.hidden_size
    return query + keys + latent.rotated_head_dim / arch.hidden_size, query + keys


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
