"""A comparison that misbehaves on command, in a module of its own so that spawned workers can import it."""

import ctypes
import os
import time


def compare(candidate: str, truth: str) -> bool:
    """Do what the candidate says; otherwise compare the spelling."""
    if "hang" in candidate:
        while True:
            time.sleep(60)
    if "wait" in candidate:
        time.sleep(0.5)
    if "spin" in candidate:
        # Minutes inside one C call, in which no Python signal handler runs.
        return 7 ** (10**9) == 0
    if "exit" in candidate:
        os._exit(3)
    if "segfault" in candidate:
        ctypes.string_at(0)
    if "memory" in candidate:
        return len(bytearray(2 * 2**30)) == 0
    if "raise" in candidate:
        raise KeyError(candidate)
    return candidate.replace("wait", "") == truth + "same"
