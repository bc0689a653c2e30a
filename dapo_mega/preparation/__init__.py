"""Makes training data: folders that appear complete or not at all, each with a card that says how it was made.

Reads what `data` reads, judges answers as `rewards` does, and asks models as `evaluation` does. Runs read the cards,
and nothing else of this room.
"""
