"""Attention over context-parallel ranks: ours beside the published algorithms, on this machine.

    python benchmarks/context.py [--ranks 2 4] [--length 8192] [--steps 3]
    python benchmarks/context.py --train 131072 [--ranks 4]

The first form times forward and backward of one causal attention layer, in turns, and counts what
is sent. CPU seconds are of all ranks together (user and system): the figure that a shared machine
disturbs least; `x` compares it with one call on one rank. The published algorithms are written here
from their descriptions, on the same kernels:

- ring: zigzag ring attention whose fp32 dKV goes round in P hops (ring-flash-attention, PyTorch);
- all-gather: all heads of K and V at once (Llama 3);
- Ulysses: an all-to-all each for Q, K and V (DeepSpeed-Ulysses).

The second form trains a tiny model on sequences of that many tokens. Both write what they find to
benchmarks/results.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.audit.traffic import Traffic
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.context.attention import HeadAssignment, KVExchangeAttention, UlyssesAttention
from fivefold.context.balance import split
from fivefold.context.install import make_kernel
from fivefold.context.transport import Backward, Gather, OwnTokens, Ring
from fivefold.data.packing import Microbatch
from fivefold.mesh.grid import Grid
from fivefold.mesh.groups import Groups, build_groups
from fivefold.model.attention.blocks import DocumentMask
from fivefold.model.attention.grouped_query import Kernel, Scope, attention
from fivefold.model.dropout import HeadDropout
from fivefold.model.shards import MicrobatchShare
from fivefold.train.engine import Engine
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.units import human_bytes

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
RESULTS = Path(__file__).parent / "results"


class PublishedRing(Ring):
    """dKV starts at home with the own block and goes all the way round."""

    def backward(self, own: OwnTokens) -> Backward:
        """P - 1 hops of KV and P of dKV."""
        chunks = own.part.shards.chunks
        size, rank = self.group.size(), self.group.rank()
        kv, grads = own.kv, None
        for step in range(size):
            arriving = self._hop(kv) if step + 1 < size else None
            here = yield own.keys(kv, chunks[(rank - step) % size])
            if grads is not None:
                messages, incoming = grads
                messages.wait()
                here += incoming
            grads = self._hop(here, tag=1)
            if arriving is not None:
                arriving[0].wait()
                kv = arriving[1]
        assert grads is not None
        grads[0].wait()
        return grads[1]


@dataclass(frozen=True)
class PublishedUlysses:
    """Queries, keys and values are exchanged one after the other."""

    group: dist.ProcessGroup

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scope: Scope, drop: HeadDropout | None
    ) -> Tensor:
        """See `model.attention.grouped_query.Kernel`."""
        assert scope.part is not None
        assignment = HeadAssignment(self.group, scope.part, q.shape[2], k.shape[2])
        q, k, v = (
            _Exchange.apply(x, assignment, spans)
            for x, spans in ((q, assignment.queries), (k, assignment.keys), (v, assignment.keys))
        )
        out = attention(q, k, v, Scope(), None)
        back: Tensor = _Exchange.apply(out, assignment, None)
        return back


class _Exchange(torch.autograd.Function):
    """Heads for tokens with `spans`, which says whose heads are whose; tokens for heads without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, assignment: HeadAssignment, spans: Callable | None) -> Tensor:
        ctx.assignment, ctx.spans = assignment, spans
        return _to_tokens(x, assignment) if spans is None else _to_heads(x, assignment, spans)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.spans is None:
            return _to_heads(grad, ctx.assignment, ctx.assignment.queries), None, None
        parts = _received(ctx.assignment, ctx.assignment.by_rank(grad.flatten(2)))
        dealt = [part.unflatten(2, (-1, grad.shape[3])) for part in parts]
        heads = ctx.spans(len(dealt) - 1)[1]
        total = grad.new_zeros((*dealt[0].shape[:2], heads, grad.shape[3]))
        for rank, part in enumerate(dealt):
            total[:, :, slice(*ctx.spans(rank))] += part
        return total, None, None


