"""A rehearsal as lines of text, beside what the planner says of the same step."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from dapo_mega.config import LoraConfig
from dapo_mega.megatron.core.layers import attends_with_sinks
from dapo_mega.planning.adapters import adapter_numels
from dapo_mega.planning.communication import step_traffic
from dapo_mega.planning.memory import ASLEEP_BYTES, GIB, activation_parts, layer_kind, trainer_memory
from dapo_mega.planning.parameters import ParameterBytes, num_parameters, stage_bytes
from dapo_mega.planning.rank_layout import RankLayout
from dapo_mega.planning.step_time import layer_flops, recomputed_share
from dapo_mega.planning.workload import Workload
from dapo_mega.rehearsal.communication import Event
from dapo_mega.rehearsal.rank import Played
from dapo_mega.rehearsal.run import Rehearsal, scored_positions

_TRAFFIC = {
    "TENSOR_MODEL_PARALLEL_GROUP": (
        "TP + SP gather and scatter",
        "TP all-reduce",
        "TP gather and scatter of shared keys",
    ),
    "CONTEXT_PARALLEL_GROUP": ("CP keys and values",),
    "DATA_PARALLEL_GROUP_WITH_CP": ("gradient reduce-scatter (DP x CP)", "parameter all-gather (DP x CP)"),
    "EXPERT_MODEL_PARALLEL_GROUP": ("EP all-to-all",),
    "EXPERT_DATA_PARALLEL_GROUP": (
        "gradient reduce-scatter (expert DP)",
        "parameter all-gather (expert DP)",
    ),
    "EXPERT_TENSOR_PARALLEL_GROUP": ("expert-TP gather and scatter",),
    "PIPELINE_MODEL_PARALLEL_GROUP": ("PP sends", "embedding to multi-token prediction"),
    "EMBEDDING_GROUP": ("gradient all-reduce of tied embeddings",),
}
"""What the planner calls the traffic of Megatron's groups."""


def report(rehearsal: Rehearsal) -> Iterator[str]:
    """Lines on what was rehearsed, memory, operations and communication."""
    roles, workload = rehearsal.roles, rehearsal.workload
    played = rehearsal.played
    first = next(iter(played.values()))
    yield (
        f"rehearsed: scoring, two updates of {first.num_micro_batches[0]} micro-batches of "
        f"{workload.full_micro_batch().num_tokens} tokens, gathering weights for engines and saving a checkpoint up "
        f"to the writing of files, by {len(played)} of {roles.world_size} ranks, which stand for all, with "
        f"{_layers(rehearsal)}"
    )
    for stage in range(workload.placement.parallel.pipeline):
        yield from _stage_lines(rehearsal, stage)
    yield _verdict(rehearsal)
    yield f"the largest batch.tokens_per_microbatch that fits by the plan: {_most_tokens(rehearsal)}"
    yield from _traffic_lines(rehearsal)


def _layers(rehearsal: Rehearsal) -> str:
    """The layers that were rehearsed, and what the run has in their place."""
    stand_in = _stand_in(rehearsal)
    if layer_kind(rehearsal.config) != "local":
        layers = "Transformer Engine's layers" + (f" with {stand_in}" if stand_in else "")
    else:
        layers = "local layers" + (" in place of Transformer Engine's" if stand_in else "")
    has_fp8 = rehearsal.config.compute.fp8.enabled
    return layers + (" and FP8 off" if rehearsal.given.compute.fp8.enabled and not has_fp8 else "")


def _stage_lines(rehearsal: Rehearsal, stage: int) -> Iterator[str]:
    """The stage's ranks, those that do the same once, and the plan beside the one that holds the most."""
    roles: dict[str, list[int]] = defaultdict(list)
    of_stage = [rank for rank in rehearsal.played if rehearsal.roles.place(rank)[3] == stage]
    for rank in sorted(of_stage, key=lambda rank: (-round(rehearsal.played[rank].most.num_bytes / GIB, 2), rank)):
        roles[_held(rehearsal.played[rank])].append(rank)
    for held, ranks in roles.items():
        alike = f", and so rank {', '.join(map(str, ranks[1:]))}" * (len(ranks) > 1)
        yield f"stage {stage}, {rehearsal.roles.describe(ranks[0])}{alike}: {held}"
    busiest = next(iter(roles.values()))[0]
    played = rehearsal.played[busiest]
    planned = planned_always(rehearsal, stage)
    for name, found in played.always.items():
        yield f"  {_beside(name, found / GIB, planned[name] / GIB, 'GiB')}"
    yield _activations(rehearsal, stage, played.peaks["update"].num_bytes - sum(played.always.values()))
    for name, flops in planned_flops(rehearsal, busiest).items():
        yield f"  {_beside(f'{name}: operations', played.flops[name] / 1e12, flops / 1e12, 'TFLOP')}"


