"""Formats bytes, counts, seconds and rates, and reads bytes; the only such formatter."""

import re
from math import inf

_POWERS = "KMGTP"


def human_bytes(n: float) -> str:
    """Binary multiples, three significant digits: 1536 -> '1.50 KiB'."""
    return _scaled(n, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def read_bytes(text: str) -> float | None:
    """Bytes of a size such as '70GiB', '70 GB' or '1e9'; None if it is none, or not above 0."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*(?:([KMGTP])(i?))?B?\s*", text)
    if found is None:
        return None
    number, power, binary = found.groups()
    exponent = _POWERS.index(power) + 1 if power else 0
    size = float(number) * (1024.0 if binary else 1000.0) ** exponent
    return size if 0 < size < 1e18 else None


def human_bandwidth(n: float) -> str:
    """Bytes per second in decimal multiples, as in data sheets: 4.5e11 -> '450 GB/s'."""
    return _scaled(n, 1000.0, ("B", "KB", "MB", "GB", "TB")) + "/s"


def human_count(n: float) -> str:
    """Decimal multiples: 5_540_000 -> '5.54 M'."""
    return _scaled(n, 1000.0, ("", "K", "M", "B", "T", "P")).rstrip()


def human_flops(n: float) -> str:
    """Floating-point operations: 3.2e12 -> '3.20 TFLOP'."""
    return _scaled(n, 1000.0, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def human_seconds(s: float) -> str:
    """Seconds as '850 ms', '12.3 s', '4m05s', '3h02m' or '2d04h'."""
    if s < 0.001:
        return f"{s * 1e6:.0f} us"
    if s < 1:
        return f"{s * 1e3:.0f} ms"
    if s < 60:
        return f"{s:.1f} s"
    if s == inf:
        return "for ever"
    minutes, seconds = divmod(round(s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s"


def _scaled(n: float, base: float, suffixes: tuple[str, ...]) -> str:
    index = 0
    while abs(n) >= base and index < len(suffixes) - 1:
        n /= base
        index += 1
    if index == 0 and n == int(n):
        return f"{int(n)} {suffixes[0]}"
    digits = 2 if abs(n) < 10 else 1 if abs(n) < 100 else 0
    return f"{n:.{digits}f} {suffixes[index]}"
