"""PyTorch as transformers is to see it, whose models compute some things in fp32 whatever comes."""

from typing import Any

import torch


class Wide:
    """PyTorch with fp64 for fp32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)
