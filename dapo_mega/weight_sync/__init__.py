"""How the policy's weights reach the engines. What the engines do with them is in `sglang_plugin`."""
