"""Groups of scored responses become packed micro-batches on the processes that train on them. No model, no engine."""
