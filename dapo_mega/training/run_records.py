"""What is written of a run as a whole: its configuration, the cards of its datasets, its metrics, and its trackers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from dapo_mega.atomic_files import make_way, replace_file, set_aside
from dapo_mega.config import TrainingConfig, dump_config
from dapo_mega.config.base import flat
from dapo_mega.metrics import MetricsWriter, RunDescription
from dapo_mega.metrics.run_text import package_versions, without_credentials
from dapo_mega.metrics.trackers import BackgroundTracker, LastStep, TrackedRun, run_id_in
from dapo_mega.preparation.card import CardReference, verified_card
from dapo_mega.training.resume import CODE_FILE, CONFIG_FILE, code_hashes, is_free, saved_config


def open_writer(config: TrainingConfig, first_step: int = 0, preview: str = "") -> MetricsWriter:
    """The metrics writer from `first_step` on; `preview` shows prompts."""
    run = run_description(config, preview)
    return MetricsWriter(Path(config.output_dir), first_step, run, open_trackers(config, run, is_new=first_step == 0))


def open_trackers(config: TrainingConfig, run: RunDescription, *, is_new: bool) -> list[BackgroundTracker]:
    """Start what sends the run to `tracking.backends`; a run that is not new continues its runs there."""
    tracking = config.tracking
    if not tracking.backends:
        return []
    folder = Path(config.output_dir).resolve() / "tracking"
    tracked = TrackedRun(
        id=run_id_in(folder, is_new=is_new),
        name=tracking.run_name or re.sub(r"[^A-Za-z0-9_.-]", "-", run.name),
        project=tracking.project,
        folder=str(folder),
        trainer_pid=os.getpid(),
        close_limit_s=tracking.close_limit_s,
        entity=tracking.entity,
        mlflow_uri=tracking.mlflow_uri,
        trackio_space=tracking.trackio_space,
        offline=tracking.offline,
        config=run.config,
        hyper_parameters=run.hyper_parameters,
        versions=run.versions,
    )
    for backend in tracking.backends:
        for suffix in ("log", "lock"):
            make_way(folder / f"{backend}.{suffix}")
        LastStep(folder / f"{backend}.json", tracked.id)  # Here, as what is said of a damaged file is seen here.
    # Keys of engines and judges are not for trackers, which may upload what they find in their environment.
    hidden = [str(name) for key, name in flat(config.model_dump()).items() if key.endswith("_env")]
    return [BackgroundTracker(backend, tracked, hidden=hidden) for backend in tracking.backends]


def run_description(config: TrainingConfig, preview: str = "") -> RunDescription:
    """The run as trackers and TensorBoard show it; `preview` shows its prompts. Hyper-parameters are the keys that may
    not change at a resume."""
    values = without_credentials(config.model_dump(mode="json"))
    decisive = {name: value for name, value in flat(values).items() if not is_free(name, config)}
    return RunDescription(
        name=Path(config.output_dir).resolve().name,
        config=values,
        config_text=without_credentials(dump_config(config)),
        hyper_parameters={n: v if isinstance(v, bool | int | float) else str(v) for n, v in decisive.items()},
        versions=package_versions(),
        prompts=preview,
    )


def write_run_record(config: TrainingConfig, cards: Mapping[str, CardReference]) -> None:
    """Write the configuration, package versions, hashes of own code and `dataset_cards` into the run's folder."""
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    datasets = {name: asdict(card) for name, card in cards.items()}
    contents = {
        CONFIG_FILE: dump_config(config),
        "versions.json": json.dumps(package_versions(), indent=2) + "\n",
        CODE_FILE: json.dumps(code_hashes(config), indent=2) + "\n",
        "datasets.json": json.dumps(datasets, indent=2) + "\n",
    }
    for name, content in contents.items():
        make_way(folder / name)
        if name == CONFIG_FILE and (problem := saved_config(config, folder)[1]):
            set_aside(folder / name, f"cannot be read, so nobody knows what has changed since ({problem})")
        replace_file(folder / name, content)


def dataset_cards(config: TrainingConfig) -> dict[str, CardReference]:
    """The cards of those datasets of a run that were prepared, by their keys in the configuration. Reads the datasets.

    Raises InputError for a dataset that is not the one that its card describes.
    """
    values = flat(config.model_dump(include={"data"}))
    paths = {key.removesuffix(".path"): path for key, path in values.items() if key.endswith(".path") and path}
    found = {name: verified_card(path) for name, path in paths.items()}
    return {name: card for name, card in found.items() if card}
