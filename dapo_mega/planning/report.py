"""The plan of a run as lines of text."""

from collections.abc import Iterator, Sequence

from dapo_mega.config import RunConfig
from dapo_mega.planning.divisions import Division
from dapo_mega.planning.estimate import Assumptions, Estimate
from dapo_mega.planning.memory import (
    ASLEEP_BYTES,
    GIB,
    activation_model,
    activation_parts,
    cache_bytes_per_token,
    engine_weight_bytes,
    layer_kind,
)
from dapo_mega.planning.proposals import Proposal
from dapo_mega.planning.step_time import most_useful_engines

_LARGEST_SHOWN = 10
_PLACEMENTS = {
    "embedded": "with the embedded engine on each replica's leader",
    "fleet": "engines on GPUs of their own",
    "colocated": "with engines on the same GPUs",
}
_REMEDIES = {
    "parameters": "raise parallel.tensor or parallel.pipeline (or parallel.expert for experts)",
    "gradients": "raise parallel.tensor or parallel.pipeline (or parallel.expert for experts)",
    "optimizer": "add data-parallel replicas, or set compute.optimizer_offload",
    "activations and working set": "set compute.recompute=full, raise parallel.context or parallel.tensor with "
    "parallel.sequence=true, or lower batch.tokens_per_microbatch (not below the longest sample)",
    "rollout engine": "generate with SGLang engines: rollout.placement=fleet or colocated",
    "engine awake, at least": "raise --engine-tensor, set rollout.offload_trainer=true, or keep engines on "
    "GPUs of their own: rollout.placement=fleet",
    "weight sync": "lower weight_sync.bucket_mib",
    "weights to engines": "raise --engine-tensor, parallel.tensor or parallel.pipeline",
    "KV cache": "lower rollout.max_batch_rows or rollout.max_response_tokens",
    "reference model": "set algorithm.kl.coefficient=0",
    "teachers": "serve them: distillation.teachers.NAME.urls in place of path",
    "critic": "raise parallel.tensor or parallel.pipeline, set compute.optimizer_offload, or use an advantage without "
    "critic: algorithm.advantage=group_norm",
}


def report(plan: Estimate) -> Iterator[str]:
    """Lines on memory, tokens, schedule, communication and time, each with its assumptions."""
    yield from _memory_lines(plan)
    yield from _engine_lines(plan)
    yield from _schedule_lines(plan)
    yield from _traffic_lines(plan)
    yield from time_lines(plan)


def proposal_lines(
    proposals: Sequence[Proposal], num_valid: int, world_size: int, assumptions: Assumptions, config: RunConfig
) -> Iterator[str]:
    """Lines of the fastest layouts that fit, as overrides of `config`, with the parts of their time."""
    placement = config.rollout.placement
    available = assumptions.machine.memory_bytes - assumptions.reserved_bytes
    yield (
        f"layouts of {world_size} GPUs: {num_valid} are valid for this model, {len(proposals)} of them fit into "
        f"{available / GIB:.0f} GiB, {_PLACEMENTS[placement]}"
    )
    if not proposals:
        yield "  add GPUs, set compute.optimizer_offload=1, or " + (
            "raise --engine-tensor where the engines do not fit"
            if placement == "fleet"
            else "generate with engines on GPUs of their own: rollout.placement=fleet "
            "rollout.fleet.rendezvous=HOST:PORT"
        )
    for proposal in proposals[:_LARGEST_SHOWN]:
        memory, time = proposal.estimate.worst, proposal.estimate.time
        text = " ".join(proposal.overrides(config))
        data_size = proposal.estimate.workload.placement.data_size
        yield (
            f"  {seconds(time.total):>8} s  {memory.total / GIB:5.1f} GiB on stage {memory.stage}  "
            f"{text or 'as in the file'} (data {data_size}): {proposal.reason}"
        )


