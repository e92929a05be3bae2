"""Transformer layers on one device: time, MFU, launches and memory, beside plain PyTorch.

    python -m benchmarks.gpu_layers [--dry]

Forward and backward of a few layers in bf16, on the hidden states of one row: Fivefold's, with the
linears that a run of one rank has, as they are, without fused kernels, with the norm fused with the
sum before it, with dropout of hidden states or of attention's probabilities and compiled, with the
row as one document and packed with many, with linear layers in fp8 by each recipe (their MFU is a
share of the bf16 peak), and as one CUDA graph; and the same layers in plain PyTorch, which knows no
documents.

Prints a line of JSON for each. `--dry` runs small ones on a CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.config.training import TrainingConfig
from fivefold.description.shape import training_flops
from fivefold.hardware import peak_flops
from fivefold.model.batch import Batch, on_device
from fivefold.model.compiled import compile_layers
from fivefold.model.eight_bit.fp8 import RECIPES
from fivefold.model.eight_bit.layers import install_eight_bit
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.eight_bit.rules import BLACKWELL
from fivefold.model.fusions import install_fusions
from fivefold.model.rope import RotaryTables
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.install import install_deferral
from fivefold.train.step_graph import CudaRecorder

LAYERS, STEPS, WARMUP = 4, 10, 3
LLAMA = replace(PRESETS["llama3-8b"], num_layers=LAYERS)
ONE = replace(LLAMA, hidden_size=2048, ffn_hidden_size=8192, kv_channels=64)
SHAPES = {"1B": (ONE, 4096), "8B": (LLAMA, 8192)}
SMALL = replace(
    LLAMA, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2
)
DRY_SHAPES = {"small": (replace(SMALL, kv_channels=None), 128)}
Step = Callable[[], None]


class PlainLayer(nn.Module):
    """A Llama layer as one writes it first."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, made = model.hidden_size, partial(nn.Linear, bias=False)
        self.heads, self.size = model.num_attention_heads, model.head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, model.norm_epsilon) for _ in range(2))
        self.q, self.o = made(hidden, model.q_size), made(model.q_size, hidden)
        self.k, self.v = made(hidden, model.k_size), made(hidden, model.v_size)
        self.gate, self.up = made(hidden, model.ffn_size), made(hidden, model.ffn_size)
        self.down = made(model.ffn_size, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[S, H] -> [S, H]; cos and sin [S, size]."""
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(1, (-1, self.size)).transpose(0, 1) for f in self.qkv)
        q, k = (h * cos + _turned(h) * sin for h in (q, k))
        seen = F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        x = x + self.o(seen.transpose(0, 1).flatten(1))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    @property
    def qkv(self) -> tuple[nn.Linear, ...]:
        """The projections that read the normed states."""
        return self.q, self.k, self.v


def _turned(h: Tensor) -> Tensor:
    one, other = h.chunk(2, dim=-1)
    return torch.cat((-other, one), dim=-1)


def plain_step(model: ModelConfig, length: int, device: torch.device, *, compiled: bool) -> Step:
    """Forward and backward of plain layers."""
    layers = nn.ModuleList(PlainLayer(model) for _ in range(LAYERS)).to(device, torch.bfloat16)
    positions = torch.arange(length, device=device)[None]
    tables = RotaryTables.at(model, positions, torch.bfloat16)
    cos, sin = (table.reshape(length, -1) for table in (tables.cos, tables.sin))
    cos, sin = (torch.cat((t, t), -1) if t.shape[-1] < model.head_dim else t for t in (cos, sin))
    runs = [torch.compile(layer) if compiled else layer for layer in layers]

    def forward(x: Tensor) -> Tensor:
        for run in runs:
            x = run(x, cos, sin)
        return x

    return _both_ways(forward, layers, model, length, device)


def recipes(device: torch.device) -> list[str]:
    """Those of 8 bits, but for mxfp8 on GPUs that have no kernel for it."""
    lacks = device.type == "cuda" and torch.cuda.get_device_capability(device) < BLACKWELL
    return [recipe for recipe in RECIPES if not (lacks and recipe == "mxfp8")]


def our_step(
    model: ModelConfig,
    length: int,
    device: torch.device,
    *,
    compiled: bool = False,
    packed: bool = False,
    fused: bool = True,
    fused_norm: bool = False,
    recipe: str | None = None,
) -> Step:
    """Forward and backward of Fivefold's layers, in 8 bits if there is a recipe."""
    stage = Stage(model, StageSpec(False, tuple(range(LAYERS)), False)).to(device, torch.bfloat16)
    if not compiled:  # as `Layout.owns_linears`
        install_deferral(stage, DeferredWeights(), recomputes=False)
    if recipe is not None:
        install_eight_bit(stage, EightBit(RECIPES[recipe], torch.bfloat16), MemoryConfig())
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    if fused:
        install_fusions(stage, TrainingConfig(fused_residual_rmsnorm=fused_norm))
    if compiled:
        compile_layers(stage, "inductor" if device.type == "cuda" else "eager")  # dry: traced alone
    (batch,) = on_device([_batch(length, packed)], device)
    return _both_ways(lambda x: stage(x, batch), stage, model, length, device)


def replayed(make: Callable[[], Step], device: torch.device) -> Step:
    """A step as one CUDA graph, which the host launches at once."""
    step, recorder = make(), CudaRecorder(device)
    for _ in range(WARMUP):
        recorder.run(step)

    def work() -> tuple[Tensor, ...]:
        step()
        return ()

    return recorder.record(work, ())


def _both_ways(
    forward: Callable[[Tensor], Tensor],
    layers: nn.Module,
    model: ModelConfig,
    length: int,
    device: torch.device,
) -> Step:
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(length, model.hidden_size, **kind).requires_grad_()
    grad = torch.randn(length, model.hidden_size, **kind)

    def step() -> None:
        forward(x).backward(grad)
        layers.zero_grad()
        x.grad = None

    return step


def _batch(length: int, packed: bool) -> Batch:
    """A row of documents of 1 to 1/8 of its length, or of one."""
    generator = torch.Generator().manual_seed(1)
    begins = torch.zeros(length, dtype=torch.int64)
    if packed:
        ends = torch.randint(1, length // 8, (length,), generator=generator).cumsum(0)
        begins[ends[ends < length]] = 1
    documents = begins.cumsum(0)[None]
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), begins.nonzero().flatten()))
    places = torch.arange(length)
    return Batch(
        tokens=places[None] % 7,
        labels=places[None] % 5,
        positions=(places - starts[documents[0]])[None],
        documents=documents,
        token_ids=places[None],
    )


