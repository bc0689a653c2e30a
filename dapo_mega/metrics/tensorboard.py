"""A run in TensorBoard: curves, histograms, texts, the figures of `figures.py` as a layout of custom scalars,
hyper-parameters, and what the catalogue says of the metrics."""

import itertools
import logging
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import DataType, Experiment, HParamInfo, MetricInfo, MetricName
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from torch.utils.tensorboard import SummaryWriter

from dapo_mega.atomic_files import make_way, replace_file, set_aside
from dapo_mega.metrics import figures
from dapo_mega.metrics.catalogue import METRIC_TABLES, describe
from dapo_mega.metrics.histogram import Histogram
from dapo_mega.metrics.run_text import RunDescription, code_block

logger = logging.getLogger(__name__)

# Written once more under a name that sorts first, as TensorBoard opens on the first names.
_WATCHED: Final = (
    "rollout/reward_mean", "rollout/accuracy_mean", "rollout/response_length_mean", "rollout/logprob_abs_diff_mean",
    "policy/entropy", "policy/loss", "groups/kept_share", "evaluation/avg_at_k", "evaluation/reward_mean",
)  # fmt: skip


class TensorBoardLog:
    """Writes event files into a folder. What earlier runs wrote there from `start_step` on is removed."""

    def __init__(self, folder: Path, start_step: int) -> None:
        make_way(folder, for_folder=True)
        for path in folder.glob("events.out.tfevents.*.tmp"):  # A start that was killed here left it.
            path.unlink()
        for path in folder.glob("events.out.tfevents.*"):
            make_way(path)
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        for path in earlier:
            drop_events_from(path, start_step)
        _wait_for_a_later_file_name(earlier)
        self._is_described = bool(earlier) and start_step > 0
        self._start_step = start_step
        self._writer = SummaryWriter(str(folder), purge_step=start_step)

    def describe_run(self, run: RunDescription) -> None:
        """Write what is known at the start: configuration, versions and prompts as text; the layout and the
        hyper-parameters unless an earlier start has done so."""
        step = self._start_step
        self._writer.add_text("run/configuration", code_block(run.config_text, limit=None), step)
        versions = "\n".join(f"| {name} | {version} |" for name, version in run.versions.items())
        self._writer.add_text("run/versions", f"| package | version |\n|---|---|\n{versions}", step)
        self._writer.add_text("run/metrics", METRIC_TABLES, step)
        if run.prompts:
            self._writer.add_text("run/prompts", code_block(run.prompts, limit=None), step)
        if self._is_described:
            return
        # Patterns that match each figure's metrics, whole families too, and no others.
        patterns = {
            figure.title: [f"^{re.escape(curve.metric).replace('<name>', '.+')}$" for curve in figure.curves]
            for figure in figures.FIGURES
        }
        self._writer.add_custom_scalars(
            {"What to watch": {title: ["Multiline", tags] for title, tags in patterns.items()}}
        )
        assert self._writer.file_writer is not None
        for summary in _hyper_parameters(run):
            self._writer.file_writer.add_summary(summary, step)
        self._writer.flush()

    def write(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram], texts: Mapping[str, str]
    ) -> None:
        """Write one step; texts are Markdown. It is on disk afterwards."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
            if name in _WATCHED:
                self._writer.add_scalar(f"_watch/{name}", float(value), step)
        for name, histogram in histograms.items():
            edges = histogram.edges()
            middles = [(left + right) / 2 for left, right in itertools.pairwise(edges)]
            weighted = list(zip(middles, histogram.counts, strict=True))
            self._writer.add_histogram_raw(
                name,
                min=histogram.low,
                max=histogram.high,
                num=histogram.total,
                sum=sum(middle * count for middle, count in weighted),
                sum_squares=sum(middle**2 * count for middle, count in weighted),
                bucket_limits=edges[1:],
                bucket_counts=list(histogram.counts),
                global_step=step,
            )
        for name, text in texts.items():
            self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._writer.close()


def _hyper_parameters(run: RunDescription) -> Iterator[Summary]:
    """What the HPARAMS tab shows of the run: its hyper-parameters, and the metrics to compare runs by."""
    start = SessionStartInfo(group_name=run.name, start_time_secs=time.time())
    infos = []
    for name, value in run.hyper_parameters.items():
        if isinstance(value, bool):
            kind, start.hparams[name].bool_value = DataType.DATA_TYPE_BOOL, value
        elif isinstance(value, str):
            kind, start.hparams[name].string_value = DataType.DATA_TYPE_STRING, value
        else:
            kind, start.hparams[name].number_value = DataType.DATA_TYPE_FLOAT64, value
        infos.append(HParamInfo(name=name, type=kind))
    entries = {name: describe(name) for name in figures.MAIN_METRICS}
    about_metrics = [
        MetricInfo(name=MetricName(tag=name), display_name=name, description=entry.text())
        for name, entry in entries.items()
        if entry
    ]
    experiment = Experiment(hparam_infos=infos, metric_infos=about_metrics)
    for tag, data in (
        (metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment)),
        (metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)),
    ):
        about = metadata.create_summary_metadata(data)
        yield Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)])


def drop_events_from(path: Path, start_step: int) -> None:
    """Remove an event file's events of `start_step` or later, and what TensorBoard could not read: a torn last record,
    and with a copy of the file kept those with a wrong checksum and all behind a wrong length. Events of earlier steps
    stay also where they come after those of later steps, as results of evaluations beside training do."""
    content = path.read_bytes()
    kept, damage, start = [], -1, 0
    while start + 12 <= len(content):
        # A record: its length in 8 bytes, their checksum in 4, the event, its checksum in 4.
        head, (length, checksum) = content[start : start + 8], struct.unpack_from("<QI", content, start)
        end = start + 16 + length
        if masked_crc32c(head) != checksum:
            damage = start
            break
        if end > len(content):
            break
        body = content[start + 12 : end - 4]
        try:
            if masked_crc32c(body) != struct.unpack_from("<I", content, end - 4)[0]:
                raise DecodeError("its checksum is wrong")
            event = Event.FromString(body)
            if event.step < start_step or event.HasField("file_version"):
                kept.append(content[start:end])
        except DecodeError:
            damage = start
        start = end
    remaining = b"".join(kept)
    if damage >= 0:
        set_aside(path, f"is damaged at byte {damage}: TensorBoard will lack what stood there", remaining)
    elif len(remaining) < len(content):
        replace_file(path, remaining)


def _wait_for_a_later_file_name(earlier: Sequence[Path]) -> None:
    """Wait until a new event file sorts behind all earlier ones; at most two seconds, else warn.

    TensorBoard reads event files in the order of their names, `events.out.tfevents.<second>.<host>...`.
    A resumed run's file must come last, or the steps that it purges would purge its own.
    """
    existing = [path.name.split(".")[3] for path in earlier]
    newest = max((int(second) for second in existing if second.isdecimal()), default=0)
    delay = newest + 1 - time.time()
    if delay > 2:
        logger.warning(
            "event files in %s are %.0f s ahead of this machine's clock: TensorBoard may show steps of the "
            "earlier run; metrics.jsonl is right",
            earlier[0].parent,
            delay,
        )
    elif delay > 0:
        time.sleep(delay)
