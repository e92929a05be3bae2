"""What `fivefold plan` says of a model from 8 K to 1 M tokens: the tables of the how-to.

    python benchmarks/long_context.py [--model llama3-8b] [--gpus 256] [--gpu H100]

Every row is one call of the planner with 4 M tokens a step. The second table is arithmetic: what a
rank sends per layer and 1,024 own tokens in each of the four ways (`volumes.context_volumes`).
"""

import argparse
import datetime
import json
import subprocess
import sys

from fivefold.config.presets import PRESETS
from fivefold.counts.messages import context_volumes
from fivefold.units import human_bytes

STEP_TOKENS = 4 << 20
LENGTHS = tuple(8192 << shift for shift in range(8))
OWN_TOKENS = 1024


def plan(model: str, gpu: str, gpus: int, length: int) -> dict:
    """The planner's answer for sequences of that many tokens."""
    words = ["plan", model, "--cluster", gpu, "--gpus", gpus, "--seq-length", length]
    words += ["--gbs", STEP_TOKENS // length, "--mbs", 1, "--top", 1, "--json"]
    command = [sys.executable, "-m", "fivefold", *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answer: dict = json.loads(done.stdout)
    return answer


def planned(model: str, gpu: str, gpus: int) -> str:
    """Markdown: a row a length."""
    lines = [
        "| tokens | best layout | step | tokens/s/GPU | MFU | memory |",
        "|---|---|---|---|---|---|",
    ]
    for length in LENGTHS:
        best = plan(model, gpu, gpus, length)["layouts"][0]
        layout = best["layout"].replace("micro-batch 1, ", "")
        lines.append(
            f"| {length // 1024} K | {layout} | {best['step_seconds']:.1f} s "
            f"| {best['tokens_per_second_per_gpu']:,.0f} | {100 * best['mfu']:.0f} % "
            f"| {human_bytes(best['memory_bytes'])} |"
        )
    return "\n".join(lines)


def volumes(name: str) -> str:
    """Markdown: a row a number of ranks, forward and backward in bf16."""
    model = PRESETS[name]
    lines = [
        "| cp | p2p | all_gather | a2a | a2a+p2p, 8 inside |",
        "|---|---|---|---|---|",
    ]
    for ranks in (2, 4, 8, 16, 32):
        cells = []
        for kind in ("p2p", "all_gather", "a2a", "a2a+p2p"):
            if kind == "a2a+p2p" and ranks <= 8:
                cells.append("-")
                continue
            sent = context_volumes(
                kind,
                ranks,
                query=OWN_TOKENS * (model.q_size + model.attention_size),
                key_value=OWN_TOKENS * (model.k_size + model.v_size),
                element=2,
                grad_element=2 if kind == "all_gather" else 4,
                key_value_heads=model.num_kv_heads,
                inner=8,
            )
            cells.append(human_bytes(sent.forward + sent.backward))
        lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--gpus", type=int, default=256)
    asked = parser.parse_args()
    print(f"{datetime.date.today()}, {asked.model} on {asked.gpus} x {asked.gpu}\n")
    print(planned(asked.model, asked.gpu, asked.gpus))
    print(f"\nbytes a rank sends per layer and {OWN_TOKENS:,} own tokens\n")
    print(volumes(asked.model))


if __name__ == "__main__":
    main()
