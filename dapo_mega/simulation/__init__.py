"""Runs the real collector on simulated engines and a simulated trainer, in simulated time. What trains is not here."""
