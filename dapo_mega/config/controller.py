"""Where the process is that commands a run."""

from pydantic import Field

from dapo_mega.config.base import Section


class ControllerConfig(Section):
    """The controller asks, rewards, records, evaluates and commands the trainer: in the trainer's first process, or in
    one of its own, which lives on with the engines' requests when trainers die and come back."""

    own_process: bool = False
    """Command the run from a process of its own. Rank 0 starts it on its machine, unless `dapo-mega control` listens
    already, there or on any machine that sees output_dir. The results are the same."""
    host: str = "127.0.0.1"
    """The address at which it listens for the trainer, one of the machine that it is on. What goes over the connection
    is not encrypted."""
    wait_limit_s: float = Field(default=600.0, gt=0)
    """Seconds for which it and the trainer wait for each other."""
