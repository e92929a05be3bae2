"""Mixtures of experts side by side: CPU seconds and bytes sent per step, per layout.

    python benchmarks/experts.py [--rows ep2 ...] [--systems megatron ...] [--rounds 3]

As benchmarks/peers.py, whose ranks, rounds and virtual environment these are: in every round each
row is measured on each system in turn, so that a busy machine is busy for all, and medians count.
The model is that of the peers with 16 experts of 192 inner features in every layer, 4 of them per
token, in fp32, without losses that balance them. `loop` is plain PyTorch with a loop over the
experts of a rank; megatron-core and Fivefold send tokens by alltoall, and Fivefold by flex as well.
Bytes are those that the kernel counted on the ranks' connections, the same way for everybody.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peer_systems.rows import EXPERT_ROWS  # noqa: E402
from benchmarks.peers import System, compare, medians, parse, table  # noqa: E402

SYSTEMS = {
    system.name: system
    for system in (
        System("loop"),
        System("megatron", peer=True, environment={"TORCHDYNAMO_DISABLE": "1"}),
        System("alltoall", script="fivefold", own_launcher=True),
        System(
            "flex", script="fivefold", own_launcher=True, environment={"PEERS_DISPATCHER": "flex"}
        ),
    )
}


def main() -> None:
    asked = parse(__doc__, "experts", EXPERT_ROWS, SYSTEMS)
    print(render(compare(asked, SYSTEMS, [EXPERT_ROWS[name] for name in asked.rows])))


def summary(report: dict) -> str:
    """Markdown: CPU seconds of a step and MB sent in it, the table of speed.md."""
    return "\n".join(table(report, medians(report), both_cell))


def both_cell(cell: dict, one: dict | None, best: float) -> str:
    cost = cpu_cell(cell, one, best).partition(" ")[0]
    sent = cell["bytes_per_step"]
    return cost + (f", {sent / 1e6:.1f} MB" if sent > 1e5 else "")


def render(report: dict) -> str:
    """Tables in Markdown."""
    found = medians(report)
    return "\n".join(
        [
            f"{report['date']}, {report['machine']}, {report['settings']}",
            "",
            "CPU s/step over all ranks (x of the lowest, which is bold)",
            *table(report, found, cpu_cell),
            "",
            "MB received per step over all ranks",
            *table(report, found, lambda cell, _, __: f"{cell['bytes_per_step'] / 1e6:.1f}"),
        ]
    )


def cpu_cell(cell: dict, _: dict | None, best: float) -> str:
    cost = cell["cpu_s_per_step"]
    return f"**{cost:.3f}**" if cost == best else f"{cost:.3f} ({cost / best:.2f}x)"


if __name__ == "__main__":
    main()