def measured(step: Step, device: torch.device) -> dict[str, Any]:
    """Median seconds of a step; on CUDA also its launches, idle share and peak memory."""
    warmup, steps = (WARMUP, STEPS) if device.type == "cuda" else (1, 2)  # a dry run
    for _ in range(warmup):
        step()
    times = [seconds(step, device) for _ in range(steps)]
    found: dict[str, Any] = {"seconds": statistics.median(times)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        busy = sum(e.time_range.elapsed_us() for e in kernels) / 1e6
        found |= {"launches": len(kernels), "idle": max(0.0, 1 - busy / found["seconds"])}
    return found


def seconds(step: Step, device: torch.device) -> float:
    """How long a step takes, its kernels included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def rows(dry: bool) -> Iterator[dict[str, Any]]:
    """A row for each system and shape."""
    device = torch.device("cpu" if dry else "cuda")
    name = "cpu" if dry else torch.cuda.get_device_name()
    peak = peak_flops(name, "bf16")
    for shape, (model, length) in (DRY_SHAPES if dry else SHAPES).items():
        dropping = replace(model, hidden_dropout=0.1)
        masking = replace(model, attention_dropout=0.1)
        systems: dict[str, Callable[[], Step]] = {
            "plain": partial(plain_step, model, length, device, compiled=False),
            "Fivefold": partial(our_step, model, length, device),
            "Fivefold unfused": partial(our_step, model, length, device, fused=False),
            "Fivefold, norm and sum": partial(our_step, model, length, device, fused_norm=True),
            "Fivefold dropping": partial(our_step, dropping, length, device),
            "Fivefold dropping unfused": partial(our_step, dropping, length, device, fused=False),
            "Fivefold dropping probabilities": partial(our_step, masking, length, device),
            "Fivefold dropping probabilities unfused": partial(
                our_step, masking, length, device, fused=False
            ),
            "Fivefold packed": partial(our_step, model, length, device, packed=True),
            "Fivefold compiled": partial(our_step, model, length, device, compiled=True),
        }
        for recipe in recipes(device):
            narrow = partial(our_step, model, length, device, recipe=recipe)
            systems[f"Fivefold {recipe}"] = narrow
        if not dry:
            narrow = partial(our_step, model, length, device, recipe="tensorwise", compiled=True)
            systems["Fivefold tensorwise compiled"] = narrow
            for which in ("Fivefold", "Fivefold compiled", "Fivefold tensorwise"):
                systems[f"{which}, one graph"] = partial(replayed, systems[which], device)
            systems["plain compiled"] = partial(plain_step, model, length, device, compiled=True)
        spec = StageSpec(False, tuple(range(LAYERS)), False)
        flops = length * training_flops(model, length, spec).total
        for system, make in systems.items():
            found = measured(make(), device)
            if peak is not None and "packed" not in system:
                found["mfu"] = flops / found["seconds"] / peak
            yield {"shape": shape, "tokens": length, "system": system} | found


def tell(rows: Callable[[bool], Iterator[dict[str, Any]]], doc: str | None) -> None:
    """Print the rows of a benchmark, each as a line of JSON; `doc` is what its module says."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="something small, on a CPU")
    for row in rows(parser.parse_args().dry):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    tell(rows, __doc__)
