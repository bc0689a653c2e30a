"""Rewards from a verdict and a length: pure functions, no state."""

from collections.abc import Sequence


def accuracy_reward(correct: bool, correct_reward: float = 1.0, incorrect_reward: float = -1.0) -> float:
    """Rule-based outcome reward: +1 for an equivalent answer, -1 otherwise. DAPO eq. 7."""
    return correct_reward if correct else incorrect_reward


def soft_overlong_punishment(length: int, max_length: int, cache_length: int) -> float:
    """Length penalty in [-1, 0], to be added to the accuracy reward. DAPO eq. 13.

    It is 0 up to `max_length - cache_length`, falls linearly to -1 at `max_length`, and stays at -1 beyond.
    All three arguments count response tokens; `max_length` is the longest generation (20480 in the paper)
    and `cache_length` the interval of soft punishment (4096).

    Raises ValueError where `cache_length` is not in 1..`max_length` or `length` is negative.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(
            f"cache_length={cache_length} with max_length={max_length}; choose 1 <= cache_length <= max_length"
        )
    if length < 0:
        raise ValueError(f"length={length}; a response has 0 tokens or more")
    unpunished = max_length - cache_length
    if length <= unpunished:
        return 0.0
    if length <= max_length:
        return (unpunished - length) / cache_length
    return -1.0


def length_rewards(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Kimi k1.5's length reward of every response of one group, in [-0.5, 0.5] (arXiv 2501.12599, section 2.3.3).

    With l = 0.5 - (length - shortest) / (longest - shortest), a correct response gets l and a wrong one min(0, l):
    short correct responses gain, long ones lose, and no wrong one gains. Responses of equal length get 0. `lengths`
    count response tokens.
    """
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [share if is_correct else min(0.0, share) for share, is_correct in zip(shares, correct, strict=True)]
