"""What an SGLang server needs to take weights as the trainer can send them best: in pieces, and only what has changed.

SGLang loads it by itself where dapo_mega is installed in the server's environment (entry point `sglang.srt.plugins`;
`engine_commands.INSTALL_PLUGIN`).
Servers without it get weights in SGLang's own form.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dapo_mega.engines.sglang.weight_protocol import (
    CHANGES_FORMAT,
    MODEL_FIELD,
    OTHER_MODEL,
    PROTOCOL,
    PROTOCOL_FIELD,
    PiecesFormat,
    tensor_specs,
)
from dapo_mega.sglang_plugin.homes import Differences, Homes
from dapo_mega.sglang_plugin.joining import join_within_limit
from dapo_mega.sglang_plugin.receiving import ArrivingWeights, ChangedWeights
from dapo_mega.weight_sync.engine_groups import Lanes, lane_names

logger = logging.getLogger(__name__)
_MOST_NAMED = 4
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
_homes: WeakKeyDictionary[Any, Homes] = WeakKeyDictionary()
_misfits: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def register() -> None:
    """Called by SGLang in each of its processes, which puts the hooks in place afterwards."""
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
    HookRegistry.register(f"{_UPDATER}.init_custom_process_group", join_within_limit, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.load_weights_from_distributed", _load, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.begin_weight_update", _begin, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.end_weight_update", _end, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.SchedulerWeightUpdaterManager.end_weight_update", _answer, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_internal_state", _announce, HookType.AFTER)


def _receive(receive: Callable[..., Any], updater: Any, **request: Any) -> Any:
    """Names with tensors, to be loaded while they arrive."""
    load_format = request["load_format"] or ""
    pieces = PiecesFormat.parse(load_format)
    homes = _homes.setdefault(updater.get_model(), Homes())
    if pieces is None:
        homes.miss()
    if pieces is None and load_format != CHANGES_FORMAT:
        return receive(updater, **request)
    groups = [
        updater._model_update_group[name]
        for name in lane_names(request["group_name"], pieces.num_lanes if pieces else 1)
    ]
    specs = tensor_specs(request["names"], request["dtypes"], request["shapes"])
    if pieces is None:
        return ChangedWeights(groups[0], updater.device, specs)
    homes.keep(updater.get_model().parameters())
    return ArrivingWeights(Lanes(groups), updater.device, specs, pieces, homes)


def _load(load: Callable[..., tuple[bool, str]], updater: Any, weights: Any) -> tuple[bool, str]:
    success, message = load(updater, weights)
    if isinstance(weights, ArrivingWeights):
        homes = _homes[updater.get_model()]
        if success and (left := homes.loaded()):
            success, message = False, f"the model's loader no longer copies {', '.join(left)}"
        if not success and not weights.is_broken:
            # The loader may not like tensors of ours. It gets plain ones when the trainer comes back with the weights.
            homes.close()
        weights.drain()
    if not isinstance(weights, ChangedWeights):
        return success, message
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group.cpu_group
    written: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(written, weights.written(), group=group)
    faults = weights.faults([part for parts in written for part in parts])
    if success and faults:
        return False, f"by their checksums these are not the trainer's after the update: {', '.join(faults)}"
    return success, message


def _begin(_: None, updater: Any) -> None:
    _homes.setdefault(updater.get_model(), Homes()).begin()


def _end(end: Callable[..., None], updater: Any, **request: Any) -> None:
    """Compares what was sent with what there is, before the model makes something else of its parameters."""
    model = updater.get_model()
    homes = _homes.setdefault(model, Homes())
    _misfits[model] = _misfit(_of_all_ranks(homes.differences(model.named_parameters())))
    end(updater, **request)
    homes.keep(model.parameters())


def _of_all_ranks(found: Differences) -> list[Differences]:
    """Of those that hold the parts of one model. Collective."""
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group.cpu_group
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, found, group=group)
    return everywhere


def _misfit(everywhere: Sequence[Differences]) -> str:
    """How this engine's model differs from the one whose weights were sent; empty where it does not."""
    unwritten = list(dict.fromkeys(name for names, _ in everywhere for name in names))
    unplaced = sorted(set.intersection(*(names for _, names in everywhere)))  # An expert may have its place elsewhere.
    parts = [f"it has {_listed(unwritten)}, for which no weights come"] if unwritten else []
    parts += [f"it has no place for {_listed(unplaced)}"] if unplaced else []
    return f"{OTHER_MODEL}: {'; '.join(parts)}" if parts else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _answer(output: Any, manager: Any, *_: Any) -> None:
    """Of a session that was closed."""
    misfit = _misfits.pop(manager.tp_worker.model_runner.weight_updater.get_model(), "")
    if misfit and output.success:
        output.success, output.message = False, misfit


def _announce(state: Any, scheduler: Any, *_: Any) -> None:
    # Models that draft for another load what that one has received, when it is no longer there.
    if scheduler.server_args.speculative_algorithm is None:
        state.internal_state[PROTOCOL_FIELD] = PROTOCOL
    # As text: what a configuration holds need not be what SGLang's messages can.
    state.internal_state[MODEL_FIELD] = json.dumps(scheduler.model_config.hf_config.to_dict(), default=str)
