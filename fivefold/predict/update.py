"""How long the optimizer's update takes: on the device, and where its state is in host memory.

An update is bound by memory: on the device by its own, on the host by a GPU's share of the host's.
That share is taken to be as fast as the GPU's link, which it nearly is in machines that are sold:
of 614 GB/s of DDR5 in a DGX H100 a GPU has 77, an update keeps two thirds of them, and the link
has 50.
"""

from fivefold.counts.state import StatePolicy
from fivefold.predict.cluster import Cluster
from fivefold.predict.compute import elementwise

NORM = 4.0
"""Bytes a parameter that the norm of the gradients reads."""
TRAFFIC = 30.0 + NORM
"""Bytes a parameter that AdamW moves, the norm before it included: gradient, master and moments are
read, all but the gradient are written, and the copy in the compute type."""
KERNELS = 20


def update_seconds(
    cluster: Cluster, policy: StatePolicy, parameters: float, kernels: int = KERNELS
) -> float:
    """Seconds of a rank's update on its device.

    Args:
        cluster: cluster that runs it.
        policy: what is kept of a parameter, and where.
        parameters: parameters whose state the rank keeps.
        kernels: kernels that are launched.
    """
    kept = (1 - policy.offloaded) * TRAFFIC + policy.offloaded * NORM
    return elementwise(cluster.gpu, parameters * kept, kernels)


def offload_seconds(cluster: Cluster, policy: StatePolicy, parameters: float) -> float:
    """Seconds of a rank's update in host memory, after its gradients have come and before its
    weights return: Megatron-LM's, which unless told lets none of the three run beside another."""
    state = policy.master + policy.moments
    moved = policy.gradient + policy.compute
    touched = policy.gradient + 2 * state + policy.compute
    share = parameters * policy.offloaded
    return share * (moved + touched) / cluster.host_bandwidth
