"""The datasets: prompts for training and evaluation, demonstrations for supervised training."""

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dapo_mega.algorithms.orders import OrderChoice, ShuffleOrder
from dapo_mega.config.base import FREE, Section
from dapo_mega.config.choices import settled
from dapo_mega.config.paths import HubPath


class ColumnsConfig(Section):
    """Where a dataset keeps its fields; dots reach into nested records (`reward_model.ground_truth`). The other columns
    of a row stay with its prompt for rewards."""

    prompt: str = "prompt"
    """Column of the problem: text, or a list of {role, content} messages."""
    ground_truth: str = "reward_model.ground_truth"
    """Column of the right answer: text, a number, or a list of them. ground_truth_style says its form."""
    data_source: str | None = Field(default=None, json_schema_extra=FREE)
    """Column that says where a row comes from, for rewards; null: data_source. A row may lack it."""
    extra: tuple[str, ...] | None = Field(default=None, json_schema_extra=FREE)
    """Other columns that stay with a prompt, for rewards; null: all. Name few where rows are large."""
    difficulty: str | None = None
    """Column of a number that says how hard a problem is, such as a pass rate; for data.sampling.order=curriculum."""
    response: str = "response"
    """Column of the response to imitate: text, or a list of messages, with calls of tools and their results; only
    supervised training reads it."""
    rejected: str | None = None
    """Column of the worse response to the same prompt, in the form of `response`, which is then the better one; only
    supervised training with the section dpo reads it."""
    messages: str | None = None
    """Column of a whole conversation to imitate, a list of messages or its JSON, in place of prompt and response; only
    supervised training reads it."""
    tools: str | None = None
    """Column of the schemas of the tools that a conversation may call, a list or its JSON. null: none. Only supervised
    training reads it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt == self.ground_truth:
            raise ValueError(f"columns.prompt and columns.ground_truth are both {self.prompt!r}; name two columns")
        repeated = [name for name, count in Counter(self.extra or ()).items() if count > 1]
        if repeated:
            raise ValueError(f"columns.extra names {repeated[0]!r} twice; name each column once")
        return self


class SourceConfig(Section):
    """Where rows are read: a file (parquet, JSON, JSONL, arrow, CSV), a folder of such files, or a Hugging Face
    name."""

    path: HubPath = Field(json_schema_extra=FREE)
    """File (parquet, JSON, JSONL, arrow, CSV), folder of such files, or name of a Hugging Face dataset, with
    :configuration where it has several (openai/gsm8k:main)."""
    split: str = "train"
    """Split of a Hugging Face dataset, of a folder whose file names begin with splits (test-0.parquet), or of a JSON
    file with one list per split."""
    columns: ColumnsConfig = ColumnsConfig()
    ground_truth_style: Literal["verbatim", "boxed", "gsm8k", "unchecked"] = "verbatim"
    r"""Form of the ground-truth column. verbatim: the answer alone; gsm8k: the answer after ####; boxed: the answer in
    the last \boxed{}; unchecked: whatever a reward reads, such as unit tests."""
    several_answers: Literal["all", "any"] = "all"
    """What a list in the ground-truth column means. all: its values together are the answer; any: each of them is right
    by itself."""
    max_rows: int | None = Field(default=None, ge=1)
    """Rows that are read at most, before deduplication; null: all. For quick tries."""


class DatasetConfig(SourceConfig):
    """One dataset: a file (parquet, JSON, JSONL, arrow, CSV), a folder of such files, or a Hugging Face name."""

    template: str = "dapo"
    """Instruction around the problem: dapo, qwen_math, r1, or a text of your own with {problem} in it. as_is adds
    nothing, as prompts hold their instruction already, as in DAPO-Math-17k; bare (also none) adds nothing, as none is
    wanted."""
    chat_template: bool = False
    """Put the messages through the tokenizer's chat template; special tokens that their text spells stay text. Switch
    it on for instruction-tuned models."""
    template_arguments: dict[str, Any] = Field(default={})
    """Arguments of the chat template, such as {enable_thinking: false}; one that it does not read is refused."""
    deduplicate: bool = True
    """Keep the first row of each distinct prompt; the public DAPO-Math-17k repeats each."""

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.template_arguments and not self.chat_template:
            raise ValueError("template_arguments are of the chat template; set chat_template: true, or remove them")
        return self


class MixedDatasetConfig(DatasetConfig):
    """One of several datasets to train on: the keys of `data.train`, and its weight."""

    weight: float = Field(default=1.0, gt=0)
    """Its part of the prompts that are asked, in proportion to the other weights. Give the sizes of the datasets to ask
    each prompt equally often."""


class PromptSamplingConfig(Section):
    """The order in which training asks its prompts, for each dataset by itself."""

    order: OrderChoice = Field(default=ShuffleOrder(), discriminator="kind")
    """The order of an epoch's prompts."""
    retire_after: int | None = Field(default=None, ge=1)
    """Leave a prompt out once all its responses were right this many times in a row, which are epochs unless
    order=prioritised; null: never. One step's prompts always stay."""

    @property
    def needs_outcomes(self) -> bool:
        """Whether the order depends on which responses were right."""
        return self.order.needs_outcomes or self.retire_after is not None

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, raw: Any) -> Any:
        return settled(cls, raw, {})


_DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class DatasetsConfig(Section):
    """What is trained on, and what is held out."""

    train: DatasetConfig | None = None
    """What to train on; keys below. This or mixture is needed."""
    mixture: dict[str, MixedDatasetConfig] = Field(default={})
    """Several datasets to train on, by names of yours, in place of train; keys below."""
    evaluation: DatasetConfig | None = None
    """What is held out, needed by the section evaluation; the same keys."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, raw: Any) -> Any:
        mixture = raw.get("mixture") if isinstance(raw, Mapping) else None
        if not isinstance(mixture, Mapping):
            return raw
        complete = [str(name) for name, given in mixture.items() if not isinstance(given, Mapping) or "path" in given]
        for name in map(str, mixture):
            if not _DATASET_NAME.fullmatch(name):
                raise ValueError(f"data.mixture: {name!r} is no name; use letters, digits, _ and -")
            if name not in complete:
                near = difflib.get_close_matches(name, complete, n=1)
                hint = f"did you mean data.mixture.{near[0]}?" if near else f"add data.mixture.{name}.path"
                raise ValueError(f"data.mixture.{name} has no path; {hint}")
        return raw

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        if self.train and self.mixture:
            raise ValueError("data.train and data.mixture are both given; put all datasets into data.mixture")
        if not self.train and not self.mixture:
            raise ValueError("data.train is missing; add it to the file or as data.train.path=FILE")
        return self

    @property
    def training(self) -> Mapping[str, DatasetConfig]:
        """The datasets to train on, by name; the name of `data.train` is empty."""
        return {"": self.train} if self.train else self.mixture

    @property
    def by_key(self) -> Mapping[str, DatasetConfig]:
        """All datasets of the run by the dotted keys under which they stand, those to train on first."""
        datasets = {self.key_of(name): dataset for name, dataset in self.training.items()}
        return {**datasets, "data.evaluation": self.evaluation} if self.evaluation else datasets

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each dataset to train on, by name."""
        return {name: dataset.weight for name, dataset in self.mixture.items()} or {"": 1.0}

    @staticmethod
    def key_of(name: str) -> str:
        """The dotted key under which the training dataset of this name stands."""
        return f"data.mixture.{name}" if name else "data.train"


class DataConfig(DatasetsConfig):
    """Prompts for training and evaluation."""

    sampling: PromptSamplingConfig = PromptSamplingConfig()
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Longest prompt in tokens, template included. Lower is better for memory; see the longest of your data."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """What to do with a prompt over max_prompt_tokens. refuse: end with an error that names it; drop: leave it out and
    count it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sampling.order.needs_difficulty:
            for name, dataset in self.training.items():
                if dataset.columns.difficulty is None:
                    raise ValueError(
                        f"data.sampling.order=curriculum needs to know how hard each prompt is; set "
                        f"{self.key_of(name)}.columns.difficulty to a column of numbers"
                    )
        return self


class SftDataConfig(DatasetsConfig):
    """Demonstrations for supervised training."""

    loss_on: Literal["all", "last"] = "all"
    """Which turns of the assistant are learnt where a row is a conversation: all of the completion, or its last."""
    max_tokens: int = Field(default=2048, ge=2)
    """Longest prompt + response, or conversation, in tokens."""
    long_rows: Literal["refuse", "drop", "cut"] = "refuse"
    """What to do with a row over max_tokens. refuse: end with an error that names it; drop: leave it out and count it;
    cut: learn its first max_tokens tokens and count it, or drop it where these have none to learn."""