def _to_heads(x: Tensor, assignment: HeadAssignment, spans: Callable) -> Tensor:
    sends = [x[:, :, slice(*spans(rank))].flatten(2) for rank in range(assignment.group.size())]
    return assignment.in_order(_received(assignment, sends)).unflatten(2, (-1, x.shape[3]))


def _to_tokens(x: Tensor, assignment: HeadAssignment) -> Tensor:
    parts = _received(assignment, assignment.by_rank(x.flatten(2)))
    return torch.cat(parts, dim=-1).unflatten(2, (-1, x.shape[3]))


def _received(assignment: HeadAssignment, sends: list[Tensor]) -> list[Tensor]:
    return assignment.exchange(sends, [sends[0].shape[2]] * len(sends))


def _hierarchy(groups: Groups) -> Kernel:
    return make_kernel("a2a+p2p", groups)


WAYS: Mapping[str, Callable[[Groups], Kernel]] = {
    "p2p": lambda groups: make_kernel("p2p", groups),
    "published ring": lambda groups: KVExchangeAttention(PublishedRing(_cp(groups))),
    "all_gather": lambda groups: make_kernel("all_gather", groups),
    "published all-gather": lambda groups: KVExchangeAttention(Gather(_cp(groups), 1)),
    "a2a": lambda groups: UlyssesAttention(_cp(groups)),
    "published Ulysses": lambda groups: PublishedUlysses(_cp(groups)),
    "a2a+p2p": _hierarchy,
}


def _cp(groups: Groups) -> dist.ProcessGroup:
    assert groups.cp is not None
    return groups.cp


class Counted(Traffic):
    """Also counts the messages that this rank sends."""

    messages = 0

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.messages += func is torch.ops.c10d.send.default
        return super()._run(func, args, kwargs)


@dataclass(frozen=True)
class Row:
    """One way, per step: CPU seconds of all ranks, wall seconds, and what each rank sends."""

    ranks: int
    way: str
    cpu: float
    wall: float
    sent: float
    messages: int


