"""The console commands: `dapo-mega NAME ...`. The scripts in `launch/` and `tools/` call the same functions.

A command reads its arguments and calls the room that does the work. No computing here; nothing imports this room.
"""
