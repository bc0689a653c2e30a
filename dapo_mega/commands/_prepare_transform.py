"""`dapo-mega prepare transform`: rewrite a prepared dataset's problems so that their answers are integers."""

import argparse
from pathlib import Path

from dapo_mega.cli import leave_at_sigterm
from dapo_mega.commands._arguments import add_prepared_output, at_least_one, json_object
from dapo_mega.errors import InputError


def add_transform(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("source", type=Path, nargs="?", help="folder of a prepared dataset, with its card.json")
    add("--show-prompt", action="store_true", help="print what the model is asked, and exit")
    add_prepared_output(command, is_required=False)
    add("--urls", help="URLs of equal servers with OpenAI's API, up to /v1, with commas between")
    add("--model", help="the model's name at the servers")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    add("--api-key-file", metavar="FILE", help="file that holds the API key")
    add("--concurrency", type=at_least_one, default=64, help="requests in flight (%(default)s)")
    add("--timeout-s", type=float, default=300.0, help="seconds for one attempt (%(default)s)")
    add("--attempts", type=at_least_one, default=3, help="attempts at one row (%(default)s)")
    add("--max-tokens", type=at_least_one, default=2048, help="tokens of a reply, thoughts included (%(default)s)")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="further keys of each request")
    add("--drop-unanswered", action="store_true", help="leave out rows that get no reply")
    command.set_defaults(run=transform)


def transform(options: argparse.Namespace) -> None:
    if options.show_prompt:
        from dapo_mega.preparation.transformation import PROMPT

        print(PROMPT)
        return
    for name in ("source", "output", "urls", "model"):
        if getattr(options, name) is None:
            raise InputError(f"prepare transform needs {name if name == 'source' else f'--{name}'}; see --help")
    if not options.timeout_s > 0:
        raise InputError(f"--timeout-s {options.timeout_s:g} must be above 0")
    from dapo_mega.preparation.transformation import TransformationSettings
    from dapo_mega.preparation.transformed_dataset import TransformedDatasetOptions, transform_dataset
    from dapo_mega.rewards.endpoints import EndpointSettings

    endpoints = EndpointSettings(
        urls=tuple(url.strip() for url in options.urls.split(",")),
        api_key_env=options.api_key_env,
        api_key_file=options.api_key_file,
        concurrency=options.concurrency,
        timeout_s=options.timeout_s,
        attempts=options.attempts,
    )
    settings = TransformationSettings(endpoints, options.model, options.max_tokens, options.extra_body)
    leave_at_sigterm("stopped by SIGTERM; the same command continues, and asks nothing twice")
    card = transform_dataset(
        options.source,
        options.output,
        settings,
        TransformedDatasetOptions(options.dropped, options.force, options.drop_unanswered),
    )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in card.details["rows_by_outcome"].items())
    print(f"{options.output}: {card.num_rows} of {card.num_rows_read} rows ({counts})")
