"""Computes the GPU memory of each pipeline stage's ranks, part by part, in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dapo_mega.config import ComputeConfig, RunConfig
from dapo_mega.planning.activations import ActivationModel, LayerKind, peak_activations
from dapo_mega.planning.parameters import DTYPE_BYTES, fp8_weight_bytes, num_parameters, sent_embedding, stage_bytes
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.workload import Workload

if TYPE_CHECKING:
    from dapo_mega.models import Architecture

GIB = float(2**30)
# Sizes on a GPU of `policy.fused_logprobs` and `policy.logprobs`, which cannot be imported without torch.
CHUNK_BYTES = 1 << 30
MIN_CHUNK_POSITIONS = 16
MAX_CHUNK_POSITIONS = 4096
UNFUSED_POSITIONS = 1024
# Assumed, not measured: what a colocated engine's process keeps on a GPU asleep (CUDA context, workspaces, NCCL).
ASLEEP_BYTES = 2 * GIB
# Of a GPU's memory, what an engine takes for weights and cache when it has the GPU to itself (SGLang's own default is
# near it).
ENGINE_SHARE = 0.9


@dataclass(frozen=True)
class EngineLayout:
    """Where responses are generated: on each replica's leader (`num_gpus` 0), on GPUs of their own, or on the trainer's
    while that waits (`is_colocated`)."""

    tensor: int
    num_gpus: int
    dtype: str
    max_rows: int
    is_colocated: bool = False

    @property
    def is_embedded(self) -> bool:
        return self.num_gpus == 0

    def num_engines(self, data_size: int) -> int:
        return data_size if self.is_embedded else self.num_gpus // self.tensor


@dataclass(frozen=True)
class StageMemory:
    """Parts, in bytes, of the rank of a stage with the most memory; parts in `either` are never held at the same
    time. `lent` are held one at a time in place of all these, while the trainer's memory is lent to engines."""

    stage: int
    always: Mapping[str, float]
    either: Mapping[str, float]
    lent: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        training = sum(self.always.values()) + max(self.either.values(), default=0.0)
        return max(training, *self.lent.values(), 0.0)


def engine_of(config: RunConfig, tensor: int, num_gpus: int) -> EngineLayout:
    """The engine of a run; an embedded one is not spread over GPUs."""
    rollout = config.rollout
    if rollout.placement == "embedded":
        tensor, num_gpus = 1, 0
    return EngineLayout(tensor, num_gpus, config.engine_dtype, rollout.max_batch_rows, rollout.placement == "colocated")


def smallest_engine(config: RunConfig, arch: "Architecture", memory: float, gpus_per_node: int) -> int:
    """The smallest tensor-parallel size, up to a node's GPUs, with which the weights leave half of `memory`, the bytes
    of a GPU that an engine may take, to the cache."""
    size = 1
    while size < gpus_per_node and engine_weight_bytes(engine_of(config, size, size), arch) > memory / 2:
        size = min(2 * size, gpus_per_node)
    return size


