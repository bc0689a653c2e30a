"""Algorithm 1 of the paper up to the buffer: sample, score, filter, keep. No updates."""
