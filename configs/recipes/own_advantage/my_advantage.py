"""An advantage of one's own. run.yaml names it."""


def best_of_group(rewards, group, losers=0.0):
    """1 for the best responses of a group, `losers` for the others, minus their mean."""
    advantages = (rewards >= rewards.max()) * (1 - losers) + losers
    return advantages - advantages.mean()
