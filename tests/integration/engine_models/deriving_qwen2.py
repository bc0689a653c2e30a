"""Qwen2 that computes with what it derives from its parameters after loading, as DeepSeek's models do."""

from functools import partial

from sglang.srt.models import qwen2
from torch.nn.functional import linear


class Qwen2ForCausalLM(qwen2.Qwen2ForCausalLM):
    """Multiplies by copies of `o_proj`, made anew where the loader has been given the weight."""

    def load_weights(self, weights):
        names = []

        def noted():
            for name, tensor in weights:
                names.append(name)
                yield name, tensor

        super().load_weights(noted())
        self.post_load_weights(names)

    def post_load_weights(self, weight_names=None):
        for number, layer in enumerate(self.model.layers):
            if weight_names is None or f"model.layers.{number}.self_attn.o_proj.weight" in weight_names:
                projection = layer.self_attn.o_proj
                projection.forward = partial(_multiply, projection.weight.detach().clone())


def _multiply(weight, inputs, **_):
    return linear(inputs, weight), None


EntryClass = Qwen2ForCausalLM
