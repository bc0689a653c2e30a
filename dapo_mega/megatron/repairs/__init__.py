"""What Megatron-Core 0.16 does otherwise than a run needs, and what is done about it.

Each repair stands beside its cause and says when it can go. Nothing else in the package changes Megatron.
"""
