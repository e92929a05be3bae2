"""What a plan is made for: GPUs, the links between them, and how often they fail.

A cluster comes from the name of its GPU (in the machines that it is usually sold in) or from a TOML
file:

    preset = "H100"         # what is not given here is taken from it
    num_gpus = 1024
    [gpu]
    sustained = 0.9
    [gpu.matmul]
    bf16 = 7.2e14
    [network_link]
    bandwidth = 50e9

A file that names no preset gives everything, as `to_toml` does.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from fivefold.errors import ConfigError, Mistake, Mistakes, did_you_mean
from fivefold.hardware import GB, GPUS, Gpu, Rates


@dataclass(frozen=True)
class Link:
    """How one GPU reaches others.

    Attributes:
        bandwidth: bytes/s that a GPU can send while it receives as much, data sheet.
        latency: seconds of one hop: launch, wire and protocol.
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
        name: for people.
        gpu: of every kind the same.
        num_gpus: in all.
        gpus_per_node: that reach each other over `node_link` (the NVLink domain).
        node_link: inside a node.
        network_link: between nodes, a GPU's share of its node's network.
        host_bandwidth: bytes/s between a GPU and its host's memory, each way.
        reserved_bytes: of device memory that the driver, NCCL and fragmentation keep.
        jitter: of a step, the standard deviation of one GPU's time; every step waits for the
            slowest of all GPUs, sqrt(2 ln n) of it later.
        host_operation: seconds in which the host issues one operation of the framework; where many
            small ones follow each other, as in layers with experts, the GPU waits for it.
        interruptions_per_gpu_day: unexpected ends of a job; None: not known.
        price_per_gpu_hour: in any currency; None: not known.
    """

    name: str
    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    node_link: Link
    network_link: Link
    host_bandwidth: float = 50 * GB
    reserved_bytes: float = 2 * GB
    jitter: float = 0.004
    host_operation: float = 15.4e-6
    interruptions_per_gpu_day: float | None = None
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True)
class _Machine:
    """How a GPU is usually sold: GB/s, and microseconds of its host."""

    gpus_per_node: int
    node: float
    network: float
    host: float = 50
    node_efficiency: float = 0.8
    host_operation: float = 15.4


_PCIE4 = _Machine(8, 31, 12.5, 25)
_MACHINES: Mapping[str, _Machine] = MappingProxyType(
    {
        "A100-40": _Machine(8, 300, 25, 25),
        "A100-80": _Machine(8, 300, 25, 25),
        "H100": _Machine(8, 450, 50, host_operation=24.7),
        "H100-96": _Machine(8, 450, 50, host_operation=24.7),
        "H800": _Machine(8, 200, 50, host_operation=24.7),
        "H200": _Machine(8, 450, 50, host_operation=24.7),
        "B200": _Machine(8, 900, 50, node_efficiency=0.76, host_operation=14.1),
        "B300": _Machine(8, 900, 100, node_efficiency=0.76, host_operation=14.1),
        "GB200": _Machine(72, 900, 50, 200, 0.76, 13),
        "GB300": _Machine(72, 900, 100, 200, 0.76, 13),
        "MI300X": _Machine(8, 448, 50, node_efficiency=0.7),
        "L40S": _PCIE4,
        "RTX 4090": _PCIE4,
        "TPU v4": _Machine(4096, 45 * 6, 25, 16),
        "TPU v5p": _Machine(8960, 90 * 6, 25, 16),
    }
)
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
NODE_LATENCY, NETWORK_LATENCY = 2e-6, 6e-6  # seconds of a hop, as NCCL shows them
# 419 unexpected interruptions in 54 days on 16,384 H100s (Llama 3, 2024, section 3.3.4).
INTERRUPTIONS_PER_GPU_DAY = 419 / 54 / 16384


def preset(name: str, num_gpus: int | None = None) -> Cluster:
    """The usual cluster of a kind of GPU, one node of it unless told.

    Raises:
        ConfigError: an unknown name.
    """
    known = {key.lower(): key for key in GPUS} | dict(_ALIASES)
    key = known.get(name.lower())
    if key is None:
        raise ConfigError(
            Mistake(
                f"unknown cluster {name!r}{did_you_mean(name, [*GPUS, *_ALIASES])}",
                ("it is neither a kind of GPU nor a TOML file that exists",),
                tuple(GPUS),
            )
        )
    machine = _MACHINES[key]
    return Cluster(
        name=key,
        gpu=GPUS[key],
        num_gpus=num_gpus or machine.gpus_per_node,
        gpus_per_node=machine.gpus_per_node,
        node_link=Link(machine.node * GB, NODE_LATENCY, machine.node_efficiency),
        network_link=Link(machine.network * GB, NETWORK_LATENCY),
        host_bandwidth=machine.host * GB,
        host_operation=machine.host_operation * 1e-6,
        interruptions_per_gpu_day=INTERRUPTIONS_PER_GPU_DAY,
    )


def load_cluster(name_or_path: str | Path, num_gpus: int | None = None) -> Cluster:
    """A cluster by the name of its GPU, or from a TOML file.

    Args:
        name_or_path: such as "H100", or the path of a file as this module's head shows it.
        num_gpus: replaces the file's, or the preset's one node.

    Raises:
        ConfigError: everything that is wrong with the name or the file.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        return preset(str(name_or_path), num_gpus)
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if num_gpus is not None:
        table["num_gpus"] = num_gpus
    return _from_table(table, path)


