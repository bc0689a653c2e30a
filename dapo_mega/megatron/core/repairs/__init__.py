"""Repairs of Megatron-Core 0.16 where it does not do what a run needs.

Each repair documents its cause and when it can be removed. Nothing else in the package changes Megatron.
"""
