"""Describes a run before anything starts: layout, batch arithmetic, and what is missing on this machine."""

from pathlib import Path

from dapo_mega.config import DatasetConfig, DistillationConfig, RunConfig, SftConfig, TrainingConfig
from dapo_mega.config.fleet import parse_address
from dapo_mega.errors import InputError
from dapo_mega.models import Architecture, ModelFamily, load_architecture
from dapo_mega.models.families import find_family, read_architecture
from dapo_mega.models.peft_adapters import check_lora
from dapo_mega.models.stored_model import critic_architecture
from dapo_mega.planning.adapters import num_trained_parameters
from dapo_mega.planning.parameters import DTYPE_BYTES, num_active_parameters, num_mtp_parameters, num_parameters
from dapo_mega.planning.rank_layout import RankLayout


def describe_run(config: RunConfig, world_size: int) -> list[str]:
    """Lines that say how the run would be laid out. Raises InputError for contradictory settings."""
    _check_fleet(config)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lines, notes, data_size = _describe_model(
        config, world_size, "data.max_prompt_tokens + rollout.max_response_tokens", longest
    )
    if config.uses_critic:
        critic = config.critic
        lines.append(
            f"critic: starts from {critic.path or 'model.path'}; learning rate {critic.learning_rate:g} after "
            f"{critic.warmup_steps} warm-up steps, the first {critic.pretraining_steps} steps without policy updates"
            + (f", values clipped at {critic.value_clip:g}" if critic.value_clip else "")
        )
        notes += _critic_notes(config)
    if config.distillation:
        lines.append(_distillation_line(config.distillation))
        notes += _teacher_notes(config, config.distillation)
    lines.append(_rollout_line(config))
    lines += _batch_lines(config, data_size)
    notes += [note for key, dataset in config.data.by_key.items() for note in _missing_dataset(key, dataset)]
    return lines + [f"note: {note}" for note in notes]


def describe_fine_tuning(config: SftConfig, world_size: int) -> list[str]:
    """The same of supervised training."""
    lines, notes, data_size = _describe_model(config, world_size, "data.max_tokens", config.data.max_tokens)
    length = f"{config.epochs:g} epochs in" if config.epochs else f"{config.num_steps}"
    lines.append(
        f"run: {length} updates of {config.batch_samples} demonstrations, about "
        f"{config.batch_samples / data_size:g} per data-parallel rank, in micro-batches of at most "
        f"{config.tokens_per_microbatch} tokens; learning rate {config.optimizer.learning_rate:g} after "
        f"{config.optimizer.warmup_steps} warm-up steps, {config.optimizer.schedule}"
    )
    notes += [note for key, dataset in config.data.by_key.items() for note in _missing_dataset(key, dataset)]
    return lines + [f"note: {note}" for note in notes]


