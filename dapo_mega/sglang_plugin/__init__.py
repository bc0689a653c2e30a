"""What an SGLang server needs to take weights as the trainer can send them best: in pieces, and only what has changed.

SGLang loads it by itself where dapo_mega is installed in the server's environment (entry point `sglang.srt.plugins`;
`engine_commands.INSTALL_PLUGIN`).
Servers without it get weights in SGLang's own form.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dapo_mega.sglang_plugin.homes import Homes
from dapo_mega.sglang_plugin.joining import join_within_limit
from dapo_mega.sglang_plugin.receiving import ArrivingWeights, ChangedWeights
from dapo_mega.weight_sync.engine_groups import Lanes, lane_names
from dapo_mega.weight_sync.wire import (
    CHANGES_FORMAT,
    MODEL_FIELD,
    PROTOCOL,
    PROTOCOL_FIELD,
    PiecesFormat,
    tensor_specs,
)

logger = logging.getLogger(__name__)
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_homes: WeakKeyDictionary[Any, Homes] = WeakKeyDictionary()


def register() -> None:
    """Called by SGLang in each of its processes, which puts the hooks in place afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        module = importlib.import_module(_UPDATER)
        updater = module.WeightUpdater
        _ = updater.receive_weights_from_distributed, updater.load_weights_from_distributed, updater.end_weight_update
        _ = module.init_custom_process_group
    except (ImportError, AttributeError) as error:
        logger.warning("dapo_mega cannot extend this version of SGLang (0.5.23 is tested): %s", error)
        return
    HookRegistry.register(f"{_UPDATER}.init_custom_process_group", join_within_limit, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.load_weights_from_distributed", _load, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.end_weight_update", _end, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_internal_state", _announce, HookType.AFTER)


def _receive(receive: Callable[..., Any], updater: Any, **request: Any) -> Any:
    """Names with tensors, to be loaded while they arrive."""
    load_format = request["load_format"] or ""
    pieces = PiecesFormat.parse(load_format)
    if pieces is None and load_format != CHANGES_FORMAT:
        return receive(updater, **request)
    groups = [
        updater._model_update_group[name]
        for name in lane_names(request["group_name"], pieces.num_lanes if pieces else 1)
    ]
    specs = tensor_specs(request["names"], request["dtypes"], request["shapes"])
    if pieces is None:
        return ChangedWeights(groups[0], updater.device, specs)
    model = updater.get_model()
    homes = _homes.setdefault(model, Homes())
    homes.keep(model.parameters())
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


def _end(_: None, updater: Any, **__: Any) -> None:
    model = updater.get_model()
    if homes := _homes.get(model):
        homes.keep(model.parameters())


def _announce(state: Any, scheduler: Any, *_: Any) -> None:
    # Models that draft for another load what that one has received, when it is no longer there.
    if scheduler.server_args.speculative_algorithm is None:
        state.internal_state[PROTOCOL_FIELD] = PROTOCOL
    # As text: what a configuration holds need not be what SGLang's messages can.
    state.internal_state[MODEL_FIELD] = json.dumps(scheduler.model_config.hf_config.to_dict(), default=str)
