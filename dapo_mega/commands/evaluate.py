"""Evaluate a model on benchmarks: avg@k, pass@k, maj@k with intervals; all responses are kept.

dapo-mega evaluate MODEL --benchmarks aime24,math500 --data FOLDER
dapo-mega evaluate runs/mine --step 100 --benchmarks gsm8k=test.jsonl --engine sglang --num-engines 8
dapo-mega evaluate --config my_run.yaml model.path=MODEL data.evaluation.path=FILE

MODEL is a Hugging Face checkpoint, a run's folder or one of its checkpoints. Started again after an interruption, the
command continues. With --config the prompts are data.evaluation of a run's file, judged as that run judges.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from dapo_mega.cli import leave_at_sigterm, quiet_libraries
from dapo_mega.commands._arguments import at_least_one, json_object
from dapo_mega.errors import InputError

if TYPE_CHECKING:
    from dapo_mega.config import RunConfig
    from dapo_mega.engines.sglang.engine_commands import Node
    from dapo_mega.engines.sglang.serving import ServingOptions
    from dapo_mega.evaluation.fleet import FleetSampler
    from dapo_mega.evaluation.run import Engine
    from dapo_mega.types import Prompt

_BATCH_ROWS = 64
_URLS_LIMIT_S = 300.0
_MAX_RESTARTS = 3
_HUNG_S = 1800.0
_WITH_CONFIG = ("config", "positional", "output", "samples")
_ONLY_SGLANG = ("num_engines", "tensor_parallel", "gpus", "python", "memory_fraction", "deterministic")


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    quiet_libraries()
    if options.config is not None:
        _evaluate_run_file(options)
        return
    if len(options.positional) != 1:
        given = f"{len(options.positional)} are given" if options.positional else "none is given"
        raise InputError(f"evaluate takes one MODEL, and {given}; overrides (section.key=value) need --config")
    _evaluate_model(options, Path(options.positional[0]))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options; `extra` has the arguments after `--`. Raises InputError for options that exclude each other."""
    ours, extra = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        description="Evaluate a model on benchmarks.", epilog="Arguments after -- go to SGLang unchanged."
    )
    parser.add_argument(
        "positional",
        nargs="*",
        metavar="MODEL",
        help="Hugging Face checkpoint, run's folder or checkpoint of a run; with --config overrides of its keys",
    )
    _add_model_and_benchmarks(parser)
    _add_sampling(parser)
    _add_engine(parser)
    held_out = parser.add_argument_group("evaluating data.evaluation of a run's file")
    held_out.add_argument("--config", type=Path, help="YAML file of the run")
    held_out.add_argument("--samples", type=Path, metavar="FOLDER", help="also write all responses there")
    options = parser.parse_intermixed_args(ours)
    if options.config is not None:
        given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
        if useless := [f"--{name.replace('_', '-')}" for name in given if name not in _WITH_CONFIG]:
            raise InputError(
                f"--config excludes {', '.join(useless)}: the run's file decides; override its keys, such as "
                f"evaluation.samples_per_prompt=4, or give MODEL with --benchmarks"
            )
    elif options.samples:
        raise InputError("--samples is for --config; of benchmarks all responses are written to --output")
    options.extra = tuple(extra)
    if options.urls and options.engine == "embedded":
        raise InputError("--urls names SGLang engines, and --engine is embedded; leave one of them out")
    if options.engine is None:
        options.engine = "sglang" if options.urls else "embedded"
    starts_engines = options.engine == "sglang" and not options.urls
    if not starts_engines and (extra or any(getattr(options, name) is not None for name in _ONLY_SGLANG)):
        raise InputError(
            "--num-engines, --tensor-parallel, --gpus, --python, --memory-fraction, --no-deterministic and what stands "
            "after -- are for engines that this command starts; add --engine sglang, without --urls"
        )
    if starts_engines and options.deterministic is not False:
        from dapo_mega.engines.sglang.engine_commands import DETERMINISTIC

        options.extra = (*extra, *(() if DETERMINISTIC in extra else (DETERMINISTIC,)))
    return options


