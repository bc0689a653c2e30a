"""Which responses a run writes down."""

from pydantic import Field

from dapo_mega.config.base import Section


class SamplesConfig(Section):
    """What the model said: the groups of every step and all responses of evaluations, as parquet files under
    `output_dir/samples`."""

    enabled: bool = True
    """Write them. Off: no response is written, and no step can be replayed."""
    groups_per_step: int | None = Field(default=None, ge=1)
    """Groups of a step that are written, drawn at random; null: all, which replaying a step needs. Evaluations are
    always written whole."""
    max_gib: float = Field(default=10.0, gt=0)
    """GiB that the files of a run may take together. Beyond it the oldest steps are removed, then the oldest
    evaluations; the newest file of each kind stays."""