def division_lines(divisions: Sequence[Division], num_gpus: int, config: RunConfig, num_rounds: float) -> Iterator[str]:
    """Lines of the fastest divisions of `num_gpus`, as overrides of `config`, with the parts of their time."""
    yield f"divisions of {num_gpus} GPUs between trainer and engines: {len(divisions)} fit; the fastest:"
    if not divisions:
        yield "  add GPUs, set compute.recompute=full, or raise --engine-tensor where the engines do not fit"
        return
    for division in divisions[:_LARGEST_SHOWN]:
        plan, engines = division.plan, division.plan.engine
        trainer = plan.workload.placement.world_size
        where = "in turns on all" if engines.is_colocated else f"trainer {trainer} + engines {num_gpus - trainer}"
        yield (
            f"  {3600 / division.seconds:7.2f} steps/hour  {where}: {seconds(division.seconds)} s = "
            f"{seconds(division.generation_seconds)} generation + {seconds(plan.time.total)} training and weights; "
            f"{division.num_engines} engine(s) of tensor {engines.tensor}, each {plan.generation.rows} responses at "
            f"once, {seconds(plan.generation.tokens_per_second)} tokens/s; {plan.worst.total / GIB:.1f} GiB on stage "
            f"{plan.worst.stage}"
        )
        yield f"      {' '.join(division.overrides(config)) or 'as in the file'}"
    plan = divisions[0].plan
    yield (
        f"  assumed: {num_rounds:g} round(s) of generation a step (--rounds), each until its longest response of "
        f"{plan.workload.config.rollout.max_response_tokens} tokens ends, {plan.workload.mean_response:.0f} on "
        "average; then training, as rollout.schedule=synchronous does; add --simulate to compare with asynchronous"
    )
    yield from assumed_lines(plan)


def _memory_lines(plan: Estimate) -> Iterator[str]:
    workload = plan.workload
    config = workload.config
    kind = layer_kind(config)
    shape = workload.full_micro_batch()
    yield f"memory per GPU in GiB, by pipeline stage ({config.model.dtype}, {kind} layers):"
    names = list(dict.fromkeys(n for stage in plan.stages for n in (*stage.always, *stage.either, *stage.lent)))
    yield "  stage" + "".join(f"{name:>{len(name) + 3}}" for name in [*names, "total"])
    for stage in plan.stages:
        parts = {**stage.always, **stage.either, **stage.lent, "total": stage.total}
        texts = {name: f"{parts[name] / GIB:.2f}" if name in parts else "-" for name in [*names, "total"]}
        yield f"  {stage.stage:5}" + "".join(f"{text:>{len(name) + 3}}" for name, text in texts.items())
    yield from _activation_lines(plan)
    if config.uses_critic:
        yield "  assumed: critic and policy never hold activations at once; a critic not here has the policy's sizes"
    if workload.placement.arch.experts:
        yield "  assumed: every expert gets as many tokens as the others; a busier one needs more"
    yield (
        "  activations: formulas checked against real allocations on the CPU (tests/distributed/test_planning.py)"
        if kind == "local"
        else "  activations: formulas checked against what Transformer Engine's Python keeps, without parallelism "
        "(tests/te_cpu), and on one H100"
    )
    if config.compute.fp8.enabled:
        yield "  FP8: weights kept twice (one transposed), operands of products in one byte; on one H100 within 4 %"
    yield (
        f"  micro-batch: {shape.num_tokens} tokens in {len(shape.lengths)} sequence(s) of at most "
        f"{max(shape.lengths)}, all of them scored; {plan.assumptions.reserved_bytes / GIB:.1f} GiB are left to "
        "CUDA, NCCL and fragmentation"
    )
    yield from _verdict(plan)


def _activation_lines(plan: Estimate) -> Iterator[str]:
    workload, stage = plan.workload, plan.worst.stage
    config = workload.config
    kept, handed, working = activation_parts(workload, workload.placement, stage)
    model = activation_model(workload, workload.placement)
    held = max(workload.placement.held_forwards(stage, workload.micro_batches(workload.longest)), key=sum)
    one = sum(model.chunk(chunk) for chunk in workload.placement.chunks(stage)) / len(held)
    yield (
        f"  activations of stage {stage}: {kept / GIB:.1f} GiB kept for backward ({sum(held)} forward passes in "
        f"flight, {one / GIB:.2f} GiB each; recompute {config.compute.recompute}), {handed / GIB:.2f} held by the "
        f"schedule, {working / GIB:.2f} working set"
    )


