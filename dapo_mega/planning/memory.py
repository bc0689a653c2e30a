"""What the processes of each pipeline stage hold in GPU memory, part by part, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dapo_mega.config import ComputeConfig, RunConfig
from dapo_mega.planning.activations import ActivationModel, LayerKind, peak_activations
from dapo_mega.planning.parameters import DTYPE_BYTES, fp8_weight_bytes, stage_bytes
from dapo_mega.planning.placement import Placement
from dapo_mega.planning.workload import Workload

GIB = float(2**30)
# Sizes on a GPU of `policy.fused_logprobs` and `policy.logprobs`, which cannot be imported without torch.
CHUNK_BYTES = 1 << 30
MIN_CHUNK_POSITIONS = 16
MAX_CHUNK_POSITIONS = 4096
PARTIAL_BYTES = 1 << 26
UNFUSED_POSITIONS = 1024


@dataclass(frozen=True)
class EngineLayout:
    """Where responses are generated: on each replica's leader (`num_gpus` 0), or on GPUs of their own."""

    tensor: int
    num_gpus: int
    dtype: str
    max_rows: int

    @property
    def is_embedded(self) -> bool:
        return self.num_gpus == 0

    def num_engines(self, data_size: int) -> int:
        return data_size if self.is_embedded else self.num_gpus // self.tensor


@dataclass(frozen=True)
class StageMemory:
    """Parts in bytes of the dearest process of a stage; those of `either` are never held at the same time."""

    stage: int
    always: Mapping[str, float]
    either: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.always.values()) + max(self.either.values(), default=0.0)


def engine_of(config: RunConfig, tensor: int, num_gpus: int) -> EngineLayout:
    """The engine of a run; an embedded one is not spread over GPUs."""
    dtype = config.model.dtype if config.rollout.dtype == "policy" else config.rollout.dtype
    return EngineLayout(tensor if num_gpus else 1, num_gpus, dtype, config.rollout.max_batch_rows)


def layer_kind(config: RunConfig) -> LayerKind:
    """The layers a cluster of GPUs would use."""
    return "local" if config.model.layer_implementation == "local" else "transformer_engine"


def stage_memory(workload: Workload, engine: EngineLayout, num_parameters: int, stage: int) -> StageMemory:
    """One process of a pipeline stage; on the first stage the one that also holds an embedded engine."""
    config, placement = workload.config, workload.placement
    held = stage_bytes(placement, stage, config.model, config.compute)
    model = ActivationModel(placement, config.model, config.compute, workload.full_micro_batch(), layer_kind(config))
    kept, handed = peak_activations(model, stage, workload.micro_batches(workload.longest))
    always: dict[str, float] = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
    }
    if config.compute.fp8.enabled:
        always["FP8 weights"] = fp8_weight_bytes(placement, stage, config.compute)
    if config.algorithm.kl.coefficient > 0:
        always["reference model"] = held.parameters
    either: dict[str, float] = {"activations and working set": kept + handed + working_set(model, stage)}
    if engine.is_embedded and stage == 0:
        always["rollout engine"] = engine_weight_bytes(engine, num_parameters)
        rows = min(engine.max_rows, -(-workload.generated_per_round // engine.num_engines(placement.data_size)))
        either["KV cache"] = rows * workload.longest * cache_bytes_per_token(placement, engine)
    return StageMemory(stage, always, either)


def activation_parts(workload: Workload, stage: int) -> tuple[float, float, float]:
    """(kept by autograd, held by the schedule beside it, working set) of a stage, in bytes."""
    config = workload.config
    model = ActivationModel(
        workload.placement, config.model, config.compute, workload.full_micro_batch(), layer_kind(config)
    )
    kept, handed = peak_activations(model, stage, workload.micro_batches(workload.longest))
    return kept, handed, working_set(model, stage)


def working_set(model: ActivationModel, stage: int) -> float:
    """Temporary tensors beside the activations: those of the output layer, or one layer's gradients."""
    layer = _layer_gradients(model)
    if stage != model.placement.parallel.pipeline - 1:
        return layer
    return max(layer, output_layer_bytes(model.placement, model.compute, model.element, model.shape.num_scored))


def output_layer_bytes(placement: Placement, compute: ComputeConfig, element: int, num_scored: int) -> float:
    """Working set of log-probs and entropies: one chunk of logits and the gradient of the hidden states, or (not
    fused) the gradient of all logits and a chunk of them in float32."""
    vocabulary, hidden = placement.vocabulary, placement.arch.hidden_size
    responses = num_scored / placement.parallel.context
    if not compute.fused_output_layer:
        return responses * vocabulary * element + min(UNFUSED_POSITIONS, responses) * vocabulary * (4 + element)
    positions = min(max(MIN_CHUNK_POSITIONS, CHUNK_BYTES // (4 * vocabulary)), MAX_CHUNK_POSITIONS, responses)
    weight = 4 * vocabulary * hidden if placement.arch.tied_embeddings else 0
    return positions * vocabulary * element + responses * hidden * element + PARTIAL_BYTES + weight


def engine_weight_bytes(engine: EngineLayout, num_parameters: int) -> float:
    """Weights of one GPU of an engine."""
    return num_parameters * DTYPE_BYTES[engine.dtype] / engine.tensor


def cache_bytes_per_token(placement: Placement, engine: EngineLayout) -> float:
    """Keys and values of one token in all layers, on one GPU of an engine, which holds at least one head of them."""
    arch = placement.arch
    if arch.latent_attention:
        # The latent vectors, on each GPU all of them.
        latent = arch.latent_attention.key_value_rank + arch.latent_attention.rotated_head_dim
        return float(arch.num_layers * latent * DTYPE_BYTES[engine.dtype])
    heads = -(-arch.num_query_groups // engine.tensor)
    return 2.0 * arch.num_layers * heads * arch.head_dim * DTYPE_BYTES[engine.dtype]


def _layer_gradients(model: ActivationModel) -> float:
    """Gradients within one MLP, the widest part of a layer: of its product, of gate and up, of its input and output."""
    arch, parallel = model.placement.arch, model.placement.parallel
    widths = [(model.tokens * arch.ffn_hidden_size / parallel.tensor, model.tokens * arch.hidden_size)]
    if arch.experts:
        rows = model.shared_tokens * arch.experts.per_token * parallel.expert_tensor
        widths = widths if arch.experts.dense_layers else []
        widths.append((rows * arch.experts.ffn_hidden_size / parallel.expert_tensor, rows * arch.hidden_size))
    return model.element * max(3 * inner + 2 * outer for inner, outer in widths)