def _held(played: Played) -> str:
    """What a rank held at its peak, and where that was."""
    peak = played.most
    phase = next(name for name, of_phase in played.peaks.items() if of_phase is peak)
    kinds = ", ".join(f"{kind} {size / GIB:,.2f}" for kind, size in peak.kinds.items() if size)
    return (
        f"at most {peak.num_bytes / GIB:.2f} GiB ({kinds}), in the phase {phase!r} in {peak.operation} at {peak.place}"
    )


def planned_always(rehearsal: Rehearsal, stage: int) -> dict[str, float]:
    """Bytes of a rank of a stage, by what they are: of the policy, its reference, teachers and the critic."""
    config, placement = rehearsal.config, rehearsal.workload.placement
    held = stage_bytes(placement, stage, config.model, config.compute, config.lora)
    if config.algorithm.uses_reference and not config.lora:
        held += ParameterBytes(held.parameters, 0, 0)
    for layout in rehearsal.workload.teachers:
        held += ParameterBytes(stage_bytes(layout, stage, config.model, config.compute).parameters, 0, 0)
    if config.uses_critic:
        held += stage_bytes(rehearsal.workload.critic, stage, config.model, config.compute, config.critic_lora)
    always: dict[str, float] = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
    }
    if config.compute.fp8.enabled:
        always["FP8 weights"] = trainer_memory(rehearsal.workload, stage)["FP8 weights"]
    return always


def _activations(rehearsal: Rehearsal, stage: int, found: float) -> str:
    """Plans are of Transformer Engine's layers, or of local layers on a CPU, whose attention computes in float32."""
    planned = _planned_activations(rehearsal, stage)
    has_planned = layer_kind(rehearsal.config) != "local" or rehearsal.config.model.dtype == "fp32"
    stand_in = _stand_in(rehearsal)
    if has_planned and not stand_in:
        return f"  {_beside('activations', found / GIB, planned / GIB, 'GiB')}"
    return f"  activations: {found / GIB:,.3f} GiB with {stand_in or 'local layers'}" + (
        f"; planned with {_of_run(rehearsal)} {planned / GIB:,.3f} GiB" if stand_in else ""
    )


def _planned_activations(rehearsal: Rehearsal, stage: int) -> float:
    """Bytes that the plan has for the layers that the run asks for."""
    workload = replace(rehearsal.workload, config=rehearsal.as_given)
    return sum(activation_parts(workload, workload.placement, stage))


def _stand_in(rehearsal: Rehearsal) -> str:
    """What was rehearsed in place of what the run will have on a GPU; nothing if that is the same."""
    if layer_kind(rehearsal.as_given) != layer_kind(rehearsal.config):
        return "local layers"
    arch, is_local = rehearsal.workload.placement.arch, layer_kind(rehearsal.config) == "local"
    if is_local:
        return ""
    in_torch = {
        "the delta rule": arch.gated_delta,
        "attention with sinks": arch.attention_sinks and not attends_with_sinks()[0],
    }
    found = [name for name, is_there in in_torch.items() if is_there]
    return " and ".join(found) + " in torch" * bool(found)


def _of_run(rehearsal: Rehearsal) -> str:
    """What `_stand_in` stands for."""
    return "Transformer Engine's layers" if layer_kind(rehearsal.config) == "local" else "kernels of a GPU"