def num_engines_of(config: RunConfig, world_size: int, tensor: int) -> int:
    """Engines that the configuration names or asks for: on the trainer's GPUs as many as there is room for."""
    fleet = config.rollout.fleet
    if config.rollout.placement == "colocated":
        return len(fleet.urls) or max(1, world_size // tensor)
    return max(len(fleet.urls), fleet.min_engines)


def layer_kind(config: RunConfig) -> LayerKind:
    """The layers a cluster of GPUs would use."""
    return "local" if config.model.layer_implementation == "local" else "transformer_engine"


def stage_memory(workload: Workload, engine: EngineLayout, stage: int) -> StageMemory:
    """Memory of one process of a pipeline stage; on the first stage, of the one that also holds an embedded engine.
    Engines on other GPUs take only the buckets in which their weights are gathered."""
    config, placement = workload.config, workload.placement
    always = trainer_memory(workload, stage)
    buckets = bucket_memory(workload)
    either = {"activations and working set": sum(activation_parts(workload, placement, stage)), "weight sync": buckets}
    if config.uses_critic:
        either["critic's activations"] = sum(activation_parts(workload, workload.critic, stage))
    if engine.is_embedded and stage == 0:
        always["rollout engine"] = engine_weight_bytes(engine, placement.arch)
        rows = min(engine.max_rows, -(-workload.generated_per_round // engine.num_engines(placement.data_size)))
        either["KV cache"] = rows * workload.longest * cache_bytes_per_token(placement, engine)
    if engine.is_colocated:
        always["engine asleep"] = ASLEEP_BYTES
        # Awake beside the policy's weights and optimizer: first its weights and the buckets, then weights and cache.
        del either["weight sync"]
        least = max(buckets, workload.longest * cache_bytes_per_token(placement, engine))
        weights = engine_weight_bytes(engine, placement.arch)
        if not config.rollout.offload_trainer:
            either["engine awake, at least"] = weights + least
            return StageMemory(stage, always, either)
        stays = ASLEEP_BYTES + always.get("FP8 weights", 0.0)
        cache = workload.longest * cache_bytes_per_token(placement, engine)
        lent = {
            "weights to engines": stays + always["parameters"] + buckets + weights,
            "engine awake, at least": stays + weights + cache,
        }
        return StageMemory(stage, always, either, lent)
    return StageMemory(stage, always, either)


def bucket_memory(workload: Workload) -> float:
    """Bytes of the at most two buckets that exist while weights are gathered; each holds at least one tensor."""
    config, arch = workload.config, workload.placement.arch
    element = DTYPE_BYTES[config.model.dtype]
    largest = max(arch.vocab_size, arch.ffn_hidden_size) * arch.hidden_size * element
    return float(min(2 * max(config.weight_sync.bucket_bytes, largest), num_parameters(arch) * element))


def trainer_memory(workload: Workload, stage: int) -> dict[str, float]:
    """Bytes that a process of the trainer keeps from start to end, part by part."""
    config, placement = workload.config, workload.placement
    held = stage_bytes(placement, stage, config.model, config.compute, config.lora)
    always: dict[str, float] = {"parameters": held.parameters, "gradients": held.gradients, "optimizer": held.optimizer}
    if config.compute.fp8.enabled:
        always["FP8 weights"] = fp8_weight_bytes(placement, stage, config.compute)
    if config.algorithm.uses_reference and not config.lora:
        alone = stage_bytes(placement.of_policy_alone, stage, config.model, config.compute)
        always["reference model"] = alone.parameters
    if teachers := workload.teachers:
        of_teachers = (stage_bytes(layout, stage, config.model, config.compute) for layout in teachers)
        always["teachers"] = sum(held.parameters for held in of_teachers)
    if config.uses_critic:
        critic = stage_bytes(workload.critic, stage, config.model, config.compute, config.critic_lora)
        always["critic"] = critic.parameters + critic.gradients + critic.optimizer
        always["critic"] += fp8_weight_bytes(workload.critic, stage, config.compute)
    return always


def activation_model(workload: Workload, placement: RankLayout) -> ActivationModel:
    """Of the policy, or of the critic by its placement."""
    config, shape = workload.config, workload.full_micro_batch()
    lora = config.critic_lora if placement.arch.has_value_head else config.lora
    return ActivationModel(placement, config.model, config.compute, shape, layer_kind(config), lora)


def activation_parts(workload: Workload, placement: RankLayout, stage: int) -> tuple[float, float, float]:
    """Bytes of a stage of the policy, or of the critic by its placement: (kept by autograd, held by the schedule,
    working set)."""
    config = workload.config
    model = activation_model(workload, placement)
    number = workload.micro_batches(workload.longest)
    learns = model.lora is None
    kept, beside = peak_activations(model, stage, number, recomputes=False)
    beside += sent_embedding(placement, stage) * model.element
    at_head = kept, beside, working_set(model, stage, learns_output=learns)
    if config.compute.recompute == "none":
        return at_head
    # Beside what is repeated lie its output and the gradient of it.
    kept, beside = peak_activations(model, stage, number)
    beside += sent_embedding(placement, stage) * model.element
    return max(at_head, (kept, beside, _layer_working_set(model, stage, learns=learns) + 2 * model.hidden), key=sum)


def working_set(model: ActivationModel, stage: int, *, learns_output: bool) -> float:
    """Bytes of temporary tensors besides the activations: the output layer's, or one layer's gradients."""
    layer = _layer_working_set(model, stage, learns=learns_output)
    if stage != model.placement.parallel.pipeline - 1:
        return layer
    if model.placement.arch.has_value_head:
        # The gradient of the head's input in float32 and in the model's type.
        return max(layer, model.shared_tokens * model.placement.arch.hidden_size * (4 + model.element))
    scored = model.shape.num_scored
    return max(layer, output_layer_bytes(model.placement, model.compute, model.element, scored, learns_output))


def _layer_working_set(model: ActivationModel, stage: int, *, learns: bool) -> float:
    if not model.placement.stage_layers[stage]:
        return 0.0
    return max(
        _layer_gradients(model), _experts_forward(model, has_adapters=not learns), (not learns) * _adapted(model)
    )


def output_layer_bytes(
    placement: RankLayout, compute: ComputeConfig, element: int, num_scored: int, learns: bool = True
) -> float:
    """Working set of log-probs and entropies: one chunk of logits, the gradient of the hidden states, and what autograd
    is given as that of the weight, or (not fused) the gradient of all logits and a chunk of them in float32."""
    vocabulary, hidden = placement.vocabulary, placement.arch.hidden_size
    responses = num_scored / placement.parallel.context
    if not compute.fused_output_layer:
        return responses * vocabulary * element + min(UNFUSED_POSITIONS, responses) * vocabulary * (4 + element)
    positions = min(max(MIN_CHUNK_POSITIONS, CHUNK_BYTES // (4 * vocabulary)), MAX_CHUNK_POSITIONS, responses)
    # A tied weight's gradients of several chunks are summed in float32 and then have the weight's type.
    is_summed = placement.arch.tied_embeddings and positions < responses
    weight = (4 + element % 4 if is_summed else element) * vocabulary * hidden * learns
    return positions * vocabulary * element + responses * hidden * element + weight


def engine_weight_bytes(engine: EngineLayout, arch: "Architecture") -> float:
    """Bytes of weights on one GPU of an engine. FP8 engines keep embedding and output layer in bf16."""
    size = num_parameters(arch)
    if engine.dtype == "fp8":
        outer = arch.vocab_size * arch.hidden_size * (1 if arch.tied_embeddings else 2)
        return (size - outer + outer * DTYPE_BYTES["bf16"]) / engine.tensor
    return size * DTYPE_BYTES[engine.dtype] / engine.tensor


def cache_bytes_per_token(placement: RankLayout, engine: EngineLayout) -> float:
    """Bytes of one token's keys and values in all layers on one GPU of an engine, at least one head of them. The state
    of a gated delta layer does not grow with tokens and is not counted."""
    arch, element = placement.arch, DTYPE_BYTES["bf16" if engine.dtype == "fp8" else engine.dtype]
    if arch.latent_attention:
        # The latent vectors, on each GPU all of them.
        latent = arch.latent_attention.key_value_rank + arch.latent_attention.rotated_head_dim
        return float(arch.num_layers * latent * element)
    heads = -(-arch.num_query_groups // engine.tensor)
    num_layers = sum(not arch.has_delta(layer) for layer in range(arch.num_layers))
    return 2.0 * num_layers * heads * arch.head_dim * element


def _adapted(model: ActivationModel) -> float:
    """What a dense MLP with adapters holds beside what it keeps while its gate and up are made: what the weight gives
    and what the adapter adds; its product is not there yet."""
    arch, parallel = model.placement.arch, model.placement.parallel
    if arch.experts and not arch.experts.dense_layers:
        return 0.0
    return model.tokens * model.element * 3 * arch.ffn_hidden_size / parallel.tensor


def _layer_gradients(model: ActivationModel) -> float:
    """Gradients within the widest part of a layer: of an MLP's product, of its gate and up (local layers: by steps), of
    its input and output, less the product's input that is free by then, which is smaller in FP8; or, when its gate and
    up are free, clamped ones too, of their weight and of their input (and of the residual, which for experts is small),
    in FP8 beside both copies of their own; or of the projection that processes with shared key heads gather, twice
    while it is scattered."""
    arch, parallel = model.placement.arch, model.placement.parallel
    clamped = 2 * bool(arch.experts and arch.experts.swiglu_limit)
    inner = arch.ffn_hidden_size / parallel.tensor
    hidden = model.tokens * arch.hidden_size
    widths = [(model.tokens * inner, hidden, 2 * inner * arch.hidden_size + 2 * hidden)]
    if arch.experts:
        rows, inner = model.expert_rows, arch.experts.ffn_hidden_size / parallel.expert_tensor
        widths = widths if arch.experts.dense_layers else []
        weights = 2 * arch.experts.number // parallel.expert * inner * arch.hidden_size
        widths.append((rows * inner, rows * arch.hidden_size, weights + rows * arch.hidden_size))
    placement = model.placement
    projection = placement.gathers_projection * 2 * model.tokens * placement.projected_heads * arch.head_dim
    copies, learns = 2 * (model.operand < model.element), model.lora is None
    made = [
        4 * inner + 2 * outer
        if model.is_local
        else max(3 * inner, 2 * inner + 2 * outer, learns * ((copies - clamped) * inner + weight))
        for inner, outer, weight in widths
    ]
    gradients = (size - inner * model.operand / model.element for size, (inner, *_) in zip(made, widths, strict=True))
    return model.element * max(projection, *gradients)


def _experts_forward(model: ActivationModel, *, has_adapters: bool) -> float:
    """What a mixture's forward pass holds at most beside what it keeps: rows before and after they went to experts, and
    of these the output and the same in another order, or what adapters add and the sum. Where experts are cut, Megatron
    sums outputs in float32, as it adds biases, expert by expert, to put them together then; until then there is also
    what frozen experts do not keep."""
    arch, parallel = model.placement.arch, model.placement.parallel
    if not arch.experts:
        return 0.0
    cut = parallel.expert_tensor
    summed = (cut > 1) * 4 / model.element * ((model.element < 4) + 1 / cut)
    rows = model.shared_tokens * arch.experts.per_token * cut * arch.hidden_size * model.element
    before = 1 + (parallel.expert > 1) + (model.operand < model.element)  # What is kept is then a copy in FP8.
    biased = 0.0
    if arch.experts.has_biases:
        layer = next(filter(arch.has_experts, range(arch.num_layers)))
        rows_go, product_goes = (not model.keeps_input(layer, f"linear_{name}") for name in ("fc1", "fc2"))
        product_goes = product_goes or model.operand < model.element
        biased = 1 + 2 * 4 / model.element + rows_go + product_goes * arch.experts.ffn_hidden_size / arch.hidden_size
    return rows * (before / cut + max(2 + summed, 3 * has_adapters, biased))
