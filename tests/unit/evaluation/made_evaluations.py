"""Saved evaluations with known numbers of right responses."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dapo_mega.samples.files import file_of, samples_folder, write_table
from dapo_mega.samples.pieces import TokenPieces
from dapo_mega.samples.rows import SampleFile, rows_of_evaluation
from dapo_mega.samples.table import to_table
from dapo_mega.types import Prompt, Response
from tests.made_trajectories import scored_answer

SETTINGS = {
    "model": "models/tiny",
    "seed": 0,
    "template": "dapo",
    "chat_template": False,
    "grader": {"kind": "answer", "extraction": "dapo", "numeric_tolerance": 0.0},
    "max_response_tokens": 64,
    "temperature": 1.0,
    "top_p": 0.7,
    "top_k": 0,
}


class _Letters:
    """A tokenizer whose tokens are letters."""

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return ["".join(chr(97 + token % 26) for token in sequence) for sequence in sequences]


def save(
    folder: Path,
    right: Sequence[int],
    samples: int | Sequence[int],
    *,
    step: int = 0,
    settings: Mapping[str, object] | None = SETTINGS,
    source: str = "sums",
    prompts: Sequence[str] | None = None,
    truths: Sequence[str] | None = None,
    kind: str = "evaluation",
    judged: bool = True,
) -> Path:
    """An evaluation in which the first `right[i]` of the `samples` responses to problem i are right; the others give
    different answers, each its own."""
    counts = [samples] * len(right) if isinstance(samples, int) else samples
    results = []
    for i, (num_right, num_samples) in enumerate(zip(right, counts, strict=True)):
        truth = truths[i] if truths else str(i)
        text = prompts[i] if prompts else f"What is {i}?"
        prompt = Prompt(i, text, np.arange(3, dtype=np.int32), truth, data_source=source)
        for j in range(num_samples):
            is_right = j < num_right
            tokens = np.full(4 if is_right else 8, j, np.int32)
            response = Response(1000 * i + j, tokens, np.zeros(len(tokens), np.float32), "stop", 0)
            scored = scored_answer(
                response, "said", is_right if judged else None, 1.0, 1.0, truth if is_right else f"no{j}"
            )
            results.append((prompt, scored))
    account = {"settings": dict(settings)} if settings else {}
    file = SampleFile(step, kind, rows_of_evaluation(results), account)
    path = file_of(samples_folder(folder), file.kind, step)
    write_table(path, to_table(file, TokenPieces(_Letters())))
    return folder
