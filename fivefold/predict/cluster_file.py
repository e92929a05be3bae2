"""Reads and writes cluster files: TOML that describes machines.

    preset = "H100"         # gives the values that this file leaves out
    num_gpus = 1024
    [gpu]
    sustained = 0.9
    [gpu.matmul]
    bf16 = 7.2e14
    [network_link]
    bandwidth = 50e9

A file without a preset must give all values, as `to_toml` writes them.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shortened
from types import MappingProxyType
from typing import Any, TypeVar, cast

from fivefold.errors import ConfigError, Mistakes, did_you_mean
from fivefold.files import parse_toml, read_text
from fivefold.hardware import GPUS, Gpu, Rates
from fivefold.predict.cluster import MAX_GPUS, Cluster, Link, known_gpu, preset


@dataclass(frozen=True)
class Range:
    """The range of numbers that a key or a column of a file may have.

    Attributes:
        low: smallest number, included.
        high: largest plausible number, included.
        whole: whether the number must be an integer.
    """

    low: float
    high: float
    whole: bool = False

    def holds(self, value: object) -> bool:
        """Whether a value is a number in the range; NaN and booleans are not."""
        kinds = (int,) if self.whole else (int, float)
        return type(value) in kinds and self.low <= cast(float, value) <= self.high

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {self.low:,g} to {self.high:,g}"


def load_cluster(name_or_path: str | Path, num_gpus: int | None = None) -> Cluster:
    """A cluster by the name of its GPU, or from a TOML file.

    Args:
        name_or_path: name of a GPU such as "H100", or path of a file as described above.
        num_gpus: number of GPUs; None: that of the file, or one node.

    Raises:
        ConfigError: the name is not known, or the file has mistakes.
    """
    path, name = Path(os.path.expanduser(name_or_path)), str(name_or_path)
    if path.suffix != ".toml" and (known_gpu(name) is not None or not os.path.isfile(path)):
        return preset(name, num_gpus)  # whatever files of that name are in this folder
    table = parse_toml(read_text(path, ConfigError), str(path), ConfigError)
    if num_gpus is not None:
        table["num_gpus"] = num_gpus
    return _from_table(table, path)


def to_toml(cluster: Cluster) -> str:
    """The text of a file that `load_cluster` reads as this cluster."""
    scalars, tables = [], []
    for key, value in asdict(cluster).items():
        if isinstance(value, dict):
            tables.append((key, value))
        elif value is not None:
            scalars.append(f"{key} = {_written(value)}")
    return "\n".join([*scalars, *_tables(tables)]) + "\n"


def _tables(tables: list[tuple[str, dict[str, Any]]]) -> list[str]:
    lines = []
    for name, table in tables:
        lines += ["", f"[{name}]"]
        lines += [
            f"{key} = {_written(value)}"
            for key, value in table.items()
            if value is not None and not isinstance(value, dict)
        ]
        lines += _tables([(f"{name}.{k}", v) for k, v in table.items() if isinstance(v, dict)])
    return lines


def _written(value: float | str) -> str:
    """A value as TOML: JSON without its surrogate escapes, which TOML does not allow."""
    return json.dumps(value, ensure_ascii=False)


def _from_table(table: dict[str, Any], path: Path) -> Cluster:
    """The cluster that a file describes: its preset, if it names one, changed by its values."""
    mistakes = Mistakes()
    names = [table.pop(key) for key in ("preset", "gpu") if isinstance(table.get(key), str)]
    if len(names) > 1:
        mistakes.add(f"preset {names[0]!r} and gpu {names[1]!r} both name what to start from")
    base = None
    with mistakes.collecting():
        base = preset(names[0]) if names else None
    if names and base is None:  # judge the rest by some values, which are not used
        base = preset(next(iter(GPUS)))
    cluster = _read(Cluster, table, base, "", mistakes)
    if cluster is not None:
        check_together(cluster, mistakes)
    if mistakes.found:
        mistakes.add(f"all of this is in {path}", attempt='preset = "H100"  # and what differs')
    mistakes.raise_if_any()
    assert cluster is not None
    return cluster


def check_together(cluster: Cluster, mistakes: Mistakes) -> None:
    """Collect values that contradict each other."""
    gpu = cluster.gpu
    if cluster.room <= 0:
        mistakes.add(
            f"reserved_bytes {cluster.reserved_bytes:g} and memory_margin "
            f"{cluster.memory_margin:g} leave nothing of gpu.memory_bytes {gpu.memory_bytes:g}"
        )
    for name in (field.name for field in fields(Rates)):
        peak, reached = getattr(gpu.peak, name), getattr(gpu.matmul, name)
        if peak is not None and reached is not None and reached > ABOVE_PEAK * peak:
            mistakes.add(f"gpu.matmul.{name} {reached:g} exceeds gpu.peak.{name} {peak:g}")


ABOVE_PEAK = 1.1  # largest plausible measured rate, relative to the data sheet
_SHARE = Range(1e-6, 2)  # of a data-sheet figure; measurements may exceed it
_SECONDS = Range(0, 1)  # seconds of one small operation
_BANDWIDTH, _FLOPS, _BYTES = Range(1e3, 1e18), Range(1e6, 1e21), Range(1e6, 1e18)
_GPUS = Range(1, MAX_GPUS, whole=True)
_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "num_gpus": _GPUS,
        "gpus_per_node": _GPUS,
        "host_bandwidth": _BANDWIDTH,
        "host_memory_bytes": _BYTES,
        "host_memory_bandwidth": _BANDWIDTH,
        "disk_bytes": _BYTES,
        "disk_bandwidth": _BANDWIDTH,
        "reserved_bytes": Range(0, 1e18),
        "memory_margin": Range(0, 1),
        "jitter": Range(0, 2),
        "host_operation": _SECONDS,
        "interruptions_per_gpu_day": Range(0, 1e3),
        "price_per_gpu_hour": Range(0, 1e9),
        "bandwidth": _BANDWIDTH,
        "latency": _SECONDS,
        "efficiency": _SHARE,
        "memory_bytes": _BYTES,
        "memory_bandwidth": _BANDWIDTH,
        "multiprocessors": Range(1, 1e6, whole=True),
        "sustained": _SHARE,
        "sustained_narrow": _SHARE,
        # Shares of a peak that may be the best measured product instead of the data sheet's.
        "attention_forward": Range(1e-6, 1e3),
        "attention_backward": Range(1e-6, 1e3),
        "flash1": _SHARE,
        "flash2": _SHARE,
        "memory_efficiency": _SHARE,
        "launch": _SECONDS,
        "overlap_slowdown": Range(0, 1),
    }
    | {field.name: _FLOPS for field in fields(Rates)}
)


def within_range(name: str, value: float) -> float:
    """The nearest value that a file may have for this key."""
    return min(max(value, _RANGES[name].low), _RANGES[name].high)


_SECTIONS: Mapping[str, type] = MappingProxyType(
    {"gpu": Gpu, "peak": Rates, "matmul": Rates, "node_link": Link, "network_link": Link}
)
T = TypeVar("T")


def _read(kind: type[T], table: Any, base: T | None, where: str, mistakes: Mistakes) -> T | None:
    """A dataclass read from a table; values it leaves out come from `base`, or from defaults."""
    if not isinstance(table, dict):
        mistakes.add(f"{where.rstrip('.')} must be a table, not {_shown(table)}")
        return None
    known = {field.name: field for field in fields(cast(Any, kind))}
    for key in table:
        if key not in known:
            mistakes.add(f"unknown key {where}{key}{did_you_mean(key, known)}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        inherited = getattr(base, name) if base is not None else None
        if name in table and name in _SECTIONS:
            found = _read(_SECTIONS[name], table[name], inherited, f"{where}{name}.", mistakes)
            values[name] = found
        elif name in table:
            values[name] = table[name]
            _check_value(where, name, table[name], mistakes)
        elif base is not None:
            values[name] = inherited
        elif field.default is MISSING:
            mistakes.add(f"{where}{name} is missing")
    return None if mistakes.found else kind(**values)


def _check_value(where: str, name: str, value: object, mistakes: Mistakes) -> None:
    holds = isinstance(value, str) if name == "name" else _RANGES[name].holds(value)
    if not holds:
        expected = "text" if name == "name" else _RANGES[name]
        mistakes.add(f"{where}{name} must be {expected}, not {_shown(value)}")


def _shown(value: object) -> str:
    """A short text for a value, also for integers that Python refuses to print."""
    try:
        return shortened(value)
    except ValueError:
        return "a number of thousands of digits"
