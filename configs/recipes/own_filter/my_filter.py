"""A filter of groups of one's own. run.yaml names it."""


def far_apart(group, least=0.1):
    """Keep groups whose best and worst responses are at least so far apart."""
    scores = [scored.accuracy_reward for scored in group.trajectories]
    return max(scores) - min(scores) >= least
