"""Which operations a model's log-probs differ by in bfloat16: the results of each are rounded alone, in a model that
computes in float32 with the same weights.

python configs/recipes/real_model/rounding.py MODEL EVALUATION.parquet

For models of the Llama family; of the first response to 24 prompts of an evaluation of this model.
"""

import functools
import sys
import types

import pandas as pd
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

ROWS = 24
PLACES = ("norms", "projections", "rotation", "attention", "activation", "residual stream", "logits")


def rounded(tensor):
    return tensor.bfloat16().float()


def allow_rounding(model):
    """The set of places whose results are rounded, empty at first."""
    places = set()

    def at(place, tensor):
        return rounded(tensor) if place in places else tensor

    def behind(place, module, inputs, output):
        return at(place, output)

    def before(place, module, inputs):
        return (at(place, *inputs),)

    def layer_forward(layer, hidden, **named):
        read, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden), **named)
        hidden = at("residual stream", hidden + read)
        return at("residual stream", hidden + layer.mlp(layer.post_attention_layernorm(hidden)))

    before_inputs = {"o_proj": "attention", "down_proj": "activation"}
    for name, module in model.named_modules():
        place = name.rpartition(".")[2]
        if place in before_inputs:
            module.register_forward_pre_hook(functools.partial(before, before_inputs[place]))
        if isinstance(module, torch.nn.Linear):
            kind = "logits" if module is model.lm_head else "projections"
            module.register_forward_hook(functools.partial(behind, kind))
        elif isinstance(module, modeling_llama.LlamaRMSNorm):
            module.register_forward_hook(functools.partial(behind, "norms"))
    for layer in model.model.layers:
        layer.forward = types.MethodType(layer_forward, layer)
    rotate = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda *given: tuple(at("rotation", part) for part in rotate(*given))
    return places


@torch.inference_mode()
def logprobs(model, rows):
    found = []
    for row in rows:
        text = torch.tensor([*row["prompt_ids"], *row["token_ids"]])
        start = len(row["prompt_ids"])
        scores = model(input_ids=text[None], use_cache=False).logits.float().log_softmax(-1)[0, start - 1 : -1]
        found.append(scores.gather(1, text[start:, None])[:, 0])
    return torch.cat(found)


def report(name, differences):
    size = differences.abs()
    print(f"{name}: {size.mean():.4f} nats a token, p99 {size.quantile(0.99):.3f}, most {size.max():.3f}", flush=True)


def main():
    rows = pd.read_parquet(sys.argv[2]).drop_duplicates("prompt_index").head(ROWS).to_dict("records")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    in_bf16, exact = logprobs(model, rows), logprobs(model.float(), rows)
    engine = torch.cat([torch.tensor(row["engine_logprobs"]) for row in rows])
    report("transformers in bf16", in_bf16 - exact)
    report("the engine", engine - exact)
    report("the engine against transformers in bf16", engine - in_bf16)
    places = allow_rounding(model)
    for chosen in (*((place,) for place in PLACES), PLACES):
        places.clear()
        places.update(chosen)
        report("all" if chosen == PLACES else f"only {chosen[0]}", logprobs(model, rows) - exact)


if __name__ == "__main__":
    main()