def measure(env: RankEnv, length: int, steps: int, folder: Path) -> None:
    """All ways in turns, `steps` times after one to warm up; rank 0 writes."""
    torch.set_num_threads(1)
    init_process_group(env, "cpu")
    ranks = env.world_size
    sizes = (2, ranks // 2) if ranks > 2 else ()
    groups = build_groups(Grid(cp=ranks), env.rank, "cpu", sharded=False, cp_sizes=sizes)
    part = MicrobatchShare(split(1, DocumentMask((0, length)), ranks), env.rank)
    kernels = {name: make(groups) for name, make in WAYS.items() if sizes or "+" not in name}
    shape = 1, length // ranks
    generator = torch.Generator().manual_seed(env.rank)
    q, k, v = (
        torch.randn(*shape, n, HEAD_DIM, generator=generator).requires_grad_()
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    walls: dict[str, list[float]] = {name: [] for name in kernels}
    cpus: dict[str, list[float]] = {name: [] for name in kernels}
    sent: dict[str, tuple[float, int]] = {}
    for step in range(steps + 1):
        for name, kernel in kernels.items():
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            with Counted({}) as traffic:
                out = kernel(q, k, v, Scope(part=part), None)
                torch.autograd.grad(out, (q, k, v), out.detach())
            spent = torch.tensor([time.process_time() - cpu])
            dist.all_reduce(spent)
            if step:
                walls[name].append(time.perf_counter() - start)
                cpus[name].append(float(spent))
            sent[name] = sum(traffic.sent.values()), traffic.messages
    if env.rank == 0:
        rows = [
            Row(
                ranks,
                name,
                statistics.median(cpus[name]),
                statistics.median(walls[name]),
                *sent[name],
            )
            for name in kernels
        ]
        (folder / str(ranks)).write_text(json.dumps([vars(row) for row in rows]))
    dist.destroy_process_group()


def alone(env: RankEnv, length: int, steps: int, folder: Path) -> None:
    """One call on one rank: what the ranks would share at best."""
    torch.set_num_threads(1)
    q, k, v = (
        torch.randn(1, length, n, HEAD_DIM).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    found = []
    for _ in range(steps + 1):
        start, cpu = time.perf_counter(), time.process_time()
        out = attention(q, k, v, Scope(), None)
        torch.autograd.grad(out, (q, k, v), out.detach())
        found.append((time.process_time() - cpu, time.perf_counter() - start))
    cpus, walls = zip(*found[1:], strict=True)
    row = Row(1, "one call", statistics.median(cpus), statistics.median(walls), 0.0, 0)
    (folder / "1").write_text(json.dumps([vars(row)]))


def train(env: RankEnv, length: int, steps: int, folder: Path) -> None:
    """A few optimizer steps on one sequence of so many tokens a step."""
    torch.set_num_threads(1)
    init_process_group(env, "cpu")
    model = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_query_groups=1,
        ffn_hidden_size=64,
        vocab_size=256,
        max_position_embeddings=length,
    )
    config = Config(model=model).with_values(
        seq_length=length,
        global_batch_size=1,
        precision="fp32",
        lr=1e-2,
        train_iters=steps,
        context_parallel_size=env.world_size,
    )
    engine = Engine(check(config, env.world_size), env.rank, torch.device("cpu"))
    before = _peak()
    found = []
    for _ in range(steps):
        start, cpu = time.perf_counter(), time.process_time()
        result = engine.step([_sequence(length)])
        spent = torch.tensor([time.process_time() - cpu, float(_peak() - before)])
        every = [torch.empty_like(spent) for _ in range(env.world_size)]
        dist.all_gather(every, spent)
        found.append(
            {
                "loss": result.loss,
                "cpu": sum(float(x[0]) for x in every),
                "wall": time.perf_counter() - start,
                "largest_growth": max(float(x[1]) for x in every),
            }
        )
        if env.rank == 0:
            print(found[-1], flush=True)
    if env.rank == 0:
        (folder / "steps").write_text(json.dumps(found))
    dist.destroy_process_group()


def _sequence(length: int) -> Microbatch:
    """Bytes that repeat after 1,000: attention has something to learn."""
    tokens = torch.arange(length + 1).remainder(1000).mul(7919).remainder(251)[None].numpy()
    place = torch.arange(length)[None].numpy()
    return Microbatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), place, place * 0, place.copy())


def _peak() -> int:
    """Bytes of this process that were resident at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def render(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row a way and number of ranks."""
    once = next(row["cpu"] for row in rows if row["ranks"] == 1)
    lines = [
        "| ranks | way | CPU s | x | wall s | sent by a rank | messages |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['ranks']} | {row['way']} | {row['cpu']:.2f} | {row['cpu'] / once:.2f} "
            f"| {row['wall']:.2f} | {human_bytes(row['sent'])} | {row['messages']} |"
        )
    return "\n".join(lines)


def launch(work: Callable[..., None], ranks: int, *args: Any) -> None:
    """Run on so many ranks of this machine."""
    if launch_local(lambda env: work(env, *args), ranks):
        raise SystemExit("a rank failed")


def main() -> None:
    """Parse, measure, write, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--train", type=int, help="tokens of a sequence to train on")
    asked = parser.parse_args()
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        },
        "torch": torch.__version__,
    }
    with TemporaryDirectory(prefix="fivefold-context-") as name:
        folder = Path(name)
        if asked.train:
            ranks = (asked.ranks or [4])[0]
            launch(train, ranks, asked.train, asked.steps, folder)
            report |= {"ranks": ranks, "tokens": asked.train}
            report["steps"] = json.loads((folder / "steps").read_text())
        else:
            launch(alone, 1, asked.length, asked.steps, folder)
            for ranks in asked.ranks or [2, 4]:
                launch(measure, ranks, asked.length, asked.steps, folder)
            sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
            report["settings"] = {
                "length": asked.length,
                "steps": asked.steps,
                "dtype": "fp32",
            } | sizes
            found = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
            report["results"] = [row for rows in found for row in rows]
            print(render(report["results"]))
    kind = "context-training" if asked.train else "context"
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{kind}-{datetime.date.today()}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