def _verdict(rehearsal: Rehearsal) -> str:
    """With the layers that the run will have; local ones keep more."""
    placement, available = rehearsal.config.rollout.placement, _available(rehearsal)
    beside = {"colocated": ", beside an engine asleep", "embedded": ", the embedded engine left out"}.get(placement, "")
    held = {rank: float(played.most.num_bytes) for rank, played in rehearsal.played.items()}
    if stand_in := _stand_in(rehearsal):
        rehearsed = max(held.values()) / GIB
        held = {
            rank: sum(played.always.values()) + _planned_activations(rehearsal, rehearsal.roles.place(rank)[3])
            for rank, played in rehearsal.played.items()
        }
        beside += f", with the planned activations of {_of_run(rehearsal)} ({rehearsed:.1f} with {stand_in})"
    rank, most = max(held.items(), key=lambda item: item[1])
    of_gpu = (
        f"{most / GIB:.1f} of {max(0.0, available) / GIB:.1f} GiB of a GPU on {rehearsal.roles.describe(rank)}{beside}"
    )
    if most <= available:
        return f"fits: {of_gpu}; {(available - most) / GIB:.1f} GiB to spare"
    return f"DOES NOT FIT: {of_gpu}"


def _available(rehearsal: Rehearsal) -> float:
    return rehearsal.available_bytes - ASLEEP_BYTES * (rehearsal.config.rollout.placement == "colocated")


def _most_tokens(rehearsal: Rehearsal) -> int:
    """Of the longest samples that a micro-batch may hold, by what was found to stay and the planned activations."""
    given, workload = rehearsal.given, rehearsal.workload
    always = {rehearsal.roles.place(rank)[3]: sum(played.always.values()) for rank, played in rehearsal.played.items()}

    def held(number: int) -> float:
        batch = given.batch.model_copy(update={"tokens_per_microbatch": number * workload.longest})
        whole = replace(workload, config=given.model_copy(update={"batch": batch}), scored_share=1.0)
        return max(kept + sum(activation_parts(whole, whole.placement, stage)) for stage, kept in always.items())

    return workload.longest * bisect_right(range(1, 2**12), _available(rehearsal), key=held)


def _beside(name: str, found: float, planned: float, unit: str) -> str:
    off = f"{found / planned - 1:+.1%}" if planned else "nothing"
    return f"{name}: {found:,.3f} {unit}, planned {planned:,.3f} ({off})"


def planned_flops(rehearsal: Rehearsal, rank: int) -> dict[str, float]:
    """Of a rank, of scoring and of an update."""
    config, workload = rehearsal.config, rehearsal.workload
    _, context, _, stage = rehearsal.roles.place(rank)
    scored = _scored(workload, context)
    score, update = _model_flops(workload, workload.placement, stage, scored, config.lora)
    # A reference of adapters is the model without them.
    frozen = [workload.placement] * config.algorithm.uses_reference + workload.teachers
    score += sum(_model_flops(workload, placement, stage, scored, None)[0] for placement in frozen)
    if config.uses_critic:
        of_critic = _model_flops(workload, workload.critic, stage, scored, config.critic_lora)
        score, update = score + of_critic[0], update + of_critic[1]
    return {"score": score, "update": update}


def _scored(workload: Workload, context: int) -> float:
    """Positions of a step that a context rank scores."""
    return workload.responses_per_step / workload.placement.data_size * scored_positions(workload, context)


def _model_flops(
    workload: Workload, placement: RankLayout, stage: int, scored: float, lora: LoraConfig | None
) -> tuple[float, float]:
    """Of one model's forward pass over a step's tokens, and of the updates with them; `scored` positions have logits. A
    value head is small."""
    parallel, arch, compute = placement.parallel, placement.arch, workload.config.compute
    sharing = parallel.tensor * parallel.context * placement.data_size
    tokens = workload.responses_per_step * workload.longest / sharing
    layers = placement.stage_layers[stage]
    linear, attention = (tokens * len(layers) * flops for flops in layer_flops(placement, workload.longest, layers))
    has_head = stage == parallel.pipeline - 1 and not arch.has_value_head
    head = has_head * scored * 2.0 * arch.vocab_size * arch.hidden_size / parallel.tensor
    forward, update = linear + attention, (3 + recomputed_share(workload, layers)) * (linear + attention)
    head_passes = 3.0 + compute.fused_output_layer
    if arch.trains_mtp and has_head:  # In updates alone, with an output layer that does not learn.
        linear, attention = (tokens * flops for flops in layer_flops(placement, workload.longest, [arch.num_layers]))
        again = 0.0 if compute.recompute == "full" else recomputed_share(workload, [arch.num_layers])
        update += (3 + again) * (linear + attention) + 3 * tokens * 4.0 * arch.hidden_size**2
        head_passes += 2.0 + compute.fused_output_layer
    if lora:  # Frozen weights have no gradients; factors are not shared out as tokens are.
        adapters = 0.0
        for chunk in placement.chunks(stage):
            dense, experts = map(sum, adapter_numels(placement, chunk, lora))
            adapters += 2.0 * tokens * parallel.tensor * dense
            if arch.experts:
                met = arch.experts.per_token * parallel.expert / arch.experts.number
                adapters += 2.0 * tokens * parallel.expert_tensor * met * experts
        forward, update = forward + adapters, update - linear + 3 * adapters
        head_passes -= 1
    return forward + head, update + head_passes * head