def _verdict(plan: Estimate) -> Iterator[str]:
    worst, memory = plan.worst, plan.assumptions.machine.memory_bytes
    text = f"{worst.total / GIB:.1f} GiB on stage {worst.stage} of {plan.available / GIB:.1f} GiB"
    if worst.total <= plan.available:
        yield f"  fits: {text}"
        return
    parts = worst.lent if worst.total == max(worst.lent.values(), default=0.0) else {**worst.always, **worst.either}
    large = sorted(parts, key=lambda name: -parts[name])[:2]
    yield f"  DOES NOT FIT into {memory / GIB:.0f} GiB: {text}; largest: " + "; ".join(
        f"{name} {parts[name] / GIB:.1f} GiB ({_REMEDIES.get(name, 'lower it')})" for name in large
    )


def _engine_lines(plan: Estimate) -> Iterator[str]:
    workload, engine, generated = plan.workload, plan.engine, plan.generation
    placement = workload.placement
    per_token, allowed = cache_bytes_per_token(placement, engine), workload.config.rollout.fleet.requests_per_engine
    everything = workload.generated_per_round * workload.longest * per_token * engine.tensor
    yield (
        f"rollout engine: {_where(plan)}, tensor {engine.tensor}, {engine.dtype}; per GPU "
        f"{engine_weight_bytes(engine, placement.arch) / GIB:.1f} GiB weights, KV cache {per_token / 1024:.0f} KiB per "
        f"token; a round's {workload.generated_per_round} responses at {workload.longest} tokens would hold "
        f"{everything / GIB:,.0f} GiB over all engines"
    )
    if engine.is_colocated:
        yield from _sharing_lines(plan)
    if not engine.is_embedded:
        text = (
            f"{plan.least_engine_memory / GIB:.1f} GiB per GPU for weights and the cache of one longest response, of "
            f"{plan.engine_memory / GIB:.1f} GiB"
        )
        yield f"  engines fit: {text}" if plan.engine_fits else f"  ENGINES DO NOT FIT: {text}; raise --engine-tensor"
    if generated.rows:
        yield (
            f"  {generated.rows} responses at once per engine"
            + (" (rollout.fleet.requests_per_engine)" if generated.rows == allowed and not engine.is_embedded else "")
            + (f" in {generated.cache_bytes / GIB:.1f} GiB of cache per GPU" if not engine.is_embedded else "")
            + f", {seconds(generated.tokens_per_second)} tokens/s; one round of decoding about "
            f"{seconds(generated.seconds)} s"
        )
        if not engine.is_embedded and not engine.is_colocated:
            most = most_useful_engines(workload, generated.rows)
            yield (
                f"  with {most} engines on {most * engine.tensor} GPUs a round's longest response sets the pace; more "
                "of them gain little"
            )


def _where(plan: Estimate) -> str:
    engine, given, fleet = plan.engine, plan.assumptions, plan.workload.config.rollout.fleet
    if engine.is_embedded:
        return "embedded, one on each replica's leader"
    count = engine.num_engines(plan.workload.placement.data_size)
    tensor = "" if given.engine_tensor or fleet.engine_tensor else "; --engine-tensor plans other sizes"
    if engine.is_colocated:
        return f"colocated, {count} engine(s) on the trainer's GPUs{tensor}"
    source = "--engine-gpus" if given.engine_gpus else "rollout.fleet, --engine-gpus plans others"
    return f"{engine.num_gpus} GPUs of their own, {count} engine(s) ({source}{tensor})"


