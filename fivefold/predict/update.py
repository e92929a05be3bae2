"""Predicts the time of the optimizer update, on the device and with state in host memory.

The update is limited by memory bandwidth: that of the device, or a GPU's share of the host's. This
share is assumed to equal the bandwidth of the GPU's link, which is nearly true in current machines:
in a DGX H100 with 614 GB/s of DDR5, each GPU has a share of 77 GB/s, of which an update reaches two
thirds, and a link of 50 GB/s.
"""

from fivefold.counts.state import StatePolicy
from fivefold.predict.cluster import Cluster
from fivefold.predict.compute import elementwise

NORM = 4.0
"""Bytes per parameter that the gradient norm reads."""
TRAFFIC = 30.0 + NORM
"""Bytes per parameter that AdamW and the norm before it move: gradient, master and moments are
read; master, moments and the copy in the compute type are written."""
KERNELS = 20


def update_seconds(
    cluster: Cluster, policy: StatePolicy, parameters: float, kernels: int = KERNELS
) -> float:
    """Seconds of a rank's update on its device.

    Args:
        cluster: the hardware.
        policy: the model state per parameter, and where it is kept.
        parameters: number of parameters whose state the rank keeps.
        kernels: number of kernels.
    """
    kept = (1 - policy.offloaded) * TRAFFIC + policy.offloaded * NORM
    return elementwise(cluster.gpu, parameters * kept, kernels)


def offload_seconds(cluster: Cluster, policy: StatePolicy, parameters: float) -> float:
    """Seconds to copy a rank's gradients to the host, update there, and copy the weights back.

    The three do not overlap, as in Megatron-LM by default.
    """
    state = policy.master + policy.moments
    moved = policy.gradient + policy.compute
    touched = policy.gradient + 2 * state + policy.compute
    share = parameters * policy.offloaded
    return share * (moved + touched) / cluster.host_bandwidth
