"""Runs programs that a model wrote, in processes that can neither reach the run nor say by themselves that they passed.

`client` is used by the trainer. All other modules run in the sandbox's own processes, import nothing of the package,
and use the standard library only, so that such a process starts fast and holds no secret.
"""
