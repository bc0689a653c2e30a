"""Serve rollouts: start the SGLang engines of one machine and keep them running until SIGTERM or Ctrl-C.

    export DAPO_MEGA_API_KEY=...           # the same secret for the trainer and all engines
    dapo-mega serve --model MODEL_FOLDER --num-engines 4 --tensor-parallel 2 --host 10.0.0.7 \\
        --rendezvous 10.0.0.1:21600 -- --context-length 32768

With `--rendezvous` (the trainer's rollout.fleet.rendezvous) the trainer finds the engines by itself, also after a
restart of trainer or engines. Otherwise give the trainer the URLs that are printed. Arguments after `--` go to SGLang
unchanged. Tensor parallelism stays within a machine. Without a GPU the engines run on the CPU.
"""

import argparse
import sys
from pathlib import Path

from dapo_mega.cli import quiet_libraries
from dapo_mega.commands._arguments import at_least_one


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The options; `extra` has the arguments after `--`."""
    ours, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        description="Start this machine's SGLang rollout engines.", epilog="Arguments after -- go to SGLang unchanged."
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the Hugging Face checkpoint to start from")
    add("--num-engines", type=at_least_one, default=1)
    add("--tensor-parallel", type=at_least_one, default=1, help="GPUs of one engine")
    add("--gpus", metavar="0,1,...", help="GPUs to use, by default all")
    add("--host", default="127.0.0.1", help="address to listen on, of one interface")
    add("--port", type=at_least_one, default=30000, help="port of engine 0; engine i gets this + i")
    add("--dtype", choices=("fp32", "bf16", "fp8"), help="default: bf16 on GPUs, fp32 on the CPU")
    add("--memory-fraction", type=float, help="share of a GPU's memory for weights and cache")
    add("--colocated", action="store_true", help="share the GPUs with the trainer, which frees the engines' memory")
    add("--with-text", action="store_true", help="also serve text, for clients besides the trainer")
    add("--router", type=at_least_one, metavar="PORT", help="start sglang-router in front of the engines, with text")
    add("--lora-rank", type=at_least_one, default=0, help="take LoRA adapters of at most this rank")
    add("--rendezvous", metavar="HOST:PORT", help="the trainer's rollout.fleet.rendezvous")
    add("--api-key-env", default="DAPO_MEGA_API_KEY", help="environment variable with the API key")
    add("--python", type=Path, default=Path(sys.executable), help="interpreter that has SGLang")
    add("--restart", type=_restarts, default=None, metavar="N|always", help="restarts of a dead engine")
    add(
        "--restart-hung-after-s",
        type=float,
        default=1800.0,
        metavar="S",
        help="restart an engine that answers no probe for so long, which must be longer than a weight update; 0: never",
    )
    add("--log-folder", type=Path, default=Path("runs/rollout_engines"))
    return parser.parse_args(ours, argparse.Namespace(extra=tuple(extra)))


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    quiet_libraries()
    from dapo_mega.config.fleet import parse_address, require_api_key
    from dapo_mega.engines.sglang.engine_commands import Node, check_node, check_router, sglang_gpus, share_of_gpus
    from dapo_mega.engines.sglang.serving import ServingOptions, serve

    api_key = require_api_key(options.api_key_env)
    if options.rendezvous is not None:
        parse_address(options.rendezvous)
    gpus = share_of_gpus(options.gpus, sglang_gpus(options.python), options.num_engines * options.tensor_parallel)
    node = Node(
        python=options.python,
        model=options.model,
        num_engines=options.num_engines,
        tp_size=options.tensor_parallel,
        host=options.host,
        port=options.port,
        dtype=options.dtype or ("bf16" if gpus else "fp32"),
        gpus=gpus,
        memory_fraction=options.memory_fraction,
        colocated=options.colocated,
        with_text=options.with_text or options.router is not None,
        lora_rank=options.lora_rank,
        extra=options.extra,
    )
    check_node(node)
    if options.router is not None:
        check_router(node, options.router)
    serve(
        node,
        ServingOptions(
            api_key=api_key,
            api_key_env=options.api_key_env,
            log_folder=options.log_folder,
            rendezvous=options.rendezvous,
            max_restarts=options.restart,
            # Colocated engines sleep while the policy trains.
            restart_hung_after_s=None if options.colocated else options.restart_hung_after_s or None,
            router_port=options.router,
        ),
    )


def _restarts(text: str) -> int | None:
    if text == "always":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor always")
    return int(text)
