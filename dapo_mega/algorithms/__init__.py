"""Advantages, losses, filters, orders and aggregation, as pure functions of numbers and tensors.

No processes, no model, no state: every number can be computed by hand. What a user can choose is a section of the
configuration that computes: `policy_losses/`, `advantages.py`, `filters.py`, `orders.py`.
"""
