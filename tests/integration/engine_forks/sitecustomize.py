"""Runs first in each process of SGLang: no search for garbage while it imports, which `engine_forks` turns on again."""

import gc

gc.disable()
