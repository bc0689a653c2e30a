"""Guess a number: the policy writes a digit, and observes + if the hidden one is higher and - if it is lower."""

import random


class GuessTheNumber:
    def __init__(self, largest=9, blind=False):
        self.largest, self.blind = largest, blind

    def reset(self, task, seed):
        """Hide a number, the same one for all trajectories of a prompt."""
        self.hidden = random.Random(seed).randint(0, self.largest)
        return {"text": "\n"}

    def step(self, action):
        """What the policy's turn earns, and what it observes before its next one."""
        if not action["text"].isdecimal():
            return {"reward": -0.5, "correct": False, "done": True, "parts": {"digits": 0}}
        guess, parts = int(action["text"]), {"digits": 1}
        if guess == self.hidden:
            return {"reward": 1.0, "correct": True, "done": True, "parts": parts}
        sign = "+" if guess < self.hidden else "-"
        return {"correct": False, "text": "\n" if self.blind else sign, "parts": parts}