def _add_model_and_benchmarks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--step", type=int, metavar="N", help="of a run's folder: the checkpoint (default: the newest)")
    add("--benchmarks", metavar="NAME[=FILE],...", help="such as aime24,math500=math500.jsonl; tools/evaluation.md")
    add("--data", type=Path, metavar="FOLDER", help="benchmarks' files (default: the hub)")
    add(
        "--output",
        type=Path,
        help="folder of responses and results (default: runs/evaluations/MODEL); with --config a JSON file",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    from dapo_mega.config.components.built_in import AnswerComponent
    from dapo_mega.evaluation.choices import Choices

    extractions = get_args(AnswerComponent.model_fields["extraction"].annotation)
    sampling = parser.add_argument_group("sampling and grading")
    add = sampling.add_argument
    add("--k", type=at_least_one, help="responses to each problem (default: the benchmark's)")
    add("--temperature", type=float, default=Choices.temperature, help="default: %(default)s")
    add("--top-p", type=float, default=Choices.top_p, help="default: %(default)s")
    add(
        "--max-tokens",
        type=at_least_one,
        help="longest response (default: 8192, or three quarters of the model's context if that is less)",
    )
    add("--seed", type=int, default=Choices.seed)
    add("--num-problems", type=at_least_one, metavar="N", help="only the first N of each benchmark")
    add("--template", default=Choices.template, help="default: %(default)s; tools/data.md")
    add("--grader", choices=extractions, default=Choices.extraction, help="where answers are (default: %(default)s)")
    add("--chat-template", choices=("auto", "on", "off"), default="auto", help="auto: if the tokenizer has one")
    add(
        "--template-arguments",
        type=json_object,
        default={},
        metavar="JSON",
        help="""such as '{"enable_thinking": false}'""",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", choices=("embedded", "sglang"), help="default: embedded, with --urls sglang")
    engine.add_argument("--urls", metavar="URL,...", help="SGLang engines that run and serve MODEL")
    engine.add_argument("--dtype", choices=("fp32", "bf16"), help="default: bf16 on a GPU, fp32 on the CPU")
    engine.add_argument(
        "--batch-rows",
        type=at_least_one,
        default=_BATCH_ROWS,
        help="embedded: responses at once (default: %(default)s)",
    )
    engine.add_argument("--api-key-env", default="DAPO_MEGA_API_KEY", help="variable with the key of --urls")
    started = parser.add_argument_group("SGLang engines that this command starts and ends")
    started.add_argument("--num-engines", type=at_least_one)
    started.add_argument("--tensor-parallel", type=at_least_one, help="GPUs of one engine")
    started.add_argument("--gpus", metavar="0,1,...", help="GPUs to use, by default all")
    started.add_argument("--python", type=Path, help="interpreter that has SGLang")
    started.add_argument("--memory-fraction", type=float, help="share of a GPU's memory for weights and cache")
    started.add_argument(
        "--no-deterministic",
        dest="deterministic",
        action="store_const",
        const=False,
        help="without --enable-deterministic-inference: faster on GPUs, and never the same responses twice",
    )


def _evaluate_run_file(options: argparse.Namespace) -> None:
    from dapo_mega.atomic_files import replace_file
    from dapo_mega.config import RunConfig, load_config
    from dapo_mega.evaluation.held_out import evaluate_checkpoint

    if options.output:
        if options.output.is_dir():
            raise InputError(f"{options.output} is a folder; with --config the results are one file: give its name")
        options.output.parent.mkdir(parents=True, exist_ok=True)
    metrics = evaluate_checkpoint(load_config(RunConfig, options.config, options.positional), options.samples)
    for name, value in metrics.items():
        print(f"{name.removeprefix('evaluation/'):24s} {value:.4f}")
    if options.output:
        replace_file(options.output, json.dumps(metrics, indent=2) + "\n")


def _evaluate_model(options: argparse.Namespace, path: Path) -> None:
    from dapo_mega.evaluation.benchmarks import sources

    names = [name for name in (options.benchmarks or "").split(",") if name]
    found = sources(names, options.data)
    leave_at_sigterm("the evaluation was stopped; start the same command again to continue")
    from dapo_mega.evaluation.choices import Choices
    from dapo_mega.evaluation.model_folder import open_model
    from dapo_mega.evaluation.run import Evaluation, evaluate

    choices = Choices(
        samples=options.k,
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        seed=options.seed,
        num_problems=options.num_problems,
        template=options.template,
        extraction=options.grader,
        chat_template={"auto": None, "on": True, "off": False}[options.chat_template],
        template_arguments=options.template_arguments,
    )
    name = "-".join(path.resolve().parts[-2:]) + ("" if options.step is None else f"-step-{options.step}")
    output = options.output or Path("runs/evaluations") / name
    model = open_model(path, options.step, output)
    if model.origin:
        print(f"{model.origin} is evaluated as {model.folder}, which is removed in the end", flush=True)
    dtype, engine = _engine(options, model.folder, output)
    evaluate(Evaluation(model, found, choices, dtype, engine, output))
    model.remove_conversion()
    print(f"results: {output / 'results.json'}; responses: dapo-mega show-samples {output}/BENCHMARK")


def _engine(options: argparse.Namespace, model: Path, output: Path) -> tuple[str, Engine]:
    from dapo_mega.distributed import accelerator
    from dapo_mega.evaluation.run import Engine

    dtype: str = options.dtype or ("bf16" if accelerator.has_gpu() else "fp32")
    rows: int = options.batch_rows
    if options.engine == "embedded":
        from dapo_mega.evaluation.sampling import EmbeddedSampler

        settings = {"kind": "embedded", "batch_rows": rows}
        return dtype, Engine(settings, rows, lambda config, prompts: EmbeddedSampler(model, dtype, rows))
    from dapo_mega.evaluation.fleet import FleetSampler, with_engines

    if options.urls:
        from dapo_mega.config.fleet import require_api_key

        key, urls = require_api_key(options.api_key_env), options.urls.split(",")
        return dtype, Engine(
            {"kind": "sglang"},
            rows,
            lambda config, prompts: FleetSampler(
                with_engines(config, urls=urls, api_key_env=options.api_key_env, wait_limit_s=_URLS_LIMIT_S),
                prompts,
                key,
            ),
        )
    node, serving = _node(options, model, dtype, output)
    from dapo_mega.engines.sglang.serving import LocalEngines

    def start(config: RunConfig, prompts: Sequence[Prompt]) -> FleetSampler:
        engines = LocalEngines(node, serving)
        try:
            engines.wait_until_serving()
            with_them = with_engines(
                config, urls=engines.urls, api_key_env=serving.api_key_env, wait_limit_s=serving.start_limit_s
            )
            return FleetSampler(with_them, prompts, serving.api_key, engines.advance, engines.close)
        except BaseException:
            engines.close()
            raise

    return dtype, Engine({"kind": "sglang", "arguments": list(options.extra)}, rows, start)


def _node(options: argparse.Namespace, model: Path, dtype: str, output: Path) -> tuple[Node, ServingOptions]:
    """The engines that are started. Raises InputError where there is no SGLang, or too few GPUs."""
    import secrets

    from dapo_mega.engines.sglang.engine_commands import Node, check_node, free_ports, sglang_gpus, share_of_gpus
    from dapo_mega.engines.sglang.serving import ServingOptions

    python = options.python or Path(sys.executable)
    num_engines, tp_size = options.num_engines or 1, options.tensor_parallel or 1
    node = Node(
        python=python,
        model=model.absolute(),
        num_engines=num_engines,
        tp_size=tp_size,
        host="127.0.0.1",
        port=free_ports(num_engines),
        dtype="bf16" if dtype == "bf16" else "fp32",
        gpus=share_of_gpus(options.gpus, sglang_gpus(python), num_engines * tp_size),
        memory_fraction=options.memory_fraction,
        extra=options.extra,
    )
    check_node(node)
    return node, ServingOptions(
        api_key=secrets.token_hex(32),
        api_key_env=options.api_key_env,
        log_folder=output / "engines",
        max_restarts=_MAX_RESTARTS,
        restart_hung_after_s=_HUNG_S,
    )
