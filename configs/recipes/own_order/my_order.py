"""An order of prompts of one's own: a class, made once with the settings and then called. run.yaml names it."""

import random


class ShortFirst:
    def __init__(self, epochs=1):
        self.epochs = epochs

    def __call__(self, prompts, epoch, seed):
        """Prompts by length in the first epochs, then shuffled."""
        order = list(range(len(prompts)))
        random.Random(seed * 1000 + epoch).shuffle(order)
        return sorted(order, key=lambda i: len(prompts[i].text)) if epoch < self.epochs else order
