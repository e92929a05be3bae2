"""What every measured system shares: the model, its weights, the data, and how a run is timed.

Shapes: B sequences, S positions, H hidden, N heads, D head size, V vocabulary.
"""

import argparse
import json
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peer_systems.rows import EXPERT_ROWS, ROWS, Row

LAYERS, HIDDEN, HEADS, FFN, VOCAB, SEQ = 4, 256, 8, 768, 4096, 256
EXPERTS, TOPK, EXPERT_FFN = 16, 4, 192  # where a row has experts
BATCH = 8  # sequences of a step, over all ranks
MICROBATCH = 2  # sequences of a pipeline microbatch
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
NORM_EPSILON, ROPE_BASE = 1e-5, 10000.0


class Job(NamedTuple):
    """A system set up for one layout on this rank.

    Attributes:
        step: takes this rank's tokens and labels [B / dp, S], trains on them, and returns their
            mean loss, or None on a rank that does not compute it.
        dp_rank: which share of the global batch this rank trains on.
    """

    step: Callable[[Tensor, Tensor], Tensor | None]
    dp_rank: int


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        q_BNSD, k_BNSD, v_BNSD = (
            project(x_BSH).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        rotation = rope(q_BNSD.shape[2])
        out_BNSD = F.scaled_dot_product_attention(
            rotate(q_BNSD, *rotation), rotate(k_BNSD, *rotation), v_BNSD, is_causal=True
        )
        return self.o_proj(out_BNSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, inner: int = FFN) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSH)) * self.up_proj(x_BSH))


class Block(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module] = MLP) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, NORM_EPSILON)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, NORM_EPSILON)
        self.mlp = mlp()

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH))
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


class Model(nn.Module):
    """The whole transformer, or one of `stages` equal pieces; parameter names are global."""

    def __init__(
        self,
        stage: int = 0,
        stages: int = 1,
        layers: int = LAYERS,
        mlp: Callable[[], nn.Module] = MLP,
    ) -> None:
        super().__init__()
        per_stage = layers // stages
        first, last = stage == 0, stage == stages - 1
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN) if first else None
        mine = range(stage * per_stage, (stage + 1) * per_stage)
        self.layers = nn.ModuleDict({str(n): Block(mlp) for n in mine})
        self.norm = nn.RMSNorm(HIDDEN, NORM_EPSILON) if last else None
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False) if last else None
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.copy_(initial(name, weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


def rope(positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, D], computed per call as cheaply as a cache would be read."""
    head = HIDDEN // HEADS
    frequencies = ROPE_BASE ** (-torch.arange(0, head, 2) / head)
    angles_SD = torch.outer(torch.arange(positions), frequencies).repeat(1, 2)
    return angles_SD.cos(), angles_SD.sin()


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


def initial(name: str, shape: Sequence[int]) -> Tensor:
    """The initial value of a parameter: a function of its global name, equal in every layout."""
    if "norm" in name:
        return torch.ones(*shape)
    seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=seed) * 0.02


def loss_of(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, -2), labels_BS.flatten())


def batch(step: int, dp_rank: int, dp: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens and labels [BATCH / dp, S] of a step.

    Small ids are likelier than large ones, so that the loss falls and a gradient that is not
    reduced, or reduced twice, shows in it.
    """
    seed = torch.Generator().manual_seed(step)
    ids = (torch.rand(BATCH, SEQ + 1, generator=seed) ** 3 * VOCAB).long()
    mine = ids.chunk(dp)[dp_rank]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


class Asked(NamedTuple):
    row: Row
    steps: int
    warmup: int


def parse(supports: Callable[[Row], bool], *packages: str) -> Asked:
    """The worker's command line: `--row NAME --steps N --warmup N`.

    `--supports` instead prints, as JSON, the rows a system has and the versions of its packages.
    """
    rows = {**ROWS, **EXPERT_ROWS}
    parser = argparse.ArgumentParser()
    parser.add_argument("--supports", action="store_true")
    parser.add_argument("--row", choices=rows, default="one")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    asked = parser.parse_args()
    if asked.supports:
        able = [row.name for row in rows.values() if supports(row)]
        say({"rows": able, "versions": {name: version(name) for name in ("torch", *packages)}})
        sys.exit()
    return Asked(rows[asked.row], asked.steps, asked.warmup)


def say(answer: dict) -> None:
    """Print one JSON line, for benchmarks/peers.py to read."""
    print(json.dumps(answer), flush=True)


def main(build: Callable[[Row], Job], supports: Callable[[Row], bool], *packages: str) -> None:
    """What each rank of a system runs; rank 0 says the result."""
    imported = time.time()
    row, steps, warmup = parse(supports, *packages)
    torch.set_num_threads(1)
    end(measure(build(row), row, steps, warmup, imported))


def end(result: dict) -> None:
    """Let rank 0 say the result, and leave together."""
    if dist.get_rank() == 0:
        say(result)
    dist.barrier()
    dist.destroy_process_group()


def measure(job: Job, row: Row, steps: int, warmup: int, imported: float) -> dict:
    """Train `warmup` steps, then time `steps` more between two barriers.

    CPU seconds are user + system of every rank's process, threads included. Start-up counts from
    the launch of the command, or from the end of a rank's imports, to the end of the first step.
    """
    data = [batch(step, job.dp_rank, row.dp) for step in range(warmup + steps)]
    losses = [job.step(*data[0])]
    first_step = time.time()
    losses += [job.step(*data[step]) for step in range(1, warmup)]
    dist.barrier()
    received = bytes_received()
    wall, cpu = time.perf_counter(), time.process_time()
    losses += [job.step(*data[warmup + step]) for step in range(steps)]
    dist.barrier()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    received = bytes_received() - received
    launched = float(os.environ.get("PEERS_LAUNCHED", "nan"))
    has_loss = losses[0] is not None
    peak, pss = memory_mib()
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(
        ranks,
        {
            "cpu": cpu / steps,
            "bytes": received / steps,
            "startup": first_step - launched,
            "after_import": first_step - imported,
            "peak": peak,
            "pss": pss,
            "loss": [float(loss) for loss in losses if loss is not None] if has_loss else None,
        },
    )
    curves = [rank["loss"] for rank in ranks if rank["loss"]]
    return {
        "cpu_s_per_step": sum(rank["cpu"] for rank in ranks),
        "bytes_per_step": sum(rank["bytes"] for rank in ranks),
        "tokens_per_s": BATCH * SEQ * steps / wall,
        "startup_s": max(rank["startup"] for rank in ranks),
        "first_step_after_import_s": max(rank["after_import"] for rank in ranks),
        "peak_rss_mb": sum(rank["peak"] for rank in ranks),
        "peak_rss_max_mb": max(rank["peak"] for rank in ranks),
        "pss_mb": sum(rank["pss"] for rank in ranks),
        "loss": [sum(step) / len(step) for step in zip(*curves, strict=True)],
    }


def bytes_received() -> int:
    """Bytes that this process got over its TCP connections so far, as the kernel counts them.

    gloo's messages, their headers, and the few of the store where ranks meet (Linux).
    """
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            if not link.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", told, 128)[0]  # tcpi_bytes_received
        except OSError:  # closed meanwhile, as that of the listing is
            continue
    return total


def memory_mib() -> tuple[float, float]:
    """Peak resident set and present proportional set of this process, in MiB (Linux).

    VmHWM rather than ru_maxrss, which a process inherits from the one that started it.
    """

    def field(path: str, key: str) -> float:
        lines = Path(path).read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))

    return field("/proc/self/status", "VmHWM:"), field("/proc/self/smaps_rollup", "Pss:")
