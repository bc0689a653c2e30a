"""The datasets: prompts for training and evaluation, demonstrations for supervised training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dapo_mega.config.base import FREE, Section


class ColumnsConfig(Section):
    """Where a dataset keeps its fields; dots reach into nested records (`reward_model.ground_truth`). The other columns
    of a row stay with its prompt for rewards."""

    prompt: str = Field(
        default="prompt", description="Column of the problem: text, or a list of {role, content} messages."
    )
    ground_truth: str = Field(
        default="reward_model.ground_truth",
        description="Column of the right answer: text, a number, or a list of them. ground_truth_style says its form.",
    )
    data_source: str | None = Field(
        default=None,
        json_schema_extra=FREE,
        description="Column that says where a row comes from, for rewards; null: data_source. A row may lack it.",
    )
    extra: tuple[str, ...] | None = Field(
        default=None,
        json_schema_extra=FREE,
        description="Other columns that stay with a prompt, for rewards; null: all. Name few where rows are large.",
    )
    response: str = Field(
        default="response", description="Column of the response to imitate; only supervised training reads it."
    )


class DatasetConfig(Section):
    """One dataset: a file (parquet, JSON, JSONL, arrow), a folder of such files, or a Hugging Face name."""

    path: str = Field(
        json_schema_extra=FREE,
        description="File (parquet, JSON, JSONL, arrow), folder of such files, or name of a Hugging Face dataset, with "
        ":configuration where it has several (openai/gsm8k:main).",
    )
    split: str = Field(
        default="train",
        description="Split of a Hugging Face dataset, of a folder whose file names begin with splits "
        "(test-0.parquet), or of a JSON file with one list per split.",
    )
    columns: ColumnsConfig = ColumnsConfig()
    template: str = Field(
        default="dapo",
        description="Instruction around the problem: dapo, qwen_math, r1, or a text of your own with {problem} in it. "
        "bare (also as_is, none) adds nothing; use it where prompts hold their instruction already, as in "
        "DAPO-Math-17k.",
    )
    chat_template: bool = Field(
        default=False,
        description="Put the messages through the tokenizer's chat template. Switch it on for instruction-tuned "
        "models.",
    )
    ground_truth_style: Literal["verbatim", "boxed", "gsm8k", "unchecked"] = Field(
        default="verbatim",
        description="Form of the ground-truth column. verbatim: the answer alone; gsm8k: the answer after ####; "
        "boxed: the answer in the last \\boxed{}; unchecked: whatever a reward reads, such as unit tests.",
    )
    several_answers: Literal["all", "any"] = Field(
        default="all",
        description="What a list in the ground-truth column means. all: its values together are the answer; any: each "
        "of them is right by itself.",
    )
    deduplicate: bool = Field(
        default=True, description="Keep the first row of each distinct prompt; the public DAPO-Math-17k repeats each."
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="Rows that are read at most, before deduplication; null: all. For quick tries."
    )


class DataConfig(Section):
    """Prompts for training and evaluation."""

    train: DatasetConfig = Field(description="Prompts to train on; keys below.")
    evaluation: DatasetConfig | None = Field(
        default=None, description="Held-out prompts, needed by the section evaluation; the same keys."
    )
    max_prompt_tokens: int = Field(
        default=2048,
        ge=1,
        description="Longest prompt in tokens, template included. Lower is better for memory; see the longest of your "
        "data.",
    )
    long_prompts: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="What to do with a prompt over max_prompt_tokens. refuse: end with an error that names it; drop: "
        "leave it out and count it.",
    )


class SftDataConfig(Section):
    """Demonstrations for supervised training."""

    train: DatasetConfig
    max_tokens: int = Field(
        default=2048, ge=2, description="Longest prompt + response in tokens; a longer row ends the run with its place."
    )
