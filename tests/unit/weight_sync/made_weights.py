"""Policies with small weights, and which engines of a scripted fleet hold them."""

from __future__ import annotations

import torch

from dapo_mega.types import WeightBucket, WeightSpec
from tests.unit.weight_sync.scripted_engines import OneSenderPerStage

TIMEOUT_S = 20.0  # Of each part of an update; nothing waits for it to pass.
URLS = ["http://e0", "http://e1", "http://e2"]
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16)


class Policy(OneSenderPerStage):
    """Three buckets whose values are those of the version."""

    def __init__(self):
        self.version = 0
        self.tensors = {}

    def advance(self):
        self.version += 1
        random = torch.Generator().manual_seed(self.version)
        self.tensors = {f"w{i}": torch.randn(5 + i, 3, generator=random).to(d) for i, d in enumerate(DTYPES)}
        return self

    def buckets(self):
        names = list(self.tensors)
        for start in (0, 2, 4):
            tensors = {name: self.tensors[name] for name in names[start : start + 2]}
            specs = tuple(WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
            yield WeightBucket(0, specs, iter(tensors.values()), is_last=start == 4)


class SlowlyChanging(OneSenderPerStage):
    """One bf16 matrix of which each version changes one row."""

    def __init__(self):
        self.version = 0
        self.tensors = {"w": torch.zeros(100, 30, dtype=torch.bfloat16)}

    def advance(self):
        self.version += 1
        self.tensors["w"][self.version] = self.version
        return self

    def buckets(self):
        spec = WeightSpec("w", torch.bfloat16, (100, 30))
        yield WeightBucket(0, (spec,), iter(self.tensors.values()), is_last=True)


class WithAdapters:
    """What never changes, and what does."""

    def __init__(self):
        self.base, self.adapters = Policy().advance(), SlowlyChanging()

    def advance(self):
        self.adapters.advance()
        return self

    @property
    def tensors(self):
        return {**self.base.tensors, **self.adapters.tensors}

    def selected(self, selection):
        return {"base": self.base, "adapters": self.adapters}[selection]


def holders(fleet, policy):
    """URLs of the engines whose weights are exactly the policy's."""

    def is_exact(weights):
        return weights.keys() == policy.tensors.keys() and all(
            torch.equal(weights[n].view(torch.uint8), t.view(torch.uint8)) for n, t in policy.tensors.items()
        )

    return [url for url, engine in fleet.engines.items() if is_exact(engine.weights)]
