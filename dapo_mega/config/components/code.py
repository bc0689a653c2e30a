"""Rewards by running code: a function of the user's own, and unit tests of Python solutions."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dapo_mega.config.base import FREE
from dapo_mega.config.components.base import ComponentConfig, CorrectnessOf
from dapo_mega.declared import FunctionPath


class FunctionComponent(ComponentConfig):
    """A function of your own in a file or an installed module. It says what it scores, and may say what is correct."""

    kind: Literal["function"] = "function"
    path: FunctionPath
    """As reward.function. A class is made once in each process, and then called."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, beside the records."""

    gives_correctness: ClassVar[CorrectnessOf] = "maybe"
    may_be_penalty: ClassVar[bool] = True


class CodeComponent(ComponentConfig):
    """Runs the Python code of a response against the tests of its row: 1 if all pass, else 0. [Forms of
    tests](recipes/code/README.md), [what the isolation is worth](../dapo_mega/rewards/sandbox/README.md)."""

    kind: Literal["code"] = "code"
    allow_code: bool = False
    """Must be true, as programs that the model wrote are run on this machine."""
    tests_column: str = "ground_truth"
    """Column of the tests, with dots into records. ground_truth: that of data.*.columns.ground_truth."""
    function_column: str = "fn_name"
    """Column of the function that input-output pairs call, where rows have one."""
    setup_column: str = "test_setup_code"
    """Column of code to run before test code, where rows have one."""
    entry_point_column: str = "entry_point"
    """Column of what check(candidate) is given, where rows have one."""
    partial_credit: bool = False
    """The value is the share of the tests that pass. Only all of them are correct."""
    max_tests: int | None = Field(default=None, ge=1)
    """Tests of a row that are run at most; null: all."""
    time_limit_s: float = Field(default=4.0, gt=0)
    """Processor time of one test in seconds. By the clock it may take three times this and 2 s."""
    memory_limit_mib: int = Field(default=512, ge=32)
    """MiB that a solution may use beyond Python itself."""
    file_limit_mib: int = Field(default=8, ge=1, le=8)
    """MiB that a solution may print, and write into its folder."""
    float_tolerance: float = Field(default=1e-6, ge=0)
    """Absolute or relative error of a number where the expected one has a point."""
    modules: tuple[str, ...] = ()
    """Modules of this environment that solutions may import beyond Python's library, such as numpy."""
    num_workers: int = Field(default=2, ge=1, json_schema_extra=FREE)
    """Solutions that run at the same time, each on one core."""

    gives_correctness: ClassVar[CorrectnessOf] = "always"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.allow_code:
            raise ValueError(
                "a reward of kind code runs programs that the model wrote on this machine; read "
                "dapo_mega/rewards/sandbox/README.md, then set its allow_code to true"
            )
        return self
