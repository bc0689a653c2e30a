"""Algorithm 1 of the paper up to the buffer: ask, score, filter, keep; and held-out evaluation. No updates."""
