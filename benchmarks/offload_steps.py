"""Whole steps with state off the device, beside DeepSpeed's: seconds, CPU seconds, bytes resident.

    python -m benchmarks.offload_steps [--rounds 3] [--ranks 1 2] [--ways ...]

The model of `benchmarks.peers`, from the same weights on the same tokens, in bf16 with fp32
masters, clipped. Systems take turns within each round; medians count. Without a GPU host memory is
a second copy, for both. DeepSpeed lives where `benchmarks.peers` puts it; it compiles its Adam and,
for a disk, its reader (Debian's libaio-dev).
"""

import argparse
import tempfile
from statistics import median

from benchmarks.peer_systems.common import BATCH, SEQ
from benchmarks.peer_systems.offload_ways import WAYS
from benchmarks.peers import System, answer, make_peers_venv

SYSTEMS = {
    "DeepSpeed": System(
        "deepspeed",
        peer=True,
        script="offload_deepspeed",
        environment={"DS_ACCELERATOR": "cpu"},
    ),
    "Fivefold": System("fivefold", own_launcher=True, script="offload_fivefold"),
    "Fivefold, on the device": System("fivefold", own_launcher=True, script="offload_fivefold"),
}
FIGURES = ("s", "CPU s", "MiB resident")


def measured(name: str, way: str, ranks: int, folder: str) -> tuple[float, float, float] | None:
    """Seconds and CPU seconds of a step, and MiB resident at the end, over all ranks."""
    system, words = SYSTEMS[name], ["--way", way, "--ranks", str(ranks), "--folder", folder]
    if name.endswith("device"):
        words.append("--on-device")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    found = answer(system, words, launcher if ranks > 1 and not system.own_launcher else None)
    if "error" in found:
        print(f"{name}, {way}: {found['error'].strip().splitlines()[-1]}", flush=True)
        return None
    return BATCH * SEQ / found["tokens_per_s"], found["cpu_s_per_step"], found["pss_mb"]


def main() -> None:
    """Print a table of each way and number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder of the disk")
    given = parser.parse_args()
    if any(SYSTEMS[name].peer for name in given.systems):
        make_peers_venv()
    print(f"| | ranks | | {' | '.join(FIGURES)} |\n|{'---|' * 6}")
    for way in given.ways:
        for ranks in given.ranks:
            runs: dict[str, list[tuple[float, ...]]] = {name: [] for name in given.systems}
            for _ in range(given.rounds):
                for name, each in runs.items():
                    if found := measured(name, way, ranks, given.path):
                        each.append(found)
            for name, each in runs.items():
                if each:
                    row = [median(column) for column in zip(*each, strict=True)]
                    cells = f"{row[0]:.3f} | {row[1]:.3f} | {row[2]:.0f}"
                    print(f"| {way} | {ranks} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
