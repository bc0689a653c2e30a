"""What a run saves, when, and for how long."""

from typing import Self

from pydantic import Field, model_validator

from dapo_mega.config.base import Section


class CheckpointConfig(Section):
    """Megatron distributed checkpoints under `output_dir/checkpoints`, and exports for other programs."""

    every: int = Field(default=20, ge=0)
    """Steps between checkpoints. 0 saves only at the end."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that are a multiple of this are never removed; null: all but the newest are."""
    asynchronous: bool = True
    """Write the files while training continues, from a copy in host memory. Switch it off if host memory is short."""
    hf_every: int = Field(default=0, ge=0)
    """Steps between exports in Hugging Face format to output_dir/hf_step_00000030 and so on, all kept. 0: none."""
    grace_s: float = Field(default=25.0, ge=0)
    """Seconds after SIGTERM in which the run may complete its update and a checkpoint. torchrun kills its processes
    after 30 s, or after its --shutdown-timeout: raise both for large models."""
    save_hf_at_end: bool = True
    """Export the trained model to output_dir/hf in Hugging Face format."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.keep_every and self.every and self.keep_every % self.every:
            nearest = max(round(self.keep_every / self.every), 1) * self.every
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} is not a multiple of checkpoint.every={self.every}, so it "
                f"would miss checkpoints; the nearest multiple is {nearest}"
            )
        return self
