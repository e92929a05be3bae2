"""Which processors a rank is bound to, on machines that are folders."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fivefold.config.training import NumaBinding
from fivefold.errors import ConfigError
from fivefold.train.machine.numa import bind, choose_bindings, described, prefer_memory, ranges
from tests.pool import run


def machine(root: Path, nodes: Sequence[str], gpus: Mapping[str, int], threads: int = 1) -> Path:
    """A sysfs with these processors on each node, of which two are on a socket; GPUs by address."""
    cpus: list[tuple[int, int]] = []
    for node, text in enumerate(nodes):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
        pairs = [part.partition("-") for part in text.split(",")]
        cpus += [(n, node) for a, _, b in pairs for n in range(int(a), int(b or a) + 1)]
    cores = len(cpus) // threads
    for cpu, node in cpus:
        topology = root / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{node // 2}\n")
        siblings = range(cpu % cores, len(cpus), cores)
        (topology / "thread_siblings_list").write_text(",".join(map(str, siblings)))
    for address, node in gpus.items():
        device = root / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return root


GPUS = {f"0000:{bus:02x}:00.0": node for bus, node in ((1, 1), (2, 1), (3, 0), (4, 3))}
NODES = ("0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31")  # two threads a core


def texts(root: Path, mode: NumaBinding, ranks: int, gpus: Sequence[str] = ()) -> list[str]:
    every = choose_bindings(mode, ranks, gpus, allowed=range(32), sysfs=root)
    return [f"{each.node}: {ranges(each.cpus)}" for each in every]


def test_a_rank_is_near_its_gpu(tmp_path: Path) -> None:
    root = machine(tmp_path, NODES, GPUS, threads=2)
    assert texts(root, "node", 4, [*GPUS]) == [
        *("1: 4-7,20-23", "1: 4-7,20-23", "0: 0-3,16-19", "3: 12-15,28-31"),
    ]
    assert texts(root, "socket", 4, [*GPUS])[2:] == ["0: 0-7,16-23", "3: 8-15,24-31"]
    assert texts(root, "exclusive", 4, [*GPUS]) == [
        *("1: 4-5,20-21", "1: 6-7,22-23", "0: 0-3,16-19", "3: 12-15,28-31"),
    ]


def test_without_gpus_ranks_are_spread_over_nodes(tmp_path: Path) -> None:
    root = machine(tmp_path, NODES, {}, threads=2)
    assert [text[0] for text in texts(root, "node", 8)] == [*"00112233"]
    assert [text[0] for text in texts(root, "node", 3)] == [*"012"]
    assert texts(root, "exclusive", 8)[:2] == ["0: 0-1,16-17", "0: 2-3,18-19"]
    bound = choose_bindings("node", 3, allowed=range(32), sysfs=root)
    assert described(bound[:1] * 2 + bound[2:]) == (
        "ranks 0-1: node 0 (CPUs 0-3,16-19); rank 2: node 2 (CPUs 8-11,24-27)"
    )


def test_only_what_the_process_may_use(tmp_path: Path) -> None:
    root = machine(tmp_path, NODES, GPUS, threads=2)
    some = choose_bindings("node", 2, allowed=[5, 6, 9], sysfs=root)
    assert [(each.node, sorted(each.cpus)) for each in some] == [(1, [5, 6]), (2, [9])]
    with pytest.raises(ConfigError, match="rank 1's GPU is near node 0, of which no CPU may be"):
        choose_bindings("node", 2, [*GPUS][1:3], allowed=[5, 6, 9], sysfs=root)
    with pytest.raises(ConfigError, match="node 1 has 2 cores for 3 ranks"):
        choose_bindings("exclusive", 3, [next(iter(GPUS))] * 3, allowed=[5, 6], sysfs=root)


def test_a_machine_that_tells_nothing_is_one_node(tmp_path: Path) -> None:
    assert texts(tmp_path, "node", 2) == ["0: 0-31"] * 2
    (tmp_path / "bus/pci/devices/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:01:00.0/numa_node").write_text("-1\n")
    assert texts(tmp_path, "node", 1, ["0000:01:00.0"]) == ["0: 0-31"]


def _assert_memory_of(node: int) -> None:
    """Where the kernel lets us: new memory prefers the node, as /proc tells."""
    told, policies = prefer_memory(node), Path("/proc/thread-self/numa_maps")
    if "same node" in told and policies.exists():
        found = {line.split()[1] for line in policies.read_text().splitlines()}
        assert f"prefer:{node}" in found  # libraries set policies of single ranges
        assert found <= {f"prefer:{node}", "local"}


def _bound(rank: int, world: int) -> list[int]:
    before = os.sched_getaffinity(0)
    own = choose_bindings("exclusive", len(before))[rank % len(before)]
    try:
        bind(own)
        assert all(
            os.sched_getaffinity(int(thread)) == own.cpus
            for thread in os.listdir("/proc/self/task")
        )
        _assert_memory_of(own.node)
        return sorted(own.cpus)
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)


def test_every_thread_is_bound() -> None:
    """On the machine that runs this."""
    first, second = run(2, _bound)
    assert first
    assert first != second or len(os.sched_getaffinity(0)) == 1


def test_a_refused_memory_policy_is_told() -> None:
    """No machine has this node; a kernel that knows no policies refuses, too."""
    assert "first written: the kernel refuses set_mempolicy (" in prefer_memory(1000)
