"""What a layout costs in memory, communication and time: arithmetic only, nothing heavy is imported."""
