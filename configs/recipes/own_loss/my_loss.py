"""A policy loss of one's own, with one parameter and one metric. run.yaml names it."""

import torch


def tanh_loss(tokens, sharpness=1.0):
    """-tanh(c (r - 1)) A / c per token: like PPO's ratio near r = 1, and bounded without an edge."""
    distance = tokens.ratios() - 1
    loss = -torch.tanh(sharpness * distance) / sharpness * tokens.advantages
    return loss, {"far_share": (distance.abs() > 0.2).float()}
