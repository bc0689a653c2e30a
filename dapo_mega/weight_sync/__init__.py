"""How the policy's weights reach the engines."""
