"""Runs a step of a run's real code as any rank of any number of processes, on a CPU, without its memory."""