def _sharing_lines(plan: Estimate) -> Iterator[str]:
    machine, placement = plan.assumptions.machine, plan.workload.placement
    resident = max(sum(s.always.values()) for s in plan.stages) / GIB
    asleep = f"{ASLEEP_BYTES / GIB:.0f} GiB assumed for an engine asleep"
    yield (
        f"  a GPU is shared in turns: the trainer's {resident:.1f} GiB (with {asleep}) "
        + (
            f"leave it while engines generate (rollout.offload_trainer), but for {asleep}; while weights are sent, the "
            f"policy's are beside the engine's; "
            if plan.workload.config.rollout.offload_trainer
            else "stay, activations and awake engines take turns; "
        )
        + f"start engines with --colocated --memory-fraction "
        f"{int(100 * plan.engine_memory / machine.memory_bytes) / 100:.2f} or less"
    )
    if placement.world_size > machine.gpus_per_node and plan.workload.config.sync_transport == "tensor":
        yield (
            f"  note: colocated engines get weights through the memory of one machine (weight_sync.transport=tensor), "
            f"and {placement.world_size} GPUs are on several: use rollout.placement=fleet or weight_sync.transport=disk"
        )


def _schedule_lines(plan: Estimate) -> Iterator[str]:
    workload = plan.workload
    mean, largest = workload.mean_length, workload.longest
    num_micro_batches = workload.micro_batches(mean)
    yield (
        f"tokens per step: {workload.responses_per_step * mean / 1e6:,.1f} M on average (prompt "
        f"{workload.mean_prompt:.0f} + response {workload.mean_response:.0f} assumed), at most "
        f"{workload.responses_per_step * largest / 1e6:,.1f} M"
    )
    yield (
        f"micro-batches per rank and update: {num_micro_batches} of {workload.micro_batch_tokens:,.0f} tokens on "
        f"average, {workload.micro_batches(largest)} at most; {workload.config.batch.updates_per_step} updates per "
        f"step; pipeline bubble {workload.placement.bubble_share(num_micro_batches):.1%} of a stage's time"
    )


def _traffic_lines(plan: Estimate) -> Iterator[str]:
    machine = plan.assumptions.machine
    yield "communication per step, sent by one GPU:"
    for traffic in plan.traffic:
        where = "within a node" if traffic.span <= machine.gpus_per_node else "between nodes"
        hidden = ", overlapped with computing" if traffic.overlaps else ""
        yield (
            f"  {traffic.name:36} {traffic.num_bytes / GIB:10,.2f} GiB {where}{hidden}, "
            f"{machine.seconds(traffic):,.1f} s on the wire"
        )
    if not plan.traffic:
        yield "  none"


def time_lines(plan: Estimate) -> Iterator[str]:
    """The lines on a step's time and the speeds that it assumes."""
    time = plan.time
    yield (
        f"step time without generation: {seconds(time.total)} s = {seconds(time.scoring)} scoring + "
        f"{seconds(time.updates)} updates + {seconds(time.bubble)} bubble + {seconds(time.communication)} "
        f"communication not hidden + {seconds(time.weights)} weights to engines"
        f" + {seconds(time.besides)} besides; with one round of generation "
        f"{seconds(time.total + plan.generation.seconds)} s"
    )
    yield from assumed_lines(plan)


def assumed_lines(plan: Estimate) -> Iterator[str]:
    """The line on the speeds that a plan assumes."""
    machine = plan.assumptions.machine
    yield (
        f"  assumed: {machine.flops / 1e12:.0f} TFLOP/s x {machine.flops_share:.2f}, "
        f"{machine.intra_node_bytes / 1e9:.0f} GB/s within and {machine.inter_node_bytes / 1e9:.0f} GB/s between nodes "
        f"of {machine.gpus_per_node} GPUs, memory {machine.memory_rate / 1e12:.2f} TB/s x "
        f"{machine.memory_rate_share:.2f}; equal micro-batches, rewards and checkpoints left out, the last stage (with "
        "the output layer) sets the pace"
    )


def seconds(value: float) -> str:
    """Seconds as text: whole ones, below ten two digits that count."""
    return f"{value:,.0f}" if value >= 9.95 or value == 0 else f"{value:.2g}"
