"""All that the package knows of Megatron-Core: nothing else imports it (`tests/unit/test_layering.py`).

| module | what it means to the rest |
|---|---|
| `groups` | the ranks of this process, and what processes exchange |
| `settings` | the run's configuration in Megatron's terms |
| `layers`, `routing`, `local_layers`, `packed_attention` | the layers of a decoder |
| `decoder` | the model: its stages, and the schedule that runs them |
| `optimization` | gradients, optimizer, learning rate, losses of experts |
| `checkpoint_files` | what is saved of a model, written and read |
| `repairs/` | where Megatron does not do what a run needs |
"""
