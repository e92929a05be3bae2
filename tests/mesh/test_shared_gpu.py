"""The back end of ranks that share a GPU, on tensors of a CPU, against gloo's own results."""

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.mesh.arguments import PLACES
from fivefold.mesh.groups import new_group
from fivefold.mesh.shared_gpu import Relay, RelayedKernel
from tests.pool import RankError, run

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
RELAYED = "cpu:gloo,cuda:relayed"
Case = Callable[[random.Random, random.Random, int, int], tuple[Callable[..., Any], list[Any]]]
"""(shared by all ranks, own, rank, world) -> a call that takes a group, and what it fills."""


class Through(TorchDispatchMode):
    """Gives operations of torch.distributed to a relay, as its kernels do on a GPU."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        places = PLACES.get(func.name())
        if places is not None and "relayed" in dist.get_backend_config(
            dist.ProcessGroup.unbox(args[places.group])
        ):
            return RelayedKernel(self._relay, func.name())(*args)
        return func(*args, **(kwargs or {}))


def _pause() -> None:
    time.sleep(random.choice([0, 0, 1e-4, 2e-3]))


@cache
def cpu_relay() -> Relay:
    """The relay of this process, which takes its time with each copy."""
    relay = Relay(torch.device("cpu"), _pause)
    dist.Backend.register_backend("relayed", relay.connect, extended_api=True, devices=["cuda"])
    return relay


def _group() -> dist.ProcessGroup:
    cpu_relay()
    group = new_group(backend=RELAYED)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # as `init_process_group` does
    return group


def _values(own: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(own.randrange(1 << 30))
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def _all_reduce(both: random.Random, own: random.Random, rank: int, world: int) -> Any:
    x = _values(own, both.choice(DTYPES), both.randint(1, 9), 3)
    op = both.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
    return lambda group: dist.all_reduce(x, op, group, async_op=True), [x]


def _gather(both: random.Random, own: random.Random, rank: int, world: int) -> Any:
    n, dtype = both.randint(0, 9), both.choice(DTYPES)
    out = torch.zeros(world * n, 2, dtype=dtype)
    # As FSDP2 does: the input may be this rank's place in the output.
    x = out[rank * n : (rank + 1) * n] if both.random() < 0.5 else torch.empty(n, 2, dtype=dtype)
    x.copy_(_values(own, dtype, n, 2))
    return lambda group: dist.all_gather_into_tensor(out, x, group, async_op=True), [out]


def _gather_list(both: random.Random, own: random.Random, rank: int, world: int) -> Any:
    x = _values(own, both.choice(DTYPES), both.randint(1, 9))
    outs = [torch.zeros_like(x) for _ in range(world)]
    return lambda group: dist.all_gather(outs, x, group, async_op=True), outs


def _reduce_scatter(both: random.Random, own: random.Random, rank: int, world: int) -> Any:
    n, dtype = both.randint(1, 9), both.choice(DTYPES)
    x, out = _values(own, dtype, world * n, 2), torch.zeros(n, 2, dtype=dtype)
    return lambda group: dist.reduce_scatter_tensor(out, x, group=group, async_op=True), [out]


def _all_to_all(both: random.Random, own: random.Random, rank: int, world: int) -> Any:
    sizes = [[both.randint(0, 4) for _ in range(world)] for _ in range(world)]
    gives, gets = sizes[rank], [row[rank] for row in sizes]
    dtype = both.choice(DTYPES)
    x, out = _values(own, dtype, sum(gives), 2), torch.zeros(sum(gets), 2, dtype=dtype)
    if both.random() < 0.5:  # each rank its own tensor, which not every gloo has
        parts, outs = list(x.split(gives)), list(out.split(gets))

        def call(group: dist.ProcessGroup | None) -> Any:
            if group is not None:
                return dist.all_to_all(outs, parts, group, async_op=True)
            return dist.all_to_all_single(out, x, gets, gives, async_op=True)

        return call, [out]
    return lambda group: dist.all_to_all_single(out, x, gets, gives, group, async_op=True), [out]


def _broadcast(both: random.Random, own: random.Random, rank: int, world: int) -> Any:
    x, source = _values(own, both.choice(DTYPES), 4, 3), both.randrange(world)
    return lambda group: dist.broadcast(x, group=group, group_src=source, async_op=True), [x]


def _messages(both: random.Random, own: random.Random, rank: int, world: int) -> Any:
    dtype, tag = both.choice(DTYPES), both.randint(0, 3)
    peers = [peer for peer in range(world) if peer != rank]
    sends = {peer: _values(own, dtype, 3, 1 + rank) for peer in peers}
    receives = {peer: torch.zeros(3, 1 + peer, dtype=dtype) for peer in peers}
    if own.random() < 0.5:  # a rank may name its sends first, or last
        peers.reverse()

    def call(group: dist.ProcessGroup | None) -> Any:
        ops = [(dist.isend, peer, sends[peer]) for peer in peers]
        ops += [(dist.irecv, peer, receives[peer]) for peer in peers]
        own.shuffle(ops)
        return dist.batch_isend_irecv(
            [dist.P2POp(op, x, group=group, tag=tag, group_peer=peer) for op, peer, x in ops]
        )

    return call, list(receives.values())


CASES: tuple[Case, ...] = (
    _all_reduce,
    _gather,
    _gather_list,
    _reduce_scatter,
    _all_to_all,
    _broadcast,
    _messages,
)


def _wait(works: Any) -> None:
    for work in works if isinstance(works, list) else [works]:
        work.wait()


def _like_gloo(rank: int, world: int, seed: int) -> None:
    group, count = _group(), 24
    random.seed(f"{seed} {rank}")  # for pauses
    found: list[list[list[Tensor]]] = []
    for relayed in (False, True):
        both, own = random.Random(seed), random.Random(f"{seed} {rank}")
        flying: list[Any] = []
        results: list[list[Tensor]] = []
        for _ in range(count):
            call, filled = both.choice(CASES)(both, own, rank, world)
            results.append(filled)
            if not relayed:
                _wait(call(None))
                continue
            with Through(cpu_relay()):
                flying.append(call(group))
            while len(flying) > 5:  # several are on their way, and end in any order
                _wait(flying.pop(random.randrange(len(flying))))
        for works in flying:
            _wait(works)
        found.append(results)
    for number, (theirs, ours) in enumerate(zip(*found, strict=True)):
        for a, b in zip(theirs, ours, strict=True):
            assert torch.equal(a, b), f"call {number}: {a} and {b}"
    dist.destroy_process_group(group)


@pytest.mark.parametrize("world", [2, 4])
def test_results_are_those_of_gloo(world: int) -> None:
    run(world, _like_gloo, 7 * world)


def _reads_when_called(rank: int, world: int) -> None:
    """A CPU has no streams, so what is sent is the value at the call."""
    group, x = _group(), torch.full((4,), float(rank + 1))
    with Through(cpu_relay()):
        work = dist.all_reduce(x, group=group, async_op=True)
        dist.barrier(group)
    work.wait()
    assert work.is_completed()
    assert x.tolist() == [sum(range(1, world + 1))] * 4
    told = [None] * world
    with Through(cpu_relay()):  # CPU tensors and objects have a gloo of their own
        dist.all_gather_object(told, rank, group)
    assert told == list(range(world))


def test_one_call_and_objects_and_a_barrier() -> None:
    run(2, _reads_when_called)


def _without_history(rank: int, world: int) -> None:
    weight = torch.ones(3, requires_grad=True)
    product = weight * 2
    squared = product.square()  # keeps `product`
    with Through(cpu_relay()):
        dist.all_reduce(product.detach(), group=_group())
    squared.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [8.0 * world] * 3


def test_autograd_learns_nothing_of_it_as_with_nccl() -> None:
    run(2, _without_history)


def _narrow(rank: int, world: int) -> None:
    """gloo itself has no floats of 8 bits, NCCL sends them."""
    group = _group()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
        x = torch.tensor([0.5, 2.0, 2.0 ** (rank + 2)]).to(dtype)
        out, parts = x.new_zeros(world * 3), [torch.zeros_like(x) for _ in range(world)]
        with Through(cpu_relay()):
            works = [
                dist.all_gather_into_tensor(out, x, group, async_op=True),
                dist.all_to_all(parts, [x] * world, group, async_op=True),
            ]
        _wait(works)
        expected = [0.5, 2.0, 4.0, 0.5, 2.0, 8.0]
        assert out.float().tolist() == torch.cat(parts).float().tolist() == expected


def test_floats_of_8_bits_travel() -> None:
    run(2, _narrow)


def _errors(rank: int, world: int) -> None:
    with Through(cpu_relay()):
        work = dist.all_reduce(torch.ones(3, dtype=torch.int16), group=_group(), async_op=True)
        work.wait()


def test_what_gloo_refuses_is_raised_by_wait() -> None:
    with pytest.raises(RankError, match="Invalid scalar type"):
        run(2, _errors)
