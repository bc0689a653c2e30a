"""The loop holds a step's groups no longer than it needs them."""

from types import SimpleNamespace
from weakref import ref

from dapo_mega.training import loop


class Groups(list):
    """A weak reference to it can be held."""


def test_a_steps_groups_are_gone_when_the_next_ones_are_asked_for(monkeypatch):
    """With the experts of their tokens they take gigabytes."""
    run, collected, alive = SimpleNamespace(step=0, config=SimpleNamespace(num_steps=3)), [], []

    def collect(run):
        alive.append([groups() is not None for groups in collected])
        groups = Groups()
        collected.append(ref(groups))
        return groups, {}

    def learn(run, groups, metrics):
        run.step += 1

    for name, stub in {"begin": None, "collect_step": collect, "learn": learn, "end": None}.items():
        monkeypatch.setattr(loop, name, stub or (lambda run: None))
    loop.train(run)
    assert alive == [[], [False], [False, False]]
