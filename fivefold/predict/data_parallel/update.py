"""Predicts the time of the optimizer update, on the device and with state in host memory.

The update is limited by memory bandwidth: that of the device, or a GPU's share of the host's. With
state on the host it begins when the norm is known, and copies go on meanwhile. Gradients leave
during the backward, over the link. All rates are of data sheets; see `predict.cluster`.
"""

from collections.abc import Iterable
from dataclasses import replace

from fivefold.config.config import Config
from fivefold.counts.policy import StatePolicy, engine_policy
from fivefold.predict.cluster import Cluster
from fivefold.predict.times.compute import V, elementwise

RANDOM_BITS = 112.0
"""Bytes per parameter that making its 64 random bits reads and writes on a host, where each
operation does so; on a GPU one kernel updates and rounds (`optim/adamw_kernels.py`)."""
ROUNDING = 94.0
"""Bytes per parameter that they move for each moment that is widened, then rounded."""
SCALING = 60.0
"""Bytes per parameter that they move besides where a moment has scales of blocks."""
KERNELS = 20


def update_seconds(
    cluster: Cluster, policy: StatePolicy, parameters: V, kernels: int = KERNELS
) -> V:
    """Seconds of a rank's update on its device, for the parameters whose state it keeps."""
    copy = policy.compute if policy.compute != policy.master else 0.0
    state = policy.master + policy.moments  # read and written
    here = policy.gradient + 2 * state + copy - policy.compute * policy.masters_apart
    norm = policy.gradient
    kept = (1 - policy.offloaded) * here + norm
    return elementwise(cluster.gpu, parameters * kept, kernels)


def summing_seconds(cluster: Cluster, config: Config, narrow: V, experts: V) -> V:
    """Seconds of separate kernels that add a microbatch's gradients to those of earlier ones: they
    read gradients, and read and write the sum.

    Products that compute gradients add them up themselves, but for grouped ones of experts, and
    those of 8 and 4 bits.

    Args:
        cluster: the hardware.
        config: the configuration.
        narrow: number of a rank's parameters, but for experts', of layers that multiply so if any
            do.
        experts: number of its experts' parameters.
    """
    policy = engine_policy(config)
    moved = policy.compute + 2 * policy.gradient
    parameters = experts + narrow * config.narrow_products
    return elementwise(cluster.gpu, parameters * moved, kernels=0)


def offload_seconds(cluster: Cluster, policy: StatePolicy, parameters: V) -> V:
    """Seconds of a rank's update of state in host memory, including copies.

    The gradients are there. On the host, clipping reads and writes them, AdamW reads them and reads
    and writes masters and moments, and weights are written in the compute type from the masters, to
    be copied to the device. If the device does this, all of it is copied there, and masters and
    moments back; buckets on both ways pass each other. What lies on a disk is read and written
    there meanwhile, bucket by bucket.
    """
    state, weights = policy.master + policy.moments, policy.compute * policy.offloads_weights
    touched = 3 * policy.gradient + 2 * state + policy.master + policy.compute
    written = 2 * state * policy.on_disk + policy.compute * policy.weights_on_disk
    times = [written * cluster.sharing / cluster.disk_bandwidth]
    if policy.updates_on_device:
        there, back = policy.gradient + state, state + weights
        times.append(max(there, back) / cluster.host_bandwidth)
        times.append((there + back + 2 * weights) / cluster.host_rate)
        times.append(elementwise(cluster.gpu, touched, kernels=0))
    else:
        times.append((policy.compute - weights) / cluster.host_bandwidth)
        touched += _rounding(policy) + _widening(policy)
        times.append(touched / cluster.host_rate)
    return parameters * policy.offloaded * max(times)


def faster_on_device(cluster: Cluster, policy: StatePolicy) -> bool:
    """Whether state in host memory is updated sooner by copying it to the device."""
    there, here = (
        offload_seconds(cluster, replace(policy, offloaded=1.0, updates_on_device=on_device), 1.0)
        for on_device in (True, False)
    )
    return there < here


def bringing_seconds(cluster: Cluster, policy: StatePolicy, parameters: float) -> float:
    """Seconds to copy offloaded weights to the device once, while others are read from a disk;
    `parameters`: the number that the rank keeps."""
    rate = cluster.host_bandwidth
    if policy.weights_on_disk:
        rate = min(rate, cluster.disk_bandwidth / cluster.sharing)
    return policy.offloads_weights * policy.offloaded * parameters * policy.compute / rate


def leaving_seconds(
    cluster: Cluster, policy: StatePolicy, parts: Iterable[tuple[float, int]], backward: float
) -> float:
    """Seconds by which copies of gradients to the host end after the backwards that compute them.

    After the first copy, the host's sum is copied back at the same time, to be added to.

    Args:
        cluster: the hardware.
        policy: the model state per parameter, and where it is kept.
        parts: numbers of parameters whose state the rank keeps, with how often their gradients
            leave in a step.
        backward: seconds of a backward, during which they do.
    """
    parts, late, before = list(parts), 0.0, 0
    for times in sorted({often for _, often in parts}):
        leaving = sum(parameters for parameters, often in parts if often >= times)
        copied = leaving * policy.offloaded * policy.gradient / cluster.host_bandwidth
        late += (times - before) * max(0.0, copied - backward)
        before = times
    return late


def _rounding(policy: StatePolicy) -> float:
    """Bytes per parameter that rounding moments moves on a host; within its caches, no faster."""
    if not policy.rounded:
        return 0.0
    return RANDOM_BITS + ROUNDING * policy.rounded + SCALING * policy.eight_bit


def _widening(policy: StatePolicy) -> float:
    """Bytes per parameter for a copy of the gradient in fp32: read once, written once."""
    return policy.gradient + 4.0 if policy.gradient < 4 else 0.0
