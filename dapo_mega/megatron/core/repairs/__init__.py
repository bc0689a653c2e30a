"""Repairs of Megatron-Core where it does not do what a run needs: here those of all versions, in folders those of some.

Each says its cause and when it can go; it asks for the feature that it is about, not for a version. Nothing else in
the package changes Megatron.
"""
