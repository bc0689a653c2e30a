"""The loop, what builds it, and how runs start and end. `loop` is the place to begin reading."""
