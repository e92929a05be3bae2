"""Formats bytes, counts, seconds, rates, tables and lines, and reads bytes: the only formatter."""

import re
from collections.abc import Iterable, Sequence
from math import inf
from textwrap import wrap

MOST_RANKS = 8  # that a message lists
_POWERS = "KMGTP"
_BEFORE_UNIT = re.compile(
    rf"(?<=\d) (?=(?:[{_POWERS}]i?)?(?:B|FLOP)(?:/s)?\b|[{_POWERS}]\b|[mu]?s\b|%|steps?\b)"
)


def human_bytes(n: float) -> str:
    """Binary multiples, three significant digits: 1536 -> '1.50 KiB'."""
    return _scaled(n, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def read_bytes(text: str) -> float | None:
    """Bytes of a size such as '70GiB', '70 GB' or '1e9'; None if it is no size, or not above 0."""
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
    if s == 0:
        return "0 s"
    if s == inf:
        return "for ever"
    # A number that rounds up to the next unit is said in that unit: 1.0 s, not 1000 ms.
    if s < 999.5e-6:
        return f"{s * 1e6:.0f} us"
    if s < 0.9995:
        return f"{s * 1e3:.0f} ms"
    if s < 59.95:
        return f"{s:.1f} s"
    minutes, seconds = divmod(round(s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s"


def several(count: int, noun: str) -> str:
    """A counted noun: '1 file', '2 files', '3 microbatches', '4,096 ranks'."""
    plural = f"{noun}es" if noun.endswith(("ch", "sh", "s")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def few(names: Sequence[str], most: int) -> str:
    """The first names and the number of others: 'a, b and 3 more'."""
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + others


def ranks_named(ranks: Sequence[int]) -> str:
    """'rank 3', 'ranks 0, 1'; if many, the first ones and the number of the others."""
    return f"rank{'s' * (len(ranks) > 1)} {few([*map(str, ranks)], MOST_RANKS)}"


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Lines with aligned columns; the columns with these numbers are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    flush = set(right)
    return [
        "  ".join(
            cell.rjust(width) if column in flush else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    """Lines of at most `width` characters, with these indents; at least one.

    No flag is cut at a hyphen, and no number from its unit.
    """
    whole = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)
    lines = wrap(
        whole, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]


def _scaled(n: float, base: float, suffixes: tuple[str, ...]) -> str:
    index = 0
    # A number that rounds up to the base is one of the next unit: 1.00 M, not 1000 K.
    while abs(n) >= base - 0.5 and index < len(suffixes) - 1:
        n /= base
        index += 1
    if index == 0 and n == int(n):
        return f"{int(n)} {suffixes[0]}"
    digits = 2 if abs(n) < 9.995 else 1 if abs(n) < 99.95 else 0
    return f"{n:.{digits}f} {suffixes[index]}"
