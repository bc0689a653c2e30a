"""SGLang plugin: receives all weights of an update in one call, compares them with the engine's model, and lets
engines on CPUs be deterministic and have adapters.

SGLang loads the plugin if dapo_mega is installed in the server's environment (entry point `sglang.srt.plugins`;
`engine_commands.INSTALL_PLUGIN`). Servers without it get weights in SGLang's own encoding.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dapo_mega.engines.sglang.weight_protocol import (
    ADAPTER,
    MODEL_FIELD,
    OTHER_MODEL,
    PROTOCOL,
    PROTOCOL_FIELD,
    PlanFormat,
    PlannedBucket,
    UpdatePlan,
    group_with,
)
from dapo_mega.sglang_plugin.coverage import Differences, LoadTrace
from dapo_mega.sglang_plugin.cpu_adapters import allow_adapters, allow_routes
from dapo_mega.sglang_plugin.cpu_determinism import offer_determinism
from dapo_mega.sglang_plugin.joining import join_within_limit
from dapo_mega.sglang_plugin.receiving import ArrivingWeights, ChangedWeights
from dapo_mega.weight_sync.engine_groups import EngineGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")
_MOST_NAMED = 4
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
# All by model.
_traces: WeakKeyDictionary[Any, LoadTrace] = WeakKeyDictionary()
_misfits: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
# The last one, by its digest.
_plans: dict[str, UpdatePlan] = {}


class PlannedWeights(NamedTuple):
    """The buckets of a call in the order in which they come, each with the group in which it comes."""

    buckets: Sequence[tuple[PlannedBucket, EngineGroup]]
    window_bytes: int
    is_adapter: bool


def register() -> None:
    """Register the hooks; SGLang calls this in each of its processes and installs them afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        module = importlib.import_module(_UPDATER)
        updater = module.WeightUpdater
        _ = updater.receive_weights_from_distributed, updater.load_weights_from_distributed, updater.end_weight_update
        _ = module.init_custom_process_group, updater.begin_weight_update
        _ = importlib.import_module(_MANAGER).SchedulerWeightUpdaterManager.end_weight_update
    except (ImportError, AttributeError) as error:
        logger.warning("dapo_mega cannot extend this version of SGLang (0.5.23 is tested): %s", error)
        return
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        try:
            offer_determinism()
            allow_adapters()
            allow_routes()
        except (ImportError, AttributeError) as error:
            logger.warning("this version of SGLang cannot do all on a CPU that it could (0.5.23 is tested): %s", error)
    HookRegistry.register(f"{_UPDATER}.init_custom_process_group", join_within_limit, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.load_weights_from_distributed", _load, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.begin_weight_update", _begin, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.end_weight_update", _end, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.SchedulerWeightUpdaterManager.end_weight_update", _answer, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_internal_state", _announce, HookType.AFTER)


def _trace(updater: Any) -> LoadTrace:
    return _traces.setdefault(updater.get_model(), LoadTrace())


def _receive(receive: Callable[..., Any], updater: Any, **request: Any) -> Any:
    """What `_load` loads: the buckets of a plan, or what SGLang has received in a form of its own."""
    call = PlanFormat.parse(request["load_format"] or "")
    if call is None:
        _trace(updater).miss()
        return receive(updater, **request)
    if call.text:
        _plans.clear()
        _plans[call.digest] = UpdatePlan.parse(call.text)
    plan, groups = _plans[call.digest], updater._model_update_group
    buckets = [(bucket, groups[group_with(request["group_name"], bucket.sender)]) for bucket in plan.in_turn(call.turn)]
    return PlannedWeights(buckets, plan.window_bytes, plan.is_adapter)


def _load(load: Callable[..., tuple[bool, str]], updater: Any, weights: Any) -> tuple[bool, str]:
    """Receive and load the buckets of a plan one after the other, up to the first that fails."""
    if not isinstance(weights, PlannedWeights):
        return load(updater, weights)
    if weights.is_adapter:
        return _load_adapter(updater, weights)
    success, message = True, ""
    for bucket, group in weights.buckets:
        if bucket.lengths:
            chunks = ArrivingWeights(group, updater.device, bucket, weights.window_bytes, _trace(updater))
            success, message = load(updater, chunks)
            if not success and not chunks.is_broken:
                # The loader may not accept traced tensors: it gets plain ones when they are sent again.
                _trace(updater).close()
            chunks.drain()
        else:
            success, message = _load_changes(load, updater, ChangedWeights(group, updater.device, bucket.specs))
        if not success:
            break
    return success, message


def _load_adapter(updater: Any, weights: PlannedWeights) -> tuple[bool, str]:
    """Give the adapter new matrices; requests under way, which know it by its id, go on with these."""
    _trace(updater).miss()
    device, window = updater.device, weights.window_bytes
    arriving = (ArrivingWeights(group, device, bucket, window) for bucket, group in weights.buckets)
    try:
        tensors = {name: tensor for bucket in arriving for name, tensor in bucket}
    except RuntimeError as error:
        return False, f"the adapter did not come: {error}"
    manager = updater.get_model_runner().lora_manager
    known = next((adapter for adapter in manager.lora_refs.values() if adapter.lora_name == ADAPTER), None)
    if known is None:
        return False, f"it has no adapter {ADAPTER!r} any more"
    config = manager.configs[known.lora_id].hf_config
    manager.unload_lora_adapter(known)
    answer = manager.load_lora_adapter_from_tensors(known, tensors, config)
    return answer.success, answer.error_message


def _load_changes(load: Callable[..., tuple[bool, str]], updater: Any, weights: ChangedWeights) -> tuple[bool, str]:
    """Also compares checksums of the changed tensors."""
    _trace(updater).miss()
    success, message = load(updater, weights)
    parts = _everywhere(weights.written() if success else None)
    if success and None in parts:
        return False, "not all ranks got the changes"
    faults = weights.faults([part for written in parts if written for part in written]) if success else []
    if faults:
        return False, f"after the update the checksums of these weights are not the trainer's: {', '.join(faults)}"
    return success, message


def _everywhere(found: T) -> list[T]:
    """What was found on each tensor-parallel rank. Collective over these ranks."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group.cpu_group
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, found, group=group)
    return everywhere


def _begin(_: None, updater: Any) -> None:
    _trace(updater).begin()


def _end(end: Callable[..., None], updater: Any, **request: Any) -> None:
    """Compare the sent weights with the model, before SGLang's post-processing replaces parameters."""
    model = updater.get_model()
    _misfits[model] = _model_difference(_everywhere(_trace(updater).differences(model.named_parameters())))
    end(updater, **request)


def _model_difference(everywhere: Sequence[Differences]) -> str:
    """How this engine's model differs from the model of the sent weights; empty if it does not."""
    unwritten = list(dict.fromkeys(name for names, _ in everywhere for name in names))
    unplaced = sorted(set.intersection(*(names for _, names in everywhere)))  # Another rank may have the expert.
    parts = [f"it has {_listed(unwritten)}, for which no weights come"] if unwritten else []
    parts += [f"it has no place for {_listed(unplaced)}"] if unplaced else []
    return f"{OTHER_MODEL}: {'; '.join(parts)}" if parts else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _answer(output: Any, manager: Any, *_: Any) -> None:
    """Turn the answer to /end_weight_update into an error if the model differs."""
    misfit = _misfits.pop(manager.tp_worker.model_runner.weight_updater.get_model(), "")
    if misfit and output.success:
        output.success, output.message = False, misfit


def _announce(state: Any, scheduler: Any, *_: Any) -> None:
    # A draft model would load the main model's weights again, when they are already freed.
    if scheduler.server_args.speculative_algorithm is None:
        state.internal_state[PROTOCOL_FIELD] = PROTOCOL
    # As text, because SGLang's messages cannot hold all types of a configuration's values.
    state.internal_state[MODEL_FIELD] = json.dumps(scheduler.model_config.hf_config.to_dict(), default=str)
