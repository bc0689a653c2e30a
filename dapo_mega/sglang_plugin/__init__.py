"""SGLang plugin: receives all weights of an update in one call, compares them with the engine's model, packs log-probs,
draws no id that pads the vocabulary, and lets engines on CPUs be deterministic and have adapters.

SGLang loads the plugin if dapo_mega is installed in the server's environment (entry point `sglang.srt.plugins`;
`engine_commands.INSTALL_PLUGIN`). Servers without it get weights in SGLang's own encoding.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pybase64

from dapo_mega.distributed import accelerator
from dapo_mega.distributed.event_loops import DAEMON_THREADS
from dapo_mega.engines.sglang.weight_protocol import (
    MODEL_FIELD,
    OTHER_MODEL,
    PACKED_LOGPROBS,
    PATIENCE,
    PROTOCOL,
    PROTOCOL_FIELD,
    limit_of_group,
)
from dapo_mega.sglang_plugin.cpu_adapters import allow_adapters, allow_routes
from dapo_mega.sglang_plugin.cpu_determinism import offer_determinism
from dapo_mega.sglang_plugin.receiving import Differences, everywhere, load_weights, receive_weights, trace_of
from dapo_mega.sglang_plugin.vocabulary import choose_without_padding, draw_without_padding

logger = logging.getLogger(__name__)
_MOST_NAMED = 4
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
_ANSWERS = "sglang.srt.managers.tokenizer_manager"
_SAMPLER = "sglang.srt.layers.sampler"
_misfits: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # By model.
_SGLANGS_LIMIT_S = 1800.0


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
    HookRegistry.register(
        f"{_UPDATER}.WeightUpdater.receive_weights_from_distributed", receive_weights, HookType.AROUND
    )
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.load_weights_from_distributed", load_weights, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.begin_weight_update", _begin, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.WeightUpdater.end_weight_update", _end, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.SchedulerWeightUpdaterManager.end_weight_update", _answer, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.get_internal_state", _announce, HookType.AFTER)
    with contextlib.suppress(ImportError, AttributeError):  # Else answers have SGLang's own triples.
        _ = importlib.import_module(_ANSWERS).TokenizerManager.add_logprob_to_meta_info
        HookRegistry.register(f"{_ANSWERS}.TokenizerManager.add_logprob_to_meta_info", pack_logprobs, HookType.AROUND)
    HookRegistry.register(f"{_SAMPLER}.Sampler._sample_from_probs", draw_without_padding, HookType.AROUND)
    HookRegistry.register(f"{_SAMPLER}.Sampler.forward", choose_without_padding, HookType.AROUND)


def join_within_limit(join: Callable[..., Any], *arguments: Any, **group: Any) -> Any:
    """Call `join` in a thread; raises TimeoutError after the limit in the group's name, if there is one.

    An engine does nothing else while it joins, even if the trainer is killed meanwhile, and torch would try for half an
    hour, or wait forever for a store that accepts but does not answer. The thread cannot be interrupted. It ends when
    torch gives up or the store's machine is gone.
    """
    limit_s = limit_of_group(str(group.get("group_name")))
    if limit_s is None:
        return join(*arguments, **group)
    # gloo fails a broadcast at this limit. With NCCL torch ends the process, so the trainer must give up earlier.
    group["timeout"] = timedelta(seconds=min(PATIENCE * limit_s, _SGLANGS_LIMIT_S))
    device = accelerator.device()

    def run() -> Any:
        if device.index is not None:
            accelerator.select(device.index)  # The current device is per thread.
        return join(*arguments, **group)

    joined = DAEMON_THREADS.submit(run)
    try:
        return joined.result(limit_s)
    except TimeoutError as error:
        if joined.done():
            raise
        raise TimeoutError(f"the trainer at {group.get('init_method')} did not come within {limit_s:g} s") from error


def pack_logprobs(
    add: Callable[..., None], manager: Any, meta_info: dict[str, Any], state: Any, *arguments: Any, **named: Any
) -> None:
    """Add a whole response's log-probs as `PACKED_LOGPROBS` says, if its request asked for that."""
    request = state.obj
    custom = request.sampling_params.get("custom_params") if isinstance(request.sampling_params, dict) else None
    if request.stream or not (isinstance(custom, dict) and custom.get(PACKED_LOGPROBS)):
        add(manager, meta_info, state, *arguments, **named)
    elif named.get("finished"):
        ids = np.array(state.output_token_logprobs_idx, np.int32)
        logprobs = np.array(state.output_token_logprobs_val, np.float32)
        meta_info["output_token_logprobs"] = pybase64.b64encode(ids.tobytes() + logprobs.tobytes()).decode()


def _begin(_: None, updater: Any) -> None:
    trace_of(updater).begin()


def _end(end: Callable[..., None], updater: Any, **request: Any) -> None:
    """Compare the sent weights with the model, before SGLang's post-processing replaces parameters."""
    model = updater.get_model()
    _misfits[model] = _model_difference(everywhere(trace_of(updater).differences(model.named_parameters())))
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
