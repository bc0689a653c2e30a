"""Sends the policy's weights to the engines. `sglang_plugin` is the receiving side."""
