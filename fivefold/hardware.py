"""The table of accelerators: data-sheet figures, rates that kernels reach, and device names.

It has three kinds of numbers. Peaks and memories are from data sheets (dense rates, no sparsity).
`matmul` is the rate of large multiplications at full clocks, as published or measured. The others
are physical quantities that no data sheet has; they are fitted to published runs by
`benchmarks/fit_planner.py`, or measured by `fivefold plan --calibrate`. Imports no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

GB = 1e9
_GIB = 2.0**30
_TERA = 1e12


@dataclass(frozen=True)
class Rates:
    """FLOP/s by precision; None if the device has no such units, or the rate is not known."""

    bf16: float
    fp16: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    fp32: float | None = None
    fp64: float | None = None

    def of(self, precision: str) -> float:
        """The rate in a precision, or in the next wider one that the device has."""
        order = ("fp4", "fp8", "fp16", "bf16", "fp32", "fp64")
        for name in order[order.index(precision) :]:
            rate: float | None = getattr(self, name)
            if rate is not None:
                return rate
        return self.bf16


@dataclass(frozen=True)
class Gpu:
    """One accelerator.

    Attributes:
        name: name of the GPU in the planner.
        memory_bytes: bytes of device memory as CUDA reports it, which is less than advertised.
        memory_bandwidth: bytes/s of device memory, by the data sheet.
        peak: FLOP/s of dense multiplications, by the data sheet.
        matmul: FLOP/s that large multiplications reach.
        multiprocessors: number of units among which the tiles of a multiplication are distributed.
        sustained: share of `matmul` that multiplications reach in a training step, where power and
            heat lower the clocks and operands come from memory instead of a cache.
        sustained_narrow: the same share for 8- and 4-bit multiplications, which lose more.
        attention_forward: share of the bf16 peak that the best fused causal attention reaches in
            its forward, on long sequences with heads of 128 features.
        attention_backward: the same share for its backward.
        flash1: rate of FlashAttention (2022), relative to the best attention.
        flash2: rate of FlashAttention-2 (2023), relative to the best attention; it does not use
            Hopper's asynchronous units, and is the best on older GPUs.
        memory_efficiency: share of `memory_bandwidth` that elementwise kernels reach.
        launch: seconds from the end of a kernel to the start of the next.
        overlap_slowdown: share of the overlapped time that computation loses to communication,
            which uses multiprocessors and memory bandwidth, too.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak: Rates
    matmul: Rates
    multiprocessors: int
    sustained: float = 0.85
    sustained_narrow: float = 0.85
    attention_forward: float = 0.55
    attention_backward: float = 0.45
    flash1: float = 0.6
    flash2: float = 1.0
    memory_efficiency: float = 0.85
    launch: float = 3e-6
    overlap_slowdown: float = 0.1

    def __hash__(self) -> int:
        """Of a few figures, for speed: times of kernels are looked up by them."""
        return hash((self.name, self.memory_bandwidth, self.matmul.bf16, self.launch))

    def multiplies_in(self, precision: str) -> bool:
        """Whether the GPU has units for a precision, with known rates."""
        return None not in (getattr(self.peak, precision), getattr(self.matmul, precision))


def _rates(bf16: float, **tflops: float) -> Rates:
    """Rates of a GPU whose units multiply fp16 as fast as bf16."""
    known = {"bf16": bf16, "fp16": bf16, **tflops}
    return Rates(**{name: value * _TERA for name, value in known.items()})


_A100 = Gpu(
    "A100-80",
    memory_bytes=79.2 * _GIB,
    memory_bandwidth=2040 * GB,
    peak=_rates(bf16=312, fp32=19.5, fp64=19.5),
    matmul=_rates(bf16=271, fp32=18),
    multiprocessors=108,
    sustained=0.847,
    attention_forward=0.654,
    attention_backward=0.569,
)
_H100 = Gpu(
    "H100",
    memory_bytes=79.1 * _GIB,
    memory_bandwidth=3350 * GB,
    peak=_rates(bf16=989, fp8=1979, fp32=67, fp64=67),
    matmul=_rates(bf16=794, fp8=1403, fp32=50),
    multiprocessors=132,
    sustained=0.744,
    sustained_narrow=0.872,
    attention_forward=0.558,
    attention_backward=0.485,
    flash1=0.37,
    flash2=0.65,
)
_B200 = Gpu(
    "B200",
    memory_bytes=178.4 * _GIB,
    memory_bandwidth=8000 * GB,
    peak=_rates(bf16=2250, fp8=4500, fp4=9000, fp32=75),
    matmul=_rates(bf16=1745, fp8=3433, fp4=6600, fp32=60),
    multiprocessors=148,
    sustained=0.549,
    sustained_narrow=0.833,
    attention_forward=0.477,
    attention_backward=0.415,
    flash1=0.2,
    flash2=0.32,
)
_GB200 = replace(
    _B200,
    name="GB200",
    memory_bytes=184 * _GIB,
    peak=_rates(bf16=2500, fp8=5000, fp4=10000, fp32=80),
    matmul=_rates(bf16=1822, fp8=3616, fp4=7000, fp32=60),
    multiprocessors=152,
    sustained=0.74,
    sustained_narrow=0.786,
)

