"""Prints as JSON the loss that TRL's SFTTrainer has on rows of each kind, with the interpreter that has TRL.

python losses_of_trl.py MODEL ROWS KINDS, where KINDS is JSON: name -> TRL's column -> that of the rows.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

MODEL, ROWS, KINDS = sys.argv[1:]
rows = [json.loads(line) for line in Path(ROWS).read_text().splitlines()]
losses = {}
for name, columns in json.loads(KINDS).items():
    data = Dataset.from_list([{of_trl: row[column] for of_trl, column in columns.items()} for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder, per_device_eval_batch_size=len(rows), max_length=1024, report_to=[], use_cpu=True,
            bf16=False, assistant_only_loss=name != "text",
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        trainer = SFTTrainer(model, settings, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
        losses[name] = trainer.evaluate()["eval_loss"]
print(json.dumps(losses))
