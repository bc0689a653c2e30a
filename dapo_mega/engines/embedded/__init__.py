"""The engine inside the trainer's processes: transformers, for laptops and the quickstart."""
