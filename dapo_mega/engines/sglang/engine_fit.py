"""Whether an engine's settings fit a run."""

from __future__ import annotations

from dapo_mega.config import RunConfig
from dapo_mega.engines.sglang.engine_client import EngineInfo
from dapo_mega.engines.sglang.engine_commands import INSTALL_PLUGIN

_NAMES_OF_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def incompatibility(info: EngineInfo, config: RunConfig, vocab_size: int) -> str:
    """Why the engine cannot serve this run; empty when it can."""
    if info.vocab_size not in (None, vocab_size):
        return f"its model has a vocabulary of {info.vocab_size} tokens and the policy one of {vocab_size}"
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if info.context_length is not None and info.context_length < longest:
        return (
            f"its context of {info.context_length} tokens is shorter than data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest}; start it with --context-length {longest}"
        )
    size = config.rollout.fleet.engine_tensor
    if size is not None and info.tp_size != size:
        return (
            f"it runs on {info.tp_size} GPU(s) but rollout.fleet.engine_tensor={size}; start it with --tensor-parallel "
            f"{size}, or set rollout.fleet.engine_tensor to null"
        )
    wanted = config.engine_dtype
    if wanted == "fp8":
        if info.quantization != "fp8":
            return "it is not quantized to fp8 but rollout.dtype=fp8; start it with --dtype fp8"
    elif info.dtype not in (wanted, _NAMES_OF_DTYPES[wanted]):
        return (
            f"it computes in {info.dtype} but the run expects {_NAMES_OF_DTYPES[wanted]}; start it with --dtype "
            f"{wanted}, or set rollout.dtype"
        )
    if not info.supports_sessions and config.sync_transport != "disk":
        return (
            f"its SGLang {info.version} has no /begin_weight_update; use a newer SGLang (0.5.23 is tested) or "
            "weight_sync.transport=disk"
        )
    if config.lora and config.sends_adapters:
        if info.adapter_rank < config.lora.rank:
            return (
                f"it takes adapters of rank {info.adapter_rank} at most but lora.send=adapters sends lora.rank="
                f"{config.lora.rank}; start it with --lora-rank {config.lora.rank}, or set lora.send=merged"
            )
        if not info.has_plugin:
            return f"lora.send=adapters needs this version of dapo_mega in its environment ({INSTALL_PLUGIN})"
    if config.rollout.routing_replay and not info.returns_routes:
        return (
            "it does not say which experts tokens went through, as rollout.routing_replay=true needs; start it with "
            "-- --enable-return-routed-experts"
        )
    if config.rollout.stop and not info.knows_text:
        return "it has no tokenizer, by which it would find the texts of rollout.stop; start it with --with-text"
    sync = config.weight_sync
    if sync.in_flight == "continue" and sync.pause == "in_place" and not info.disable_radix_cache:
        return (
            "with weight_sync.pause=in_place its prefix cache would keep entries of old weights; start it with "
            "--disable-radix-cache, or use pause=retract or abort"
        )
    return ""


def no_engine(answer: str) -> str:
    """Why a server that gave this answer is refused."""
    return (
        f"it is no SGLang server ({answer}); give an engine's own URL, as launch/serve_rollouts.py "
        "prints it, with no router or proxy between"
    )
