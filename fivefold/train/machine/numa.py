"""Binds each rank to processors near its GPU, or near its memory. Imports no torch.

A rank that is bound to a NUMA node has its memory there, too: it asks Linux to prefer that node,
whatever policy it was started with, such as `numactl --interleave`. Where it may not ask, it has
what Linux does by default, which takes a page from the node whose processor writes it first. What
the modes mean is as in `torchrun --numa-binding`.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from fivefold.config.training import NumaBinding
from fivefold.errors import ConfigError, Mistake

SYSFS = Path("/sys")
_SET_MEMPOLICY = MappingProxyType({"x86_64": 238, "aarch64": 237})
_MPOL_PREFERRED = 1  # from <linux/mempolicy.h>
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Binding:
    """The processors of a rank.

    Attributes:
        node: NUMA node of its GPU, or that it was given.
        cpus: logical processors that it may use.
    """

    node: int
    cpus: frozenset[int]

    def __str__(self) -> str:
        return f"node {self.node} (CPUs {ranges(self.cpus)})"


def choose_bindings(
    mode: NumaBinding,
    ranks: int,
    gpus: Sequence[str] = (),
    *,
    allowed: Collection[int] | None = None,
    sysfs: Path = SYSFS,
) -> list[Binding]:
    """The binding of every rank on this machine.

    Args:
        mode: node: all processors of the node; socket: of all nodes of its socket; exclusive:
            a share of the node's cores that no other rank has.
        ranks: number of ranks on this machine.
        gpus: PCI address of the GPU of every rank; empty on the CPU, where neighbouring ranks share
            a node, and every node has about as many ranks.
        allowed: processors that may be used; None: those of this process.
        sysfs: where the kernel tells what the machine is made of.

    Raises:
        ConfigError: a GPU's node has no processor for its ranks, or the system binds none.
    """
    if sys.platform != "linux":
        raise _impossible("this system does not bind processes to processors")
    usable = os.sched_getaffinity(0) if allowed is None else allowed
    nodes = _nodes(sysfs, frozenset(usable))
    near = [_node_of(address, sysfs) for address in gpus]
    near = near or [sorted(nodes)[rank * len(nodes) // ranks] for rank in range(ranks)]
    for rank, node in enumerate(near):
        if node not in nodes:
            raise _impossible(f"rank {rank}'s GPU is near node {node}, of which no CPU may be used")
    if mode == "exclusive":
        return _shared_out(near, nodes, sysfs)
    if mode == "node":
        return [Binding(node, nodes[node]) for node in near]
    sockets = {
        node: _number(_topology(sysfs, min(cpus)) / "physical_package_id")
        for node, cpus in nodes.items()
    }
    alike = {node: [n for n in nodes if sockets[n] == sockets[node]] for node in nodes}
    return [Binding(node, _joined(nodes[n] for n in alike[node])) for node in near]


def bind(binding: Binding) -> None:
    """Bind every thread of this process; this one and those it starts prefer the node's memory.

    The memory is preferred, not required: a rank whose node is full takes memory of another instead
    of failing.
    """
    if sys.platform == "linux":  # other systems have no bindings, see `choose_bindings`
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), binding.cpus)
    prefer_memory(binding.node)


def prefer_memory(node: int) -> str:
    """Take this thread's pages, and those of threads it starts, from a node while it has free ones.

    See set_mempolicy(2), which has no wrapper in the C library.

    Returns:
        where memory comes from now. Kernels may have no policies or, as in most containers, forbid
        them; a node may have no memory.
    """
    number, words = _SET_MEMPOLICY.get(platform.machine()), node // _BITS + 1
    if number is None or sys.platform != "linux":
        return f"memory where it is first written: {platform.machine()} has no known call"
    mask = (ctypes.c_ulong * words)()
    mask[words - 1] = 1 << node % _BITS
    size = ctypes.c_ulong(_BITS * words + 1)  # the kernel reads one bit less than it is told
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(ctypes.c_long(number), ctypes.c_long(_MPOL_PREFERRED), mask, size):
        why = os.strerror(ctypes.get_errno())
        return f"memory where it is first written: the kernel refuses set_mempolicy ({why})"
    return "memory of the same node preferred"


def described(bindings: Sequence[Binding]) -> str:
    """'ranks 0-3: node 0 (CPUs 0-31); ranks 4-7: node 1 (CPUs 32-63)'."""
    texts = []
    for text, each in groupby(enumerate(bindings), key=lambda pair: str(pair[1])):
        of = [rank for rank, _ in each]
        texts.append(f"{'rank' if len(of) == 1 else 'ranks'} {ranges(of)}: {text}")
    return "; ".join(texts)


def ranges(numbers: Collection[int]) -> str:
    """Numbers as the kernel writes them.

    >>> ranges({0, 1, 2, 8})
    '0-2,8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _shared_out(near: list[int], nodes: dict[int, frozenset[int]], sysfs: Path) -> list[Binding]:
    """Whole cores of its node for each rank, divided evenly."""
    bindings = []
    for rank, node in enumerate(near):
        cores = sorted({_siblings(sysfs, cpu) & nodes[node] for cpu in nodes[node]}, key=min)
        count, place = near.count(node), near[:rank].count(node)
        if len(cores) < count:
            raise _impossible(f"node {node} has {len(cores)} cores for {count} ranks", "node")
        first, last = (len(cores) * p // count for p in (place, place + 1))
        bindings.append(Binding(node, _joined(cores[first:last])))
    return bindings


def _joined(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset(cpu for cpus in sets for cpu in cpus)


def _impossible(why: str, *others: NumaBinding) -> ConfigError:
    works = tuple(f"--numa-binding {mode}" for mode in (*others, "none"))
    return ConfigError(Mistake(f"numa_binding: {why}", works=works))


def _nodes(sysfs: Path, allowed: frozenset[int]) -> dict[int, frozenset[int]]:
    """The usable processors of each node that has any; one node 0 where the kernel names none."""
    found = {
        int(folder.name.removeprefix("node")): _set(folder / "cpulist") & allowed
        for folder in (sysfs / "devices/system/node").glob("node[0-9]*")
    }
    return {node: cpus for node, cpus in found.items() if cpus} or {0: allowed}


def _node_of(address: str, sysfs: Path) -> int:
    """The node of a PCI device; -1, as on machines with one node, is node 0."""
    return max(0, _number(sysfs / "bus/pci/devices" / address / "numa_node"))


def _siblings(sysfs: Path, cpu: int) -> frozenset[int]:
    return _set(_topology(sysfs, cpu) / "thread_siblings_list") or frozenset({cpu})


def _topology(sysfs: Path, cpu: int) -> Path:
    return sysfs / f"devices/system/cpu/cpu{cpu}/topology"


def _number(file: Path) -> int:
    return int(_text(file) or 0)


def _set(file: Path) -> frozenset[int]:
    """The numbers of a list such as '0-3,8'."""
    pairs = [part.partition("-") for part in _text(file).split(",") if part]
    return frozenset(n for a, _, b in pairs for n in range(int(a), int(b or a) + 1))


def _text(file: Path) -> str:
    """The content of a kernel file; empty if there is no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