def _describe_model(
    config: TrainingConfig, world_size: int, length_keys: str, longest: int
) -> tuple[list[str], list[str], int]:
    """(lines on layout and model, notes, data-parallel size)."""
    parallel = config.parallel
    world_size = parallel.world_size or world_size
    arch, notes = find_architecture(config)
    if arch:
        arch.check_layout(parallel)
        arch.check_fp8(parallel, config.compute.fp8.scaling)
        if arch.needs_local_layers and config.model.layer_implementation != "local":
            notes.append(f"{arch.model_type} trains on local layers only: set model.layer_implementation=local")
        if config.lora:
            check_lora(config.lora, find_family(arch.model_type), arch, is_here=Path(config.lora.path or "").exists())
    try:
        data_size = parallel.data_size(world_size)
    except ValueError as error:
        raise InputError(str(error)) from error
    lines = [
        f"parallel layout: {world_size} processes = tensor {parallel.tensor} x pipeline "
        f"{parallel.pipeline}{f' x context {parallel.context}' if parallel.context > 1 else ''} x data {data_size}"
        + (", sequence parallel" if parallel.sequence else "")
        + (f", {parallel.virtual_pipeline} chunks per stage" if parallel.virtual_pipeline > 1 else "")
        + (f", experts over {parallel.expert}" if parallel.expert > 1 else "")
    ]
    if arch:
        if longest > arch.max_positions:
            raise InputError(
                f"{length_keys} = {longest} exceeds the model's max_position_embeddings={arch.max_positions}; shorten "
                f"one of them"
            )
        sizes = list(map(len, RankLayout(arch, parallel, world_size).stage_layers))
        per_stage = sizes[0] if len(set(sizes)) == 1 else ", ".join(map(str, sizes))
        lines.append(
            f"model: {arch.model_type}, {num_parameters(arch) / 1e6:,.1f} M parameters"
            + (f" ({num_active_parameters(arch) / 1e6:,.1f} M per token)" if arch.experts else "")
            + f", {arch.num_layers} layers ({per_stage} per stage), "
            f"hidden {arch.hidden_size}, "
            f"vocabulary {arch.vocab_size} (padded to {arch.padded_vocab_size(parallel.tensor)})"
        )
    if arch and arch.trains_mtp:
        lines.append(f"multi-token prediction: {num_mtp_parameters(arch) / 1e6:,.1f} M more parameters are trained")
    if arch and config.lora:
        trained = num_trained_parameters(arch, config.lora)
        lines.append(
            f"LoRA: {trained / 1e6:,.2f} M parameters are trained, {trained / num_parameters(arch):.2%} of the model's"
        )
        if isinstance(config, RunConfig) and config.sends_adapters:
            size_mib = trained * DTYPE_BYTES[config.model.dtype] / 2**20
            lines[-1] += f"; engines get {size_mib:,.1f} MiB at each update"
    return lines, notes, data_size


def _check_fleet(config: RunConfig) -> None:
    fleet = config.rollout.fleet
    if fleet.rendezvous:
        try:
            parse_address(fleet.rendezvous)
        except InputError as error:
            raise InputError(f"rollout.fleet.rendezvous={error}") from error
    elif 0 < len(fleet.urls) < fleet.min_engines:
        raise InputError(
            f"rollout.fleet.min_engines={fleet.min_engines}, but rollout.fleet.urls has {len(fleet.urls)}, so the run "
            f"would wait for ever; name all engines, or set min_engines to at most {len(fleet.urls)}"
        )


def _missing_dataset(name: str, dataset: DatasetConfig) -> list[str]:
    """A note on a dataset that is not here, as it may be on the cluster."""
    path = Path(dataset.path)
    if path.exists():
        return []
    return [
        f"{name}.path={path} is not on this machine; its columns and rows were not checked, and it must be there "
        f"when the run starts"
    ]


def find_architecture(config: TrainingConfig) -> tuple[Architecture | None, list[str]]:
    """The sizes of the model at `model.path`, or else of `model.architecture`, with notes on where they are from."""

    def trained(family: ModelFamily, arch: Architecture) -> Architecture:
        return family.with_mtp(arch) if config.model.train_mtp else arch

    if Path(config.model.path).is_dir():
        return trained(*load_architecture(Path(config.model.path))), []
    note = f"model.path={config.model.path} is not on this machine"
    if config.model.architecture is None:
        return None, [f"{note}; sizes are not checked against the model (give model.architecture to check them)"]
    file = Path(config.model.architecture)
    if not file.is_file():
        return None, [f"{note}, nor is model.architecture={file}; sizes are not checked against the model"]
    return trained(*read_architecture(file)), [f"{note}; sizes checked against {file}"]


