"""`fivefold plan --calibrate`: measures this machine or cluster, and writes a cluster file."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch.distributed as dist

from fivefold.calibrate import host, measure
from fivefold.calibrate.measure import Sample
from fivefold.data_parallel.policy import DTYPES
from fivefold.errors import ConfigError, Mistake
from fivefold.files import telling_unwritable, write_atomic
from fivefold.hardware import Gpu, Rates, find_gpu
from fivefold.predict.cluster import Cluster, Link, preset
from fivefold.predict.cluster_file import to_toml, within_range
from fivefold.predict.times.compute import attention_share
from fivefold.train.machine.devices import Asked, choose_device, visible_gpus
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local
from fivefold.train.ranks.meeting import check_place
from fivefold.train.ranks.rank_env import RankEnv, read_rank_env
from fivefold.train.ranks.signals import leave_at_once
from fivefold.units import human_bytes, human_flops, human_seconds, several


@dataclass(frozen=True)
class Measured:
    """The measurements of all ranks together.

    Attributes:
        kind: "cuda" or "cpu", by which shapes were chosen.
        device: name of the device.
        precision: precision of training on this device, in which attention was measured.
        memory_bytes: memory of a device in bytes; on a CPU a rank's share of what the machine has
            free.
        host_memory_bytes: memory of a node's host in bytes; on CPUs what is left beside theirs.
        multiprocessors: number of units among which the tiles of a product are distributed.
        matmuls: measurements of products, by precision and shape.
        attention: measurements of attention, forward and backward.
        traffic: measurement of reading and writing device memory.
        launch: measurement of an operation without work.
        host: measurement of small layers, which take as long as the host issues their operations.
        copy: measurement of a copy to host memory.
        node: measurements of collectives inside a node; empty with one rank per node.
        network: measurements of collectives between nodes; empty with one node.
        sustained: share of the best rate that is sustained.
        jitter: relative spread of the time of repeated work.
        ranks: total number of ranks.
        ranks_per_node: number of ranks on one machine.
    """

    kind: str
    device: str
    precision: str
    memory_bytes: float
    host_memory_bytes: float
    multiprocessors: int
    matmuls: Mapping[str, tuple[Sample, ...]]
    attention: tuple[Sample, ...]
    traffic: Sample
    launch: Sample
    host: Sample
    copy: Sample
    node: tuple[Sample, ...]
    network: tuple[Sample, ...]
    sustained: float
    jitter: float
    ranks: int
    ranks_per_node: int


def calibrate(path: Path, nproc: int | None, asked: Asked = "auto") -> int:
    """Measure with the ranks that a launcher has started, or with `nproc` ranks on this machine.

    Args:
        path: path of the TOML file to write.
        nproc: number of ranks to start, unless a launcher has; None: one.
        asked: where.

    Returns:
        The exit status.

    Raises:
        ConfigError: the file cannot be written, or there are too few of the GPUs that were asked
            for.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {path} does not exist")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    with telling_unwritable(path, ConfigError), TemporaryFile(dir=path.absolute().parent):
        pass  # said before the measurement rather than after it
    env = read_rank_env()
    chosen = choose_device(asked, env, nproc, visible_gpus())
    if chosen.shared:
        what = f"ranks that share GPUs measure each other: {chosen.why}"
        raise ConfigError(Mistake(what, works=(f"--nproc {visible_gpus()}", "--device cpu")))
    worker = partial(_calibrate_on_rank, path=path, kind=chosen.kind)
    if env.launcher != "single":
        leave_at_once()
        check_place(env)
        return worker(env)
    return launch_local(worker, nproc or 1)


def _calibrate_on_rank(env: RankEnv, *, path: Path, kind: str) -> int:
    device = init_process_group(env, kind)
    measured = _measure(env, device)
    if env.rank == 0:
        cluster = as_cluster(measured)
        write_atomic(path, _head(measured) + to_toml(cluster))
        print("\n".join([*describe(measured), f"written to {path}"]))
    dist.barrier()
    return 0


def _measure(env: RankEnv, device: torch.device) -> Measured:
    world = dist.group.WORLD
    assert world is not None
    node, network = _groups(env)
    precision = "bf16" if device.type == "cuda" else "fp32"  # few processors have a fast bf16
    dtype = DTYPES[precision]
    sustained, jitter = measure.sustained(device, dtype, world)
    # A processor multiplies fp16 without units for it, some hundred times slower than bf16.
    types = {n: d for n, d in DTYPES.items() if n != "fp16" or device.type == "cuda"}
    return Measured(
        kind=device.type,
        device=_device_name(device),
        precision=precision,
        memory_bytes=_memory(env, device),
        host_memory_bytes=_host_memory() if device.type == "cuda" else 0.0,
        multiprocessors=_multiprocessors(device),
        matmuls={name: measure.matmuls(device, dtype, world) for name, dtype in types.items()},
        attention=measure.attention(device, dtype, world),
        traffic=measure.memory_traffic(device, world),
        launch=measure.launch(device, world),
        host=host.layers(device, dtype, world),
        copy=measure.host_copy(device, world),
        node=measure.collectives(device, node) if node.size() > 1 else (),
        network=measure.collectives(device, network) if network.size() > 1 else (),
        sustained=sustained,
        jitter=jitter,
        ranks=env.world_size,
        ranks_per_node=env.local_world_size,
    )


