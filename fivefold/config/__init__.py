"""Settings: what the model is, how it is laid out, how it is trained."""

from fivefold.config.config import Config

__all__ = ["Config"]
