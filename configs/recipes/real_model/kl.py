"""How far a trained model is from its start, on what it says: the KL divergence of sampled tokens, in nats per token.

python configs/recipes/real_model/kl.py START EVALUATION.parquet ...

The mean over the tokens of the first response to each prompt of an evaluation: of log p(token | trained), which the
engine gave, minus log p(token | start).
"""

import sys

import pandas as pd
import torch
from transformers import AutoModelForCausalLM

ROWS_AT_ONCE = 16


@torch.inference_mode()
def divergence(model, table):
    differences = []
    rows = table.drop_duplicates("prompt_index").sort_values("length").to_dict("records")
    for first in range(0, len(rows), ROWS_AT_ONCE):
        batch = rows[first : first + ROWS_AT_ONCE]
        texts = [torch.tensor([*row["prompt_ids"], *row["token_ids"]]) for row in batch]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # Causal: what is behind a text does not matter.
        logprobs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        for row, text, of_row in zip(batch, texts, logprobs, strict=True):
            start = len(row["prompt_ids"])
            scored = of_row[start - 1 : len(text) - 1].gather(1, text[start:, None])[:, 0]
            differences.append(torch.tensor(row["engine_logprobs"]) - scored)
    return torch.cat(differences).mean().item()


def main():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    for path in sys.argv[2:]:
        print(f"{path}: KL to the start {divergence(model, pd.read_parquet(path)):.3f} nats per token")


if __name__ == "__main__":
    main()
