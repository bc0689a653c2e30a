"""How a training dataset is prepared: sources, duplicates, decontamination, filters."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from dapo_mega.config.base import Section
from dapo_mega.config.data import SourceConfig
from dapo_mega.config.paths import HubPath, HubPathOrNone

_NAME = re.compile(r"[\w.-]+")


class PreparationSourceConfig(SourceConfig):
    """One source of problems; its name is the `data_source` of rows that have none of their own."""

    instruction: str = "auto"
    """Instruction that stands around the problems and is taken off. auto: that of any known template; none: nothing is
    taken off; or a text of your own with {problem} in it."""


class DuplicatesConfig(Section):
    """Which repeated problems are left out; the first row stays."""

    exact: bool = True
    """Leave out a problem that differs from an earlier one in white space, Unicode or LaTeX spelling only."""
    near: bool = True
    """Leave out a problem with the numbers of an earlier one and almost its text. Found by MinHash."""
    threshold: float = Field(default=0.8, ge=0.6, le=1)
    """near: Jaccard similarity of runs of five characters from which two problems are one."""


class EvaluationSetConfig(Section):
    """Problems that must not be trained on; its name stands in the evidence."""

    path: HubPath
    """As the path of a source."""
    split: str = "test"
    """As the split of a source."""
    prompt: str | None = None
    """Column of the problem; null: the first of prompt, problem, question that is there."""


class DecontaminationConfig(Section):
    """Leaves out what evaluation sets hold. A problem is found by runs of words that it shares with a prompt."""

    sets: dict[str, EvaluationSetConfig] = Field(default={})
    """Evaluation sets, by names of yours."""
    ngram: int = Field(default=8, ge=2)
    """Length of a run in words and numbers; operators and punctuation do not count."""
    min_share: float = Field(default=0.6, gt=0, le=1)
    """Share of an evaluation problem's words that must stand in shared runs. Lower finds more of what was rephrased,
    and more that only sounds alike."""
    min_words: int = Field(default=5, ge=1)
    """A problem of fewer words than ngram must be shared as a whole; one of fewer than this must be the whole
    prompt."""


class FiltersConfig(Section):
    """Problems that are left out for what they are."""

    multiple_choice: bool = False
    """Leave out problems that list options A, B, C."""
    true_false: bool = False
    """Leave out questions for true or false, yes or no."""
    proofs: bool = False
    """Leave out problems that ask for a proof and for nothing else."""
    unparsed_answers: bool = True
    """Leave out ground truths that no answer could be compared with; false: keep their text."""
    answer_type: Literal["any", "integer"] = "any"
    """integer: keep whole numbers only, and write 27.0 and 27,000 as 27 and 27000."""
    languages: tuple[str, ...] = ()
    """Languages to keep, as ISO 639-1 codes (en, zh); empty: all. Texts with too few words to tell stay. Needs the
    package py3langid."""
    tokenizer: HubPathOrNone = None
    """Folder or name of the tokenizer of max_prompt_tokens."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Leave out longer problems, counted without template; null: none."""
    max_characters: int = Field(default=50_000, ge=1)
    """Leave out prompts with more characters, whatever they hold."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokenizer is None) != (self.max_prompt_tokens is None):
            raise ValueError("filters.tokenizer and filters.max_prompt_tokens go together; give both or neither")
        return self


class PreparationConfig(Section):
    """A recipe for a training dataset."""

    sources: dict[str, PreparationSourceConfig]
    """Sources by names of yours, read in this order."""
    duplicates: DuplicatesConfig = DuplicatesConfig()
    decontamination: DecontaminationConfig = DecontaminationConfig()
    filters: FiltersConfig = FiltersConfig()
    max_invalid_share: float = Field(default=0.05, ge=0, le=1)
    """Share of a source's rows that may lack a prompt or an answer that can be read; above it nothing is written."""
    broken_files: Literal["refuse", "skip"] = "refuse"
    """What to do with what cannot be read. refuse: end with its place; skip: leave out and count lines and rows; where
    it cannot go on, the rest of the file, which the card names."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.sources:
            raise ValueError("sources is empty; add one as sources.NAME.path=FILE")
        for section, names in (("sources", self.sources), ("decontamination.sets", self.decontamination.sets)):
            for name in names:
                if not _NAME.fullmatch(name):
                    raise ValueError(f"{section}: {name!r} is no name; use letters, digits, _ . and -")
        return self
