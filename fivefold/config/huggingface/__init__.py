"""Converts Hugging Face config.json files to ModelConfig.

Every field of the file is either understood, known to have no effect, or refused by name. A field
that changes the model which transformers builds is never ignored.
"""

from fivefold.config.huggingface.adapter import is_adapter, read_adapter, refuse_adapter
from fivefold.config.huggingface.read import from_hf_config

__all__ = ["from_hf_config", "is_adapter", "read_adapter", "refuse_adapter"]