# More power keeps clocks up.
_BLACKWELL_ULTRA: dict[str, Any] = {"sustained": 0.74, "sustained_narrow": 1.0}

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            replace(_A100, name="A100-40", memory_bytes=39.4 * _GIB, memory_bandwidth=1555 * GB),
            _A100,
            _H100,
            # Its fp64 is limited, and not known here.
            replace(_H100, name="H800", peak=replace(_H100.peak, fp64=None)),
            replace(
                _H100,
                name="H200",
                memory_bytes=139.7 * _GIB,
                memory_bandwidth=4800 * GB,
                matmul=_rates(bf16=794, fp8=1453, fp32=50),
            ),
            # A power-limited H100 with slower memory, on which torchtitan's figures were taken.
            replace(
                _H100,
                name="H100-96",
                memory_bytes=94.9 * _GIB,
                memory_bandwidth=2400 * GB,
                sustained=0.696,
                sustained_narrow=0.787,
                attention_forward=0.313,
                attention_backward=0.272,
            ),
            _B200,
            replace(
                _B200,
                name="B300",
                **_BLACKWELL_ULTRA,
                memory_bytes=268 * _GIB,
                peak=_rates(bf16=2250, fp8=4500, fp4=13500, fp32=75),
                matmul=_rates(bf16=1745, fp8=3433, fp4=9500, fp32=60),
            ),
            _GB200,
            replace(
                _GB200,
                name="GB300",
                **_BLACKWELL_ULTRA,
                memory_bytes=277 * _GIB,
                peak=_rates(bf16=2500, fp8=5000, fp4=15000, fp32=80),
                matmul=_rates(bf16=1822, fp8=3616, fp4=10500, fp32=60),
            ),
            Gpu(
                "MI300X",
                192 * _GIB,
                5300 * GB,
                _rates(bf16=1307, fp8=2615, fp32=163, fp64=163),
                _rates(bf16=668, fp8=1300, fp32=100),
                304,
            ),
            Gpu(
                "L40S",
                44.4 * _GIB,
                864 * GB,
                _rates(bf16=362, fp8=733, fp32=91.6),
                _rates(bf16=250, fp8=450, fp32=60),
                142,
            ),
            Gpu(
                "RTX 4090",
                23.6 * _GIB,
                1008 * GB,
                _rates(bf16=165, fp8=330, fp32=82.6),
                _rates(bf16=150, fp8=290, fp32=60),
                128,
            ),
            Gpu(
                "TPU v4",
                32 * GB,
                1200 * GB,
                Rates(275 * _TERA),
                Rates(240 * _TERA),
                8,
            ),
            Gpu(
                "TPU v5p",
                95 * GB,
                2765 * GB,
                Rates(459 * _TERA),
                Rates(400 * _TERA),
                8,
            ),
        )
    }
)

# Of a device's name as the driver says it, the first pattern that occurs counts, so variants come
# before the plain name. None: sold under a name that says too little, or nothing known.
_NAMES: tuple[tuple[str, str | Rates | None], ...] = (
    (r"MIG", None),  # a part of a device
    (r"A100.*40 ?GB", "A100-40"),
    (r"A100", "A100-80"),
    (r"H[18]00 PCIe", _rates(bf16=756)),
    (r"H[12]00 NVL", _rates(bf16=835)),
    (r"H200", "H200"),
    (r"H100|GH200", "H100"),
    (r"H800", "H800"),
    (r"GB200", "GB200"),
    (r"GB300", "GB300"),
    (r"B200", "B200"),
    (r"B300", "B300"),
    (r"MI300X", "MI300X"),
    (r"L40S", "L40S"),
    (r"RTX 4090 (D|Laptop)", None),
    (r"RTX 4090", "RTX 4090"),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak dense FLOP/s of a device; None if it is not known, and so no MFU can be shown.

    Args:
        device_name: name from `torch.cuda.get_device_name`.
        precision: "bf16", "fp16", "fp32" (without TF32) or "fp64".

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989000000000000.0
    >>> peak_flops("NVIDIA H100 PCIe", "fp64") is None
    True
    """
    found = _named(device_name)
    rates = GPUS[found].peak if isinstance(found, str) else found
    peak: float | None = getattr(rates, precision, None)
    return peak


def find_gpu(device_name: str) -> Gpu | None:
    """The accelerator with this name in the driver; None if it is not in the table."""
    found = _named(device_name)
    return GPUS[found] if isinstance(found, str) else None


def _named(device_name: str) -> str | Rates | None:
    for pattern, found in _NAMES:
        if re.search(rf"\b({pattern})\b", device_name, re.IGNORECASE):
            return found
    return None
