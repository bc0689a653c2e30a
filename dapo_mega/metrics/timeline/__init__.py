"""What a run did when: recorded while it works, as the file `timeline.jsonl`, and drawn or handed to Perfetto."""

from dapo_mega.metrics.timeline.activity import Activity
from dapo_mega.metrics.timeline.load import LoadHistory
from dapo_mega.metrics.timeline.records import Load, Span, StepTimeline
