"""dapo_mega: DAPO (arXiv 2503.14476) on Megatron-Core, the same code on a laptop's CPU and on a cluster."""

__version__ = "0.1.0"
