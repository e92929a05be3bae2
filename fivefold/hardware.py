"""What known accelerators can do at most, from their data sheets. Imports no torch."""

import re

# Dense matrix multiplication without sparsity, FLOP/s; the first pattern that occurs in the name
# counts, so variants come before the plain name. None: sold under a name that says too little.
_PEAK_TFLOPS: tuple[tuple[str, dict[str, float] | None], ...] = (
    (r"A100", {"bf16": 312, "fp32": 19.5, "fp64": 19.5}),
    (r"H[18]00 PCIe", {"bf16": 756}),
    (r"H[12]00 NVL", {"bf16": 835}),
    (r"H100|H200|GH200", {"bf16": 989, "fp32": 67, "fp64": 67}),
    (r"H800", {"bf16": 989, "fp32": 67}),
    (r"GB200", {"bf16": 2500}),
    (r"B200", {"bf16": 2250}),
    (r"MI300X", {"bf16": 1307, "fp32": 163, "fp64": 163}),
    (r"L40S", {"bf16": 362, "fp32": 91.6}),
    (r"RTX 4090 (D|Laptop)", None),
    (r"RTX 4090", {"bf16": 165, "fp32": 82.6}),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak dense FLOP/s of a device, or None if it is not known: then there is no MFU to show.

    Args:
        device_name: as `torch.cuda.get_device_name` says it.
        precision: "bf16", "fp32" (without TF32) or "fp64".

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989000000000000.0
    >>> peak_flops("NVIDIA H100 PCIe", "fp64") is None
    True
    """
    for pattern, peaks in _PEAK_TFLOPS:
        if re.search(rf"\b({pattern})\b", device_name):
            tflops = (peaks or {}).get(precision)
            return None if tflops is None else tflops * 1e12
    return None