def _groups(env: RankEnv) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group of this rank's node, and the group of ranks with its local rank on all nodes.

    The groups of all local ranks use the network at the same time, as in training.
    """
    size = env.local_world_size
    nodes = [list(range(first, first + size)) for first in range(0, env.world_size, size)]
    places = [list(range(place, env.world_size, size)) for place in range(size)]
    node, _ = dist.new_subgroups_by_enumeration(nodes)
    network, _ = dist.new_subgroups_by_enumeration(places)
    return node, network


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {several(torch.get_num_threads(), 'thread')} a rank"


def _memory(env: RankEnv, device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    lines = Path("/proc/meminfo").read_text() if sys.platform == "linux" else ""
    free = re.search(r"^MemAvailable: *(\d+) kB$", lines, re.MULTILINE)
    return (1024.0 * int(free[1]) if free else _host_memory()) / env.local_world_size


def _host_memory() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        count: int = torch.cuda.get_device_properties(device).multi_processor_count
        return count
    return 1  # all threads of a rank work on one product


def as_cluster(measured: Measured) -> Cluster:
    """The cluster described by the measurements.

    A multiplication takes `flops / rate`; what small ones take beyond that is the launch. Peaks,
    and whatever is not measured, come from the table if it has the device. Otherwise the peak is
    the best measured rate, and model FLOP utilisation is relative to that. A network that was not
    measured is taken from usual machines with this device, or else to be as fast as the links of a
    node.
    """
    best = {name: max(s.rate for s in samples) for name, samples in measured.matmuls.items()}
    known = find_gpu(measured.device)
    peak = known.peak if known else Rates(**best)
    forward, backward = measured.attention
    length = measure.SEQUENCE[measured.kind]
    attention_peak = peak.of(measured.precision) * attention_share(length, measure.HEAD_DIM)
    bandwidth, copy = measured.traffic.rate, measured.copy.rate
    like = known or Gpu(
        measured.device, measured.memory_bytes, bandwidth, peak, peak, measured.multiprocessors
    )
    gpu = replace(
        like,
        memory_bytes=measured.memory_bytes,
        matmul=replace(like.matmul, **best),
        multiprocessors=measured.multiprocessors,
        sustained=measured.sustained,
        attention_forward=forward.rate / attention_peak,
        attention_backward=backward.rate / attention_peak,
        memory_efficiency=bandwidth / like.memory_bandwidth,
        launch=measured.launch.each,
    )
    node = _link(measured.node) or Link(copy, gpu.launch, 1.0)  # never used by a rank alone
    usual = preset(known.name).network_link if known else node
    cluster = Cluster(
        name=f"{measured.ranks} x {measured.device}",
        gpu=gpu,
        num_gpus=measured.ranks,
        gpus_per_node=measured.ranks_per_node,
        node_link=node,
        network_link=_link(measured.network) or usual,
        host_bandwidth=copy,
        host_memory_bytes=within_range("host_memory_bytes", measured.host_memory_bytes),
        jitter=within_range("jitter", measured.jitter),
        host_operation=measured.host.each,
    )
    # No driver takes anything of what a CPU has free.
    return replace(cluster, reserved_bytes=0.0) if measured.kind == "cpu" else cluster


def _link(samples: Sequence[Sample]) -> Link | None:
    """The link fitted to all collectives; the latency of a hop is that of a call over its hops."""
    if not samples:
        return None
    latency, rate = measure.line(samples)
    return Link(rate, latency, 1.0)


def describe(measured: Measured) -> list[str]:
    """All measurements as text, one per line."""
    lines = [f"{measured.ranks} ranks, {measured.ranks_per_node} a node: {measured.device}"]
    for name, samples in measured.matmuls.items():
        lines += [_rate(f"matmul {name} {s.note}", s, human_flops) for s in samples]
    lines += [_rate(f"attention {s.note}", s, human_flops) for s in measured.attention]
    lines += [
        _rate(f"memory, {measured.traffic.note}", measured.traffic, human_bytes),
        _rate(f"copy {measured.copy.note}", measured.copy, human_bytes),
        f"{'an operation with nothing to do':<44}{human_seconds(measured.launch.each):>16}",
        f"{'an operation of a small layer, for the host':<44}"
        f"{human_seconds(measured.host.each):>16}",
        f"{'sustained over seconds':<44}{measured.sustained:>16.1%}",
        f"{'spread of a block of products':<44}{measured.jitter:>16.1%}",
    ]
    for where, samples in (("node", measured.node), ("network", measured.network)):
        lines += [
            _rate(f"{where}: {s.note}, {human_bytes(s.amount)} sent", s, human_bytes)
            for s in samples
        ]
    if not measured.network:
        known = find_gpu(measured.device)
        like = f"usual machines' with {known.name}" if known else "the links of a node"
        lines.append(f"network: not measured within a node, taken to be like {like}")
    return lines


def _rate(what: str, sample: Sample, human: Callable[[float], str]) -> str:
    rate = human(sample.rate) + "/s"
    return f"{what:<44}{rate:>16}  {human_seconds(sample.seconds):>8}"


def _head(measured: Measured) -> str:
    """Notes for the reader of the file, as TOML comments."""
    today = datetime.now(UTC).date()
    lines = [f"measured {today} by fivefold plan --calibrate, torch {torch.__version__}"]
    return "".join(f"# {line}\n" for line in [*lines, *describe(measured)]) + "\n"
