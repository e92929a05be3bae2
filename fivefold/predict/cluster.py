"""Clusters: GPUs, the links between them, and how often they fail.

A cluster is given by the name of its GPU, which stands for the machines usually built with it, or
by a file (`predict.cluster_file`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, log, sqrt
from types import MappingProxyType

from fivefold.errors import ConfigError, Mistake, did_you_mean
from fivefold.hardware import GB, GPUS, Gpu
from fivefold.predict.machines import MACHINES
from fivefold.reliability import INTERRUPTIONS_PER_GPU_DAY


@dataclass(frozen=True)
class Link:
    """The link from one GPU to others.

    Attributes:
        bandwidth: bytes/s that a GPU can send while it receives as much, by the data sheet.
        latency: seconds of one hop, including launch, wire and protocol.
        efficiency: share of the bandwidth that large collectives reach.
    """

    bandwidth: float
    latency: float
    efficiency: float = 0.8

    @property
    def rate(self) -> float:
        """Bytes/s that collectives reach."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Cluster:
    """Machines of one kind.

    Attributes:
        name: name for people.
        gpu: kind of the GPUs.
        num_gpus: total number of GPUs.
        gpus_per_node: number of GPUs connected by `node_link` (the NVLink domain).
        node_link: link between GPUs of a node.
        network_link: link between nodes, as one GPU's share of the node's network.
        host_bandwidth: bytes/s between a GPU and its host's memory, each way.
        host_memory_bytes: bytes of memory of a node's hosts; None: not known, and taken to suffice.
        host_memory_bandwidth: bytes/s of a node's host memory, by the data sheet; None: not known,
            and taken to be as much for each GPU as its link has.
        disk_bytes: bytes of a node's disks; None: not known, and taken to suffice.
        disk_bandwidth: bytes/s that a node's disks read and write, together.
        reserved_bytes: bytes of device memory that the driver, NCCL and fragmentation take.
        memory_margin: share of a device's memory that plans leave free, since predicted peaks are
            off by some percent.
        jitter: standard deviation of a GPU's step time, as a share of it; the slowest of n GPUs is
            sqrt(2 ln n) standard deviations late.
        host_operation: seconds that the host needs to issue one operation; the GPU waits for the
            host in series of small operations, such as layers with experts.
        interruptions_per_gpu_day: unexpected interruptions per GPU and day; None: not known.
        price_per_gpu_hour: price of a GPU hour in any currency; None: not known.
    """

    name: str
    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    node_link: Link
    network_link: Link
    host_bandwidth: float = 50 * GB
    host_memory_bytes: float | None = None
    host_memory_bandwidth: float | None = None
    disk_bytes: float | None = None
    disk_bandwidth: float = 6 * GB
    reserved_bytes: float = 2 * GB
    memory_margin: float = 0.05
    jitter: float = 0.004
    host_operation: float = 15.4e-6
    interruptions_per_gpu_day: float | None = None
    price_per_gpu_hour: float | None = None

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def is_rack(self) -> bool:
        """Whether an NVLink domain spans several hosts (a rack)."""
        return self.gpus_per_node > LARGEST_HOST

    def straggler_delay(self, gpus: int) -> float:
        """Expected delay of the slowest of `gpus` GPUs, as a share of the step."""
        return self.jitter * sqrt(2 * log(gpus))

    @property
    def host_share(self) -> float:
        """Bytes of host memory per participating GPU; infinite if not known."""
        return inf if self.host_memory_bytes is None else self.host_memory_bytes / self.sharing

    @property
    def disk_share(self) -> float:
        """Bytes of disk per participating GPU; infinite if not known."""
        return inf if self.disk_bytes is None else self.disk_bytes / self.sharing

    @property
    def host_rate(self) -> float:
        """Bytes/s of host memory that programs reach, per participating GPU."""
        if self.host_memory_bandwidth is None:
            return self.host_bandwidth
        return HOST_EFFICIENCY * self.host_memory_bandwidth / self.sharing

    @property
    def room(self) -> float:
        """Bytes that a plan's tensors may take on one device."""
        return self.gpu.memory_bytes * (1 - self.memory_margin) - self.reserved_bytes

    def within(self, budget: float) -> "Cluster":
        """The same machines, with this many bytes for tensors on each GPU."""
        size = budget + self.reserved_bytes
        return replace(self, gpu=replace(self.gpu, memory_bytes=size), memory_margin=0.0)

    @property
    def sharing(self) -> int:
        """GPUs that share a node's host memory and disks."""
        return min(self.num_gpus, self.gpus_per_node)


LARGEST_HOST = 8
"""Most GPUs of a host."""
HOST_EFFICIENCY = 2 / 3
"""Share of the data sheet's host bandwidth that an update is taken to reach; not measured."""


# What people write for the presets.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "a100": "A100-80",
        "h100-96/500w/2.4tbs": "H100-96",
        "gb200 nvl72": "GB200",
        "gb300 nvl72": "GB300",
        "4090": "RTX 4090",
        "rtx4090": "RTX 4090",
    }
)
MAX_GPUS = 10_000_000
NODE_LATENCY, NETWORK_LATENCY = 2e-6, 6e-6  # seconds of a hop, as NCCL shows them


def preset(name: str, num_gpus: int | None = None) -> Cluster:
    """The usual cluster with a kind of GPU; one node, unless `num_gpus` is given.

    Raises:
        ConfigError: the name is not known.
    """
    key = known_gpu(name)
    if key is None:
        raise ConfigError(
            Mistake(
                f"unknown cluster {name!r}{did_you_mean(name, [*GPUS, *_ALIASES])}",
                ("it is neither a kind of GPU nor a TOML file that exists",),
                tuple(GPUS),
            )
        )
    machine = MACHINES[key]
    return Cluster(
        name=key,
        gpu=GPUS[key],
        num_gpus=num_gpus or machine.gpus_per_node,
        gpus_per_node=machine.gpus_per_node,
        node_link=Link(machine.node * GB, NODE_LATENCY, machine.node_efficiency),
        network_link=Link(machine.network * GB, NETWORK_LATENCY),
        host_bandwidth=machine.host * GB,
        host_memory_bytes=machine.memory * GB,
        host_memory_bandwidth=machine.memory_rate * GB,
        host_operation=machine.host_operation * 1e-6,
        interruptions_per_gpu_day=INTERRUPTIONS_PER_GPU_DAY,
    )


def known_gpu(name: str) -> str | None:
    """The kind of GPU that a name denotes; None if unknown."""
    known = {key.lower(): key for key in GPUS} | dict(_ALIASES)
    return known.get(name.lower())
