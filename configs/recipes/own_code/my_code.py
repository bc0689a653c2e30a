"""A policy loss, an advantage, a filter of groups and an order of prompts of one's own. run.yaml names them."""

import random

import torch


def tanh_loss(tokens, sharpness=1.0):
    """-tanh(c (r - 1)) A / c per token: like PPO's ratio near r = 1, and bounded without an edge."""
    distance = tokens.ratios() - 1
    loss = -torch.tanh(sharpness * distance) / sharpness * tokens.advantages
    return loss, {"far_share": (distance.abs() > 0.2).float()}


def best_of_group(rewards, group, losers=0.0):
    """1 for the best responses of a group, `losers` for the others, minus their mean."""
    advantages = (rewards >= rewards.max()) * (1 - losers) + losers
    return advantages - advantages.mean()


def far_apart(group, least=0.1):
    """Keep groups whose best and worst responses are at least so far apart."""
    scores = [scored.accuracy_reward for scored in group.trajectories]
    return max(scores) - min(scores) >= least


def short_first(prompts, epoch, seed, epochs=1):
    """Prompts by length in the first epochs, then shuffled."""
    order = list(range(len(prompts)))
    random.Random(seed * 1000 + epoch).shuffle(order)
    return sorted(order, key=lambda i: len(prompts[i].text)) if epoch < epochs else order
