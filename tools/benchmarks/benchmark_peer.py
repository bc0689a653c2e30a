"""The peer of benchmark_step.py: TRL's GRPOTrainer with the DAPO loss on the CPU, one step whenever it is told to.

Run by the peer's own Python, which has trl and none of this project: benchmark_peer.py SETTINGS.json. A line on
standard input starts a step: a JSON list of its responses' lengths, which they get exactly: the end token is forbidden
before and forced at the end. A line `STEP {json}` on standard output reports the step's seconds. Rows that have ended
are decoded on until the last one ends, and padded in the update; that is how the trainer works.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class ForcedLengths:
    """A logits processor: row r emits its end token as token number lengths[r], and not before."""

    def __init__(self, end_token: int) -> None:
        self.lengths: Any = None
        self._end_token = end_token
        self.width = 0
        """Padded prompt tokens of the batch being generated."""

    def __call__(self, token_ids: Any, scores: Any) -> Any:
        is_last = self.lengths == token_ids.shape[1] - self.width + 1
        end_scores = scores[:, self._end_token].clone()
        scores[is_last] = float("-inf")  # In place, so that the peer pays for no copies.
        scores[:, self._end_token] = end_scores.masked_fill(~is_last, float("-inf"))
        return scores


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    import torch

    torch.set_num_threads(settings["threads"])
    trainer = build_trainer(settings)
    trainer.train()


def build_trainer(settings: dict[str, Any]) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.bfloat16 if settings["dtype"] == "bf16" else torch.float32
    )
    forced = ForcedLengths(tokenizer.eos_token_id)
    done: dict[str, float] = {}
    generate = model.generate

    @functools.wraps(generate)
    def timed_generate(*inputs: Any, **options: Any) -> Any:
        prompt_ids = options["input_ids"] if "input_ids" in options else inputs[0]
        forced.width = prompt_ids.shape[1]
        started = time.perf_counter()
        output = generate(*inputs, **options, logits_processor=LogitsProcessorList([forced]))
        done["generation"] = time.perf_counter() - started
        return output

    model.generate = timed_generate

    def is_right(completions: list[str], answer: list[str], completion_ids: Any, **_: Any) -> list[float]:
        done["tokens"] = sum(map(len, completion_ids))
        return [1.0 if completion == wanted else -1.0 for completion, wanted in zip(completions, answer, strict=True)]

    class Turns(TrainerCallback):
        """Waits for a line before each step, and reports after it."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            line = sys.stdin.readline()
            if not line:
                sys.exit()
            forced.lengths = torch.tensor(json.loads(line))
            self.started = (time.perf_counter(), time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wall, cpu = self.started
            report = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, **done}
            print("STEP " + json.dumps(report), flush=True)

    num_rows = settings["num_rows"]
    micro_rows = settings["micro_rows"] or num_rows
    config = GRPOConfig(
        output_dir=settings["output_dir"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        num_generations=settings["group_size"],
        max_completion_length=settings["longest"],
        temperature=1.0,
        scale_rewards="group",
        per_device_train_batch_size=micro_rows,
        gradient_accumulation_steps=num_rows // micro_rows,
        generation_batch_size=num_rows,
        num_iterations=1,
        max_steps=len(settings["prompts"]) // (num_rows // settings["group_size"]),
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    columns = {"prompt": settings["prompts"], "answer": settings["answers"]}
    return GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=is_right,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )


if __name__ == "__main__":
    main()
