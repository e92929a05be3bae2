"""What ZeRO++ takes on one device to round the messages of a layer: by kernels, and by PyTorch.

    python -m benchmarks.gpu_messages [--dry]

Weights of a layer of Llama-3 8B in bf16 as INT8, and its gradients in fp32 as INT4, for eight
ranks: seconds to pack what a rank sends, and to unpack what it gets (gradients: and to add it up;
PyTorch's operations only unpack). Prints a line of JSON for each. `--dry` is small, on a CPU,
where PyTorch's operations do it all.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_eight_bit import usual
from benchmarks.gpu_layers import tell
from fivefold.data_parallel.blocks import GRADIENT_BITS, WEIGHT_BITS
from fivefold.data_parallel.quantised import Blocks

RANKS = 8
ELEMENTS = {False: 218_103_808, True: 65_536}


def rows(dry: bool) -> Iterator[dict[str, Any]]:
    """A row for weights, and one for gradients."""
    device, each = torch.device("cpu" if dry else "cuda"), ELEMENTS[dry] // RANKS
    weights = torch.randn(1, 1, each, device=device, dtype=torch.bfloat16)
    gradients = torch.randn(RANKS, 1, each, device=device)
    yield {"what": "weights"} | _times(Blocks(WEIGHT_BITS), weights, messages=1)
    yield {"what": "gradients"} | _times(Blocks(GRADIENT_BITS), gradients, messages=RANKS)


def _times(form: Blocks, x_ABN: Tensor, messages: int) -> dict[str, float]:
    """Of packing `x_ABN`, and of unpacking eight messages, of which so many are added up."""
    timed = partial(usual, device=x_ABN.device)
    elements = x_ABN.shape[2]
    sent = x_ABN.new_empty(len(x_ABN), form.length(elements), dtype=torch.uint8)
    arrived = sent.new_zeros(messages, RANKS // messages, sent.shape[1])
    out = x_ABN.new_empty(RANKS // messages, elements)

    def plainly() -> None:
        for each in arrived:
            form.unpack(each, elements, x_ABN.dtype)

    return {
        "pack": timed(partial(form.pack_runs, [x_ABN], sent)),
        "unpack": timed(partial(form.unpack_runs, arrived, [out])),
        "pack, PyTorch": timed(partial(form.pack, x_ABN.flatten(0, 1))),
        "unpack, PyTorch": timed(plainly),
    }


if __name__ == "__main__":
    tell(rows, __doc__)
