"""Predicts the time of linear attention's delta rule on one rank, chunk by chunk.

Within chunks its products are of all chunks at once; those with states are of one chunk of each
sequence and head after the other, which leaves multiprocessors idle.
"""

from math import ceil

from fivefold.config.config import Config
from fivefold.description.linear_attention import CHUNK
from fivefold.hardware import Gpu
from fivefold.predict.times.compute import Phases, elementwise, matmul

BACKWARD = 3.0
"""Backward over forward: it makes the forward again, and two gradients of each product."""
_KERNELS = (
    6  # of flash-linear-attention's forward: convolution, lengths, decays, system, walk, read
)
_NARROW, _WIDE = 2.0, 4.0  # bytes of an element of kernels in 16 bits, and of PyTorch's in fp32


def delta_rule(config: Config, gpu: Gpu, *, kernels: bool) -> Phases:
    """Seconds of the convolution and the delta rule for one layer and microbatch.

    Args:
        config: configuration with the degrees.
        gpu: the GPU.
        kernels: whether a few kernels in 16 bits compute it, or PyTorch's products in fp32.
    """
    model, parallel = config.model, config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    key, value = model.linear_key_head_dim, model.linear_value_head_dim
    keys = max(model.linear_num_key_heads // ranks, 1)
    values = max(model.linear_num_value_heads // ranks, 1)
    rows, length = config.training.micro_batch_size, config.training.seq_length
    steps = ceil(length / CHUNK)
    kind = config.training.precision if kernels else "fp32"
    many, one = rows * steps * values, rows * values
    at_once = 2 * matmul(gpu, CHUNK, CHUNK, key, kind, rows * steps * keys)
    at_once += matmul(gpu, CHUNK, key + value, CHUNK, kind, many)
    step = 2 * matmul(gpu, CHUNK, value, key, kind, one)  # what states hold for keys, for queries
    step += matmul(gpu, CHUNK, value, CHUNK, kind, one) + matmul(gpu, key, value, CHUNK, kind, one)
    if kernels:  # one for all steps
        step -= 4 * gpu.launch
    mixed, heads = keys * 2 * key + values * value, values * (key + value)
    within, states = values * CHUNK, values * key * value / CHUNK
    if kernels:
        moved = _NARROW * (2 * mixed + 4 * keys * key + 3 * (within + heads) + 2 * states)
        launches = _KERNELS
    else:
        taps = 5 * model.linear_conv_kernel_dim * mixed  # pad, mask, product, sum, each apart
        moved = _WIDE * (taps + 8 * mixed + 12 * within + 10 * heads + 6 * states)
        launches = 0  # the host's, see `layer.state_operations`
    forward = at_once + steps * step + elementwise(gpu, rows * length * moved, launches)
    return Phases(forward, BACKWARD * forward)
