"""Train a model from a disk in a few GiB of device memory; kill it at random moments; resume it.

    python benchmarks/infinity.py [--steps 6] [--kills 2] [--limit 3GiB] [--path FOLDER] [--small]

A model of a billion parameters (16 layers of 2,048 features, bf16 with fp32 masters, 16 bytes of
state a parameter) trains with its masters, moments and weights in files (`--optimizer-cpu-offload
--param-cpu-offload`, both paths), recomputing its layers, under `--device-memory-limit`. Without a
GPU the limit holds for the tensors that would be on it. One run goes through; a second one is
killed (SIGKILL, all of its processes) at random moments, and resumed from its last checkpoint until
it has ended. Losses and gradient norms must be the same to the last bit. `--small` takes a model of
13 M parameters instead.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.kill import latest, losses
from fivefold.units import human_bytes, human_seconds

SIZES = {
    "large": (16, 2048, 32, 32768, "8192"),
    "small": (6, 384, 6, 4096, "1536"),
}
"""Layers, features, heads, entries of the vocabulary, and features of an MLP."""


def words(args: argparse.Namespace, save: Path, disk: Path) -> list[str]:
    """The command line of a run in the folder `save`."""
    layers, hidden, heads, vocabulary, inner = SIZES["small" if args.small else "large"]
    text = (
        f"train debug --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--num-query-groups {heads} --kv-channels {hidden // heads} --ffn-hidden-size {inner} "
        f"--vocab-size {vocabulary} --seq-length {args.tokens} --bf16 "
        f"--micro-batch-size 1 --global-batch-size 2 --train-iters {args.steps} "
        "--lr-warmup-iters 1 --save-interval 2 --keep-latest-k 1 --eval-interval 0 "
        "--data-parallel-sharding-strategy optim_grads_params --recompute-granularity full "
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear "
        f"--optimizer-cpu-offload --optimizer-offload-path {disk} "
        f"--param-cpu-offload --param-offload-path {disk} --device-memory-limit {args.limit}"
    )
    return [sys.executable, "-m", "fivefold", *text.split(), "--save", str(save)]


def run(command: list[str], seconds: float | None = None) -> bool:
    """Run a command, and kill all of its processes after a time; whether it has ended by itself."""
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for victim in (*psutil.Process(job.pid).children(recursive=True), job):
            victim.kill()
        job.communicate()
        return False
    if job.returncode:
        raise SystemExit(f"the run failed by itself:\n{said}")
    return True


def main() -> None:
    """Print what a run took, and whether one that was killed came to the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--limit", default="3GiB")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder of the disk")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(dir=args.path) as name:
        whole, killed, disk = (Path(name) / each for each in ("whole", "killed", "disk"))
        began = time.perf_counter()
        run(words(args, whole, disk))
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (whole / "metrics.jsonl").open()]
        steps = [line for line in lines if "loss" in line]
        print(
            f"{steps[-1]['step']} steps in {human_seconds(seconds)}, each "
            f"{human_seconds(min(step['seconds'] for step in steps))} or more; at most "
            f"{human_bytes(max(step['memory_bytes'] for step in steps))} of {args.limit} of device "
            f"memory; losses {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}",
            flush=True,
        )
        kills = 0
        while not run(
            words(args, killed, disk),
            chance.uniform(0.3, 1.0) * seconds if kills < args.kills else None,
        ):
            kills += 1
            print(f"kill {kills}: {latest(killed)}", flush=True)
        same = losses(killed) == losses(whole)
        print(f"{kills} kills: losses and norms are {'bitwise equal' if same else 'OTHERS'}")
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
