"""SGLang's scheduler and detokenizer as forks of its server, which on CPUs is as good as starting Python anew in each:
that takes two thirds of an engine's start, 20 seconds of processor time."""

import gc
import multiprocessing


def fork_processes() -> None:
    choose = multiprocessing.set_start_method

    def choose_fork(method: str, force: bool = False) -> None:
        choose("fork", force)
        gc.freeze()
        gc.enable()

    multiprocessing.set_start_method = choose_fork
