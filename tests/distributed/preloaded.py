"""What workers import, loaded once: they are forks of a process that has done so."""

import gc

gc.disable()  # Imports make little garbage, and take a fifth less.
try:
    import pytest  # noqa: F401
    import torch

    from tests.te_cpu import install_if_asked

    install_if_asked()

    from dapo_mega.megatron.core.repairs import cpu_accelerator

    cpu_accelerator.install()

    # What is imported when it is first used: by pyarrow given a list, where pandas is installed, and by transformers.
    import pyarrow
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM  # noqa: F401

    import dapo_mega.commands.prepare
    import dapo_mega.metrics.tensorboard
    import dapo_mega.training.run
    import dapo_mega.training.sft  # noqa: F401
    from dapo_mega.cli import look_past_what_is_there
except ImportError as error:
    # multiprocessing passes over an ImportError here, and would make workers of the half of what is wanted.
    raise RuntimeError("tests.distributed.preloaded cannot import what all workers need") from error

pyarrow.array([1])
torch.set_num_threads(1)
# What is imported stays: workers need not look through it for garbage, which Megatron does at each of its checkpoints.
look_past_what_is_there()
gc.enable()