def to_toml(cluster: Cluster) -> str:
    """The file that `load_cluster` reads back as this cluster."""
    scalars, tables = [], []
    for key, value in asdict(cluster).items():
        if isinstance(value, dict):
            tables.append((key, value))
        elif value is not None:
            scalars.append(f"{key} = {json.dumps(value)}")
    return "\n".join([*scalars, *_tables(tables)]) + "\n"


def _tables(tables: list[tuple[str, dict[str, Any]]]) -> list[str]:
    lines = []
    for name, table in tables:
        lines += ["", f"[{name}]"]
        lines += [
            f"{key} = {json.dumps(value)}"
            for key, value in table.items()
            if value is not None and not isinstance(value, dict)
        ]
        lines += _tables([(f"{name}.{k}", v) for k, v in table.items() if isinstance(v, dict)])
    return lines


def _from_table(table: dict[str, Any], path: Path) -> Cluster:
    """Start from the preset that the file names, or from nothing, and replace what it gives."""
    mistakes = Mistakes()
    gpu = table.get("gpu")
    name = table.pop("preset", gpu if isinstance(gpu, str) else None)
    if isinstance(gpu, str):
        del table["gpu"]
    base = None
    with mistakes.collecting():
        base = preset(str(name)) if name is not None else None
    mistakes.raise_if_any()
    cluster = _read(Cluster, table, base, "", mistakes)
    if mistakes.found:
        mistakes.add(f"all of this is in {path}", attempt='preset = "H100"  # and what differs')
    mistakes.raise_if_any()
    assert cluster is not None
    return cluster


_SECTIONS: Mapping[str, type] = MappingProxyType(
    {"gpu": Gpu, "peak": Rates, "matmul": Rates, "node_link": Link, "network_link": Link}
)
T = TypeVar("T")


def _read(kind: type[T], table: Any, base: T | None, where: str, mistakes: Mistakes) -> T | None:
    """A dataclass from its table; what the table leaves out is taken from `base`, or a default."""
    if not isinstance(table, dict):
        mistakes.add(f"{where.rstrip('.')} must be a table, not {table!r}")
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
            _check_value(f"{where}{name}", table[name], name == "name", mistakes)
        elif base is not None:
            values[name] = inherited
        elif field.default is MISSING:
            mistakes.add(f"{where}{name} is missing")
    return None if mistakes.found else kind(**values)


def _check_value(name: str, value: object, is_text: bool, mistakes: Mistakes) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_text and not isinstance(value, str):
        mistakes.add(f"{name} must be text, not {value!r}")
    elif not is_text and not (number and cast(float, value) >= 0):
        mistakes.add(f"{name} must be a number, at least 0, not {value!r}")
