"""What a Hugging Face config.json says, as a ModelConfig.

Every field of the file is understood, or known to be without effect, or refused by name: what
changes the model that transformers builds is never dropped in silence.
"""

from fivefold.config.huggingface.read import from_hf_config

__all__ = ["from_hf_config"]
