"""What a layout costs in memory, communication and time, before anything starts.

Arithmetic only: nothing heavy is imported.
"""
