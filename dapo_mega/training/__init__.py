"""The training loop, the code that builds a run, and how runs start and end. Begin reading with `loop`."""
