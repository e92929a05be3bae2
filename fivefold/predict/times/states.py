"""Predicts the times of linear attention's delta rule, Mamba-2's state space and short convolutions
on one rank.

Within chunks its products are of all chunks at once; those with states are of one chunk of each
sequence and head after the other, which leaves multiprocessors idle.
"""

from math import ceil, log2

from fivefold.config.config import Config
from fivefold.description.linear_attention import CHUNK, DeltaRule, GatedConvolution, Recurrence
from fivefold.hardware import Gpu
from fivefold.predict.cluster import Cluster
from fivefold.predict.software import Software
from fivefold.predict.times.compute import Phases, elementwise, matmul
from fivefold.predict.times.context import exchange
from fivefold.predict.times.stage import Times

BACKWARD = 3.0
"""Backward over forward: it makes the forward again, and two gradients of each product."""
_KERNELS = 6
"""Of flash-linear-attention's forward: convolution, lengths, decays, system, walk, read; of
mamba_ssm's: convolution, decays, what chunks write, walk, scores, read."""
_NARROW, _WIDE = 2.0, 4.0  # bytes of an element of kernels in 16 bits, and of PyTorch's in fp32


def states(op: Recurrence, config: Config, cluster: Cluster, software: Software) -> Times:
    """The time of a layer's state operations, and of exchanging heads between context-parallel
    ranks."""
    of_rule = {DeltaRule: delta_rule, GatedConvolution: convolution}.get(type(op), state_space)
    made = of_rule(config, cluster.gpu, kernels=software.state_kernels)
    parallel = config.parallel
    tp, ranks = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    features = (op.read_features + op.sizes.size) / tp
    size = config.rank_tokens * _NARROW * features * (1 - 1 / ranks)
    cp = exchange(cluster, ranks, tp, size)
    return Times(made, cp=Phases(cp, cp))


def delta_rule(config: Config, gpu: Gpu, *, kernels: bool) -> Phases:
    """Seconds of the convolution and the delta rule for one layer and microbatch.

    Args:
        config: configuration with the degrees.
        gpu: the GPU.
        kernels: whether a few kernels in 16 bits compute it, or PyTorch's products in fp32.
    """
    model, parallel = config.model, config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    sizes = model.states
    key, value = sizes.key, sizes.value
    keys, values = max(sizes.groups // ranks, 1), max(sizes.heads // ranks, 1)
    rows, length = config.training.micro_batch_size, config.training.seq_length
    steps = ceil(length / CHUNK)
    kind = config.training.precision if kernels else "fp32"
    many, one = rows * steps * values, rows * values
    at_once = _keys_met(gpu, key, kind, rows * steps * keys, halves=model.fades_features)
    at_once += matmul(gpu, CHUNK, key + value, CHUNK, kind, many)
    step = 2 * matmul(gpu, CHUNK, value, key, kind, one)  # read of states by keys and by queries
    step += matmul(gpu, CHUNK, value, CHUNK, kind, one) + matmul(gpu, key, value, CHUNK, kind, one)
    if kernels:  # one launch for all steps
        step -= 4 * gpu.launch
    mixed, heads = keys * 2 * key + values * value, values * (key + value)
    within, states = values * CHUNK, values * key * value / CHUNK
    faded = keys * key * model.fades_features  # decays of single features
    if kernels:
        moved = _NARROW * (2 * mixed + 4 * keys * key + 3 * (within + heads) + 2 * states)
        moved += _NARROW * 2 * faded
        launches = _KERNELS
    else:
        taps = 5 * sizes.taps * mixed  # pad, mask, product, sum, each apart
        moved = _WIDE * (taps + 8 * mixed + 12 * within + 10 * heads + 6 * states)
        moved += _WIDE * (8 + 9 * log2(CHUNK)) * faded  # half of all tokens in each halving
        launches = 0  # the host's, see `layer.forward_operations`
    forward = at_once + steps * step + elementwise(gpu, rows * length * moved, launches)
    return Phases(forward, BACKWARD * forward)


def _keys_met(gpu: Gpu, key: int, kind: str, chunks: int, *, halves: bool) -> float:
    """Seconds of what keys and queries of chunks meet of keys: chunk by chunk, or where states
    forget features one by one, the later halves of the earlier ones, and so on within these."""
    if not halves:
        return 2 * matmul(gpu, CHUNK, CHUNK, key, kind, chunks)
    sizes = [CHUNK >> level for level in range(1, CHUNK.bit_length())]
    each = (matmul(gpu, n, n, key, kind, 2 * chunks * CHUNK // (2 * n)) for n in sizes)
    return sum(each)


def state_space(config: Config, gpu: Gpu, *, kernels: bool) -> Phases:
    """Seconds of the convolution and the state space of Mamba-2; arguments as of `delta_rule`.

    Its products are of all chunks at once. Only the sum of a state and of what a chunk has written
    goes from step to step.
    """
    sizes, parallel = config.model.states, config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    groups, heads = max(sizes.groups // ranks, 1), max(sizes.heads // ranks, 1)
    key, value = sizes.key, sizes.value
    rows, length = config.training.micro_batch_size, config.training.seq_length
    steps = ceil(length / CHUNK)
    kind = config.training.precision if kernels else "fp32"
    many = rows * steps * heads
    products = matmul(gpu, CHUNK, CHUNK, key, kind, rows * steps * groups)  # C with B
    products += matmul(gpu, CHUNK, value, CHUNK, kind, many)  # what queries read within a chunk
    products += matmul(gpu, key, value, CHUNK, kind, many)  # what the chunk writes
    products += matmul(gpu, CHUNK, value, key, kind, many)  # what queries read of states
    mixed, within = 2 * groups * key + heads * value, heads * CHUNK
    states = heads * key * value / CHUNK
    if kernels:
        moved, launches = _NARROW * (4 * mixed + 2 * within + 6 * states), _KERNELS
    else:
        taps = 5 * sizes.taps * mixed  # pad, mask, product, sum, each apart
        each = heads * (3 * key + 4 * value)
        moved, launches = _WIDE * (taps + 6 * mixed + 7 * within + each + 8 * states), 0
    forward = products + elementwise(gpu, rows * length * moved, launches)
    return Phases(forward, BACKWARD * forward)


def convolution(config: Config, gpu: Gpu, *, kernels: bool) -> Phases:
    """Seconds of a gated short convolution; arguments as of `delta_rule`."""
    sizes, parallel, training = config.model.states, config.parallel, config.training
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    features = training.micro_batch_size * training.seq_length * sizes.mixed / ranks
    if kernels:  # one reads x and B, and writes; one for the product before it
        moved, launches = _NARROW * 5, 2
    else:  # of each tap pad, mask, product and sum; the product before it, and what is cast
        moved, launches = _WIDE * (7 * sizes.taps + 4), 7 * sizes.taps + 4
    forward = elementwise(gpu, features * moved, launches)
    return Phases(forward, BACKWARD * forward)
