"""What the measured layers share: sizes, and how a run of them is timed and counted.

The layers are those of a Llama: RMSNorm, grouped queries, RoPE, SwiGLU. Sizes are so small that
nearly all time is the host's. Nothing but layers runs: no embedding, no head, no data parallelism.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.audit.launches import Launches
from fivefold.rehearse.world import pretended_world

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, SEQ = 4, 32, 4, 2, 64, 16
NORM_EPSILON, ROPE_BASE = 1e-5, 10000.0
WARMUP = 10  # runs before the first that counts


class Place(NamedTuple):
    """Where and as what layers are built.

    Attributes:
        tp: tensor-parallel ranks, of which this process is the first; others are pretended.
        device: where.
        dtype: of weights and hidden states.
    """

    tp: int
    device: torch.device
    dtype: torch.dtype


class Layers(NamedTuple):
    """A system's layers, ready to run.

    Attributes:
        forward: runs all of them on hidden states.
        shape: shape of the hidden states that enter on one rank.
        owners: the modules whose parameters get gradients.
    """

    forward: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    owners: list[nn.Module]


def fused_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """What stands for an RMSNorm: one kernel each way, as on a GPU, where a CPU's takes many."""
    return F.layer_norm(x, weight.shape, weight, None, epsilon)


def serve(build: Callable[[Place], Layers]) -> None:
    """Build layers as `TP DEVICE DTYPE` on the command line say; then run them as many times as
    each line of the input says, and answer with what a layer took; at 0 with what it launches."""
    tp, device, dtype = sys.argv[1:]
    place = Place(int(tp), torch.device(device), getattr(torch, dtype))
    torch.manual_seed(1)
    torch.set_num_threads(1)
    nn.RMSNorm.forward = lambda self, x: fused_norm(x, self.weight, NORM_EPSILON)  # type: ignore
    with pretended_world(0, place.tp, gpus=True):
        layers = build(place)
        x = torch.randn(layers.shape, device=place.device, dtype=place.dtype).requires_grad_()
        grad = torch.randn_like(x)
        for _ in range(WARMUP):
            layers.forward(x).backward(grad)
        every = [p for owner in layers.owners for p in owner.parameters()]
        assert all(p.grad is not None for p in every), "a parameter got no gradient"
        for line in sys.stdin:
            runs = int(line)
            found = _seconds(layers, x, grad, runs) if runs else _launches(layers, x, grad)
            print(json.dumps(found), flush=True)


def _seconds(layers: Layers, x: Tensor, grad: Tensor, runs: int) -> dict[str, float]:
    """CPU seconds of this process per layer and microbatch; gradients are added to earlier ones."""
    forward = backward = 0.0
    for _ in range(runs):
        began = time.process_time()
        y = layers.forward(x)
        between = time.process_time()
        y.backward(grad)
        forward += between - began
        backward += time.process_time() - between
    per_layer = runs * LAYERS
    return {"forward": forward / per_layer, "backward": backward / per_layer}


def _launches(layers: Layers, x: Tensor, grad: Tensor) -> dict[str, float]:
    """Operations launched per layer and microbatch, without adding to the gradient of `x`."""
    with Launches() as seen:
        y = layers.forward(x)
        forward = seen.count
        y.backward(grad)
    return {"forward": forward / LAYERS, "backward": (seen.count - forward - 1) / LAYERS}
