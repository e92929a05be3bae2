"""A step with the optimizer in host memory: seconds, CPU seconds, bytes, beside DeepSpeed's.

    python -m benchmarks.offload [--rounds 5] [--layers 4] [--hidden 512] [--path FOLDER]
    pip install --no-deps --target DIR deepspeed==0.19.8 hjson py-cpuinfo msgpack ...
    PYTHONPATH=DIR python -m benchmarks.offload --deepspeed

Without a GPU a second tensor stands for host memory, so copies cost what copies within memory cost,
and nothing overlaps. What is compared is the work of the host in a step: the update of the same
parameters from the same gradients, by this optimizer, in memory and on a disk (where masters and
moments may stay in the page cache, which is not counted), by torch's AdamW alone (the least that it
could take), and with --deepspeed by DeepSpeed's `DeepSpeedCPUAdam`, which compiles itself.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.turns import in_turns
from fivefold.config.training import OptimizerConfig
from fivefold.memory.host import HostLink
from fivefold.optim.adamw import AdamW
from fivefold.optim.offload import HostAdamW
from fivefold.optim.schedule import StepRates
from fivefold.units import human_bytes, human_seconds

CONFIG = OptimizerConfig(clip_grad=1.0)
RATES = StepRates(1e-3, 1e-3, CONFIG.weight_decay)
NORM = 2.0  # so that gradients are clipped
Way = tuple[Callable[[], None], int, int]
"""A step, the bytes of its state in memory, and those in files."""


def shapes(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a llama-like model, without its embedding."""
    wide = 4 * hidden
    each = {
        "qkv.weight": (3 * hidden, hidden),
        "out.weight": (hidden, hidden),
        "up.weight": (2 * wide, hidden),
        "down.weight": (hidden, wide),
        "norm.weight": (hidden,),
    }
    return {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in each.items()}


def on_host(named: dict[str, tuple[int, ...]], folder: Path | None = None) -> Way:
    """A step of the optimizer in host memory: gradients leave, weights come back in bf16.

    Args:
        named: shapes of the parameters.
        folder: where masters and moments lie in files; None: in memory.
    """
    weights = {n: nn.Parameter(torch.zeros(s, dtype=torch.bfloat16)) for n, s in named.items()}
    gradients = {name: torch.randn(shape) for name, shape in named.items()}
    link = HostLink(torch.device("cpu"))
    counted = dict.fromkeys(weights, True)
    wide = torch.float32
    host = HostAdamW(weights, counted, CONFIG, wide, wide, link, folder=folder)
    for piece in host.masters().values():
        piece.local.normal_()
    host.publish(weights)
    for weight in weights.values():
        weight.grad_dtype = torch.float32

    def step() -> None:
        for name in reversed(list(weights)):
            weights[name].grad = gradients[name]
            host.offload(name)
        host.step(RATES, NORM, None)
        host.state.synchronize()  # what would go on beside the next step

    return step, sum(tensor.nbytes for tensor in host.tensors()), host.disk_bytes()


def plain(named: dict[str, tuple[int, ...]]) -> Way:
    """AdamW on fp32 weights where they are, without clipping and copies."""
    weights = {name: nn.Parameter(torch.randn(shape)) for name, shape in named.items()}
    gradients = {name: torch.randn_like(weight) for name, weight in weights.items()}
    optimizer = AdamW(weights, CONFIG)

    def step() -> None:
        for name, weight in weights.items():
            weight.grad = gradients[name]
        optimizer.step(RATES)

    return step, sum(4 * weight.nbytes for weight in weights.values()), 0


def deepspeed(named: dict[str, tuple[int, ...]]) -> Way:
    """What ZeRO-Offload does on the host: clip, `DeepSpeedCPUAdam`, and weights in bf16."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiles its extension

    masters = [nn.Parameter(torch.randn(shape)) for shape in named.values()]
    arrived = [torch.randn_like(master) for master in masters]
    room = [torch.empty_like(master) for master in masters]
    back: list[Tensor] = [torch.empty(m.shape, dtype=torch.bfloat16) for m in masters]
    optimizer = DeepSpeedCPUAdam(masters, lr=1e-3, weight_decay=CONFIG.weight_decay)

    def step() -> None:
        for master, gradient, own in zip(masters, arrived, room, strict=True):
            own.copy_(gradient)
            master.grad = own.mul_(CONFIG.clip_grad / NORM)
        optimizer.step()
        for master, weight in zip(masters, back, strict=True):
            weight.copy_(master.detach())

    return step, sum(4 * master.nbytes for master in masters), 0


def main() -> None:
    """Print a line for each way to update, timed in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--deepspeed", action="store_true", help="compare with DeepSpeed's")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder of the disk")
    args = parser.parse_args()
    named = shapes(args.layers, args.hidden)
    count = sum(torch.Size(shape).numel() for shape in named.values())
    ways = {"in host memory": on_host(named), "torch's AdamW alone": plain(named)}
    ways["on a disk"] = on_host(named, Path(args.path))
    if args.deepspeed:
        ways["DeepSpeedCPUAdam"] = deepspeed(named)
    taken = in_turns({name: step for name, (step, *_) in ways.items()}, args.rounds)
    print(f"{count:,} parameters, {torch.get_num_threads()} threads of {os.cpu_count()} cores")
    for name, (_, held, mapped) in ways.items():
        wall, cpu = (median(column) for column in zip(*taken[name], strict=True))
        print(
            f"{name:<20}  {human_seconds(wall):>8} a step, {human_seconds(cpu):>8} of CPU time, "
            f"{human_bytes(held)} in memory, {human_bytes(mapped)} in files, "
            f"{human_bytes((held + mapped) / count)} a parameter"
        )


if __name__ == "__main__":
    main()
