"""Model families: one declarative file each, mapping Hugging Face tensors to Megatron-Core parameters.

Names, shapes and files only: no model is built here, and Megatron is not imported.
"""

from dapo_mega.models.architecture import Architecture
from dapo_mega.models.families import ModelFamily, TensorRule, load_architecture
from dapo_mega.models.layouts import ShardRule, merge_shards, take_shard
