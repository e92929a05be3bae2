"""The usual machines of each GPU, from their makers' data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Machine:
    """The machine usually built with a GPU; rates in GB/s, host times in microseconds.

    The host's memory in GB and its rate are those of the whole node: channels x 8 bytes x MT/s of
    both sockets.
    """

    gpus_per_node: int
    node: float
    network: float
    memory: float
    memory_rate: float
    host: float = 50
    node_efficiency: float = 0.8
    host_operation: float = 15.4


_DGX_A100 = 409.6  # 2 EPYC 7742 with 8 channels of DDR4-3200
_DGX_H100 = 614.4  # 2 Xeon 8480C with 8 channels of DDR5-4800
_DGX_B200 = 716.8  # 2 Xeon 8570 with 8 channels of DDR5-5600
_DGX_B300 = 819.2  # 2 Xeon 6776P with 8 channels of DDR5-6400
_NVL72 = 18_432.0  # 36 Grace with 512 GB/s and 480 GB of LPDDR5X
_PCIE4 = Machine(8, 31, 12.5, 512, _DGX_A100, 25)
MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "A100-40": Machine(8, 300, 25, 1000, _DGX_A100, 25),
        "A100-80": Machine(8, 300, 25, 2000, _DGX_A100, 25),
        "H100": Machine(8, 450, 50, 2000, _DGX_H100, host_operation=26.9),
        "H100-96": Machine(8, 450, 50, 2000, _DGX_H100, host_operation=26.9),
        "H800": Machine(8, 200, 50, 2000, _DGX_H100, host_operation=26.9),
        "H200": Machine(8, 450, 50, 2000, _DGX_H100, host_operation=26.9),
        "B200": Machine(8, 900, 50, 2000, _DGX_B200, node_efficiency=0.76, host_operation=17.4),
        "B300": Machine(8, 900, 100, 2000, _DGX_B300, node_efficiency=0.76, host_operation=17.4),
        "GB200": Machine(72, 900, 50, 17_280, _NVL72, 200, 0.76, 17.6),
        "GB300": Machine(72, 900, 100, 17_280, _NVL72, 200, 0.76, 17.6),
        "MI300X": Machine(8, 448, 50, 2300, 921.6, node_efficiency=0.7),
        "L40S": _PCIE4,
        "RTX 4090": _PCIE4,
        # Hosts of four chips.
        "TPU v4": Machine(4096, 45 * 6, 25, 1024 * 407, 1024 * _DGX_A100, 16),
        "TPU v5p": Machine(8960, 90 * 6, 25, 2240 * 448, 2240 * _DGX_A100, 16),
    }
)
"""The machine of each GPU, by its name in `hardware.GPUS`."""
