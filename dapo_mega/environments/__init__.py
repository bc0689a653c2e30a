"""How trajectories come about: a single answer, or turns of the policy and of an environment of the user's own."""
