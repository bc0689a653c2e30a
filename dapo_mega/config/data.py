"""The datasets: prompts for training and evaluation, demonstrations for supervised training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dapo_mega.config.base import FREE, Section


class ColumnsConfig(Section):
    """Where a dataset keeps its fields; dots reach into nested records (`reward_model.ground_truth`). The other columns
    of a row stay with its prompt for rewards."""

    prompt: str = Field(default="prompt", description="Text, or a list of {role, content} messages.")
    ground_truth: str = "reward_model.ground_truth"
    data_source: str | None = None
    response: str = Field(default="response", description="Demonstration; only supervised training reads it.")


class DatasetConfig(Section):
    """One dataset: a file (parquet, JSON, JSONL, arrow), a folder of such files, or a Hugging Face name."""

    path: str = Field(json_schema_extra=FREE)
    split: str = Field(
        default="train",
        description="Split of a Hugging Face dataset, or of a folder whose file names begin with splits.",
    )
    columns: ColumnsConfig = ColumnsConfig()
    template: str = Field(
        default="dapo",
        description="Name of a prompt template (dapo, bare, qwen_math, r1), text containing {problem}, or as_is for a "
        "dataset whose prompts hold their instruction already, such as DAPO-Math-17k.",
    )
    chat_template: bool = Field(default=False, description="Wrap the prompt in the tokenizer's chat template.")
    ground_truth_style: Literal["verbatim", "boxed", "gsm8k"] = Field(
        default="verbatim", description="The form of the final answer in the ground-truth column."
    )
    deduplicate: bool = Field(default=True, description="Keep one row per distinct prompt (DAPO-Math-17k repeats).")
    max_rows: int | None = Field(default=None, ge=1, description="Rows read at most, before deduplication.")


class DataConfig(Section):
    """Prompts for training and evaluation."""

    train: DatasetConfig
    evaluation: DatasetConfig | None = None
    max_prompt_tokens: int = Field(default=2048, ge=1)
    long_prompts: Literal["refuse", "drop"] = Field(
        default="refuse", description="What to do with a prompt over max_prompt_tokens; drops are counted."
    )


class SftDataConfig(Section):
    """Demonstrations for supervised training."""

    train: DatasetConfig
    max_tokens: int = Field(default=2048, ge=2, description="Longest prompt plus response; longer rows are refused.")
