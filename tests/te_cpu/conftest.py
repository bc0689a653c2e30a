"""Tests that need the emulated device are collected where it is installed: in the processes that test_suite starts."""

from tests import te_cpu

collect_ignore = [] if te_cpu.is_installed() else ["emulated"]