def _critic_notes(config: RunConfig) -> list[str]:
    """A note if the critic's folder is not here. Raises InputError for a model that does not fit the layout or the
    policy's tokens."""
    if config.critic.path is None:
        return []
    path = Path(config.critic.path)
    if not path.is_dir():
        return [f"critic.path={path} is not on this machine; it is not checked against the policy and the layout"]
    (family, arch), policy = critic_architecture(path), find_architecture(config)[0]
    arch.check_layout(arch.layout_beside(config.parallel))
    if config.critic_lora:
        check_lora(config.critic_lora, family, arch)
    if policy and arch.vocab_size < policy.vocab_size:
        raise InputError(
            f"critic.path={path} has a vocabulary of {arch.vocab_size} tokens, and the policy one of "
            f"{policy.vocab_size}; give a critic that was made from a policy with the same tokenizer"
        )
    return []


def _distillation_line(distillation: DistillationConfig) -> str:
    listed = [
        f"{name} {teacher.path or 'at ' + ', '.join(teacher.urls)}" for name, teacher in distillation.teachers.items()
    ]
    if distillation.top_k:
        of_teacher = (
            f"; the loss has {distillation.coefficient:g} x the KL over a teacher's {distillation.top_k} tokens"
        )
    else:
        of_teacher = f" + {distillation.coefficient:g} x the teacher's"
    return (
        f"distillation: teachers {'; '.join(listed)}; advantages are {distillation.reward_weight:g} x the reward's"
        f"{of_teacher}"
    )


def _teacher_notes(config: RunConfig, distillation: DistillationConfig) -> list[str]:
    """Notes on folders that are not here. Raises InputError for a teacher that does not fit the layout."""
    notes = []
    for name, teacher in distillation.teachers.items():
        if teacher.path and Path(teacher.path).is_dir():
            arch = load_architecture(Path(teacher.path))[1]
            arch.check_layout(arch.layout_beside(config.parallel))
        elif teacher.path:
            notes.append(f"distillation.teachers.{name}.path={teacher.path} is not on this machine; it is not checked")
    return notes


def _rollout_line(config: RunConfig) -> str:
    rollout, sync = config.rollout, config.weight_sync
    if rollout.placement == "embedded":
        return f"rollouts: engines inside the trainer's processes, {config.engine_dtype}"
    engines = (
        f"{len(rollout.fleet.urls)} given"
        if rollout.fleet.urls
        else f"those that register at {rollout.fleet.rendezvous}"
    )
    return (
        f"rollouts: {rollout.placement} of SGLang engines ({engines}, at least {rollout.fleet.min_engines}), "
        f"{config.engine_dtype}; weights by {config.sync_transport}, responses in flight {sync.in_flight}"
        + (f" ({sync.pause})" if sync.in_flight == "continue" else "")
    )


def _batch_lines(config: RunConfig, data_size: int) -> list[str]:
    batch = config.batch
    responses = batch.groups_per_step * batch.group_size
    per_update = batch.mini_batch_groups * batch.group_size
    asked = config.generation_groups * batch.group_size
    return [
        f"rollout step: {batch.groups_per_step} groups x {batch.group_size} responses = {responses} responses kept; "
        f"{config.generation_groups} prompts x {batch.group_size} = {asked} responses generated per round, "
        f"at most {config.algorithm.max_generation_rounds} rounds",
        f"updates per step: {batch.updates_per_step} = {batch.epochs} epoch(s) x {batch.groups_per_step} / "
        f"{batch.mini_batch_groups} groups; {per_update} responses per update, about {per_update / data_size:g} per "
        f"data-parallel rank, in micro-batches of at most {batch.tokens_per_microbatch} tokens",
        f"lengths: prompt <= {config.data.max_prompt_tokens}, response <= {config.rollout.max_response_tokens}"
        + (
            f", overlong punishment from {config.rollout.max_response_tokens - config.reward.overlong_cache_tokens}"
            if config.reward.overlong_punishment
            else ""
        ),
        f"run: {config.num_steps} rollout steps, {config.num_steps * batch.updates_per_step} optimizer updates, "
        f"learning rate {config.optimizer.learning_rate:g} after {config.optimizer.warmup_steps} warm-up steps",
    ]
