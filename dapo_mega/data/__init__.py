"""Prompts: dataset readers, templates, tokenizers, the order in which prompts are asked, and the quickstart's task.

Nothing here generates or scores.
"""

from dapo_mega.data.cursor import PromptCursor
from dapo_mega.data.prompts import (
    Demonstration,
    Pair,
    PromptDataset,
    TrainingPrompts,
    check_dataset,
    first_record,
    load_demonstrations,
    load_evaluation_prompts,
    load_pairs,
    load_prompts,
    load_training_prompts,
)
from dapo_mega.data.tokenizer import build_byte_tokenizer, load_tokenizer