def traffic(rehearsal: Rehearsal) -> dict[str, tuple[float, float]]:
    """Bytes that the busiest rehearsed rank sends in scoring and updates by what the planner calls it, and the plan; of
    other groups by their own name, if they send more than a thousandth of everything."""
    workload = rehearsal.workload
    planned = {
        traffic.name: traffic.num_bytes
        for traffic in step_traffic(workload, layer_kind(rehearsal.config), num_parameters(workload.placement.arch))
    }
    by_rank = [_sent(played) for played in rehearsal.played.values()]
    busiest = {
        name: max(sent.get(name, 0.0) for sent in by_rank) for name in {name for sent in by_rank for name in sent}
    }
    found = {
        names[0]: (busiest.pop(purpose, 0.0), sum(planned.get(name, 0.0) for name in names))
        for purpose, names in _TRAFFIC.items()
    }
    least = sum(sent for sent, _ in found.values()) / 1000
    return found | {purpose: (sent, 0.0) for purpose, sent in busiest.items() if sent > least}


def _traffic_lines(rehearsal: Rehearsal) -> Iterator[str]:
    purposes = {name: purpose for purpose, (name, *_) in _TRAFFIC.items()}
    for name, (found, expected) in traffic(rehearsal).items():
        if expected or found:
            calls = max(_calls(played, purposes.get(name, name)) for played in rehearsal.played.values())
            sent = _beside("bytes", found / GIB, expected / GIB, "GiB")
            yield f"sent by one rank, {name}: {sent}, {calls} calls"
    num_events = sum(len(played.events) for played in rehearsal.played.values())
    groups = {event.group for played in rehearsal.played.values() for event in played.events}
    yield f"communications: {num_events} of the rehearsed ranks, in {len(groups)} groups"


def _of_step(played: Played) -> Iterator[Event]:
    """A rank's communications of the device's tensors in scoring and updates. Parameters that the first pass of all
    waits for, also if it only finds scales, are those of the update before."""
    of_step = ("score", "update")
    return (
        event
        for event in played.events
        if not event.is_host
        and (event.phase in of_step or (event.phase == "scales" and "DATA_PARALLEL" in event.group.purpose))
    )


def _calls(played: Played, purpose: str) -> int:
    """Collectives and sends of a rank in a kind of group."""
    return sum(_purpose(event) == purpose and event.operation not in ("receive", "wait") for event in _of_step(played))


def _purpose(event: Event) -> str:
    """What the group is for. The second of two stages sends in the group of all, beside the first one's."""
    is_between_stages = event.operation == "send" and event.group.purpose == "all"
    return "PIPELINE_MODEL_PARALLEL_GROUP" if is_between_stages else event.group.purpose


def _sent(played: Played) -> Mapping[str, float]:
    """Bytes that a rank sends in each kind of group: rings in collectives."""
    sent: dict[str, float] = defaultdict(float)
    for event in _of_step(played):
        sent[_purpose(event)] += _bytes_sent(event)
    return sent


def _bytes_sent(event: Event) -> float:
    size = len(event.group.ranks)
    shares = {
        "all_reduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
        "all_gather": size - 1,
        # Gathering parts of unequal sizes is a broadcast of each, and scattering sums of these a reduction.
        "broadcast": (size - 1) / size,
        "reduce": (size - 1) / size,
        "send": 1,
    }
    return event.num_bytes * shares.get(event.operation, 0)
