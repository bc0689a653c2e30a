"""Prompts: dataset readers, templates, tokenizers, the order in which prompts are asked, and the quickstart's task.

Nothing here generates or scores.
"""

from dapo_mega.data.arithmetic import ArithmeticDemonstration, ArithmeticTask, Problem
from dapo_mega.data.cursor import PromptCursor
from dapo_mega.data.prompts import (
    Demonstration,
    PromptDataset,
    TrainingPrompts,
    check_dataset,
    first_record,
    load_demonstrations,
    load_evaluation_prompts,
    load_prompts,
    load_training_prompts,
)
from dapo_mega.data.readers import Row, read_rows
from dapo_mega.data.sampler import PromptSampler
from dapo_mega.data.templates import TEMPLATES, render, render_prompt
from dapo_mega.data.tokenizer import build_byte_tokenizer, build_character_tokenizer, load_tokenizer

__all__ = [
    "TEMPLATES",
    "ArithmeticDemonstration",
    "ArithmeticTask",
    "Demonstration",
    "Problem",
    "PromptCursor",
    "PromptDataset",
    "PromptSampler",
    "Row",
    "TrainingPrompts",
    "build_byte_tokenizer",
    "build_character_tokenizer",
    "check_dataset",
    "first_record",
    "load_demonstrations",
    "load_evaluation_prompts",
    "load_prompts",
    "load_tokenizer",
    "load_training_prompts",
    "read_rows",
    "render",
    "render_prompt",
]
