"""A kernel that was compiled for such arguments is launched again, as Triton would choose."""

import random
from typing import Any

import pytest
import torch

from fivefold.mesh.device import _kind, _launch_again

NUMBERS = (0, 1, 2, 15, 16, 17, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), -(2**31) - 1)
NUMBERS += (2**62, 2**63 - 1, 2**63, 2**64 - 16, -(2**63))
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)


def _argument(rng: random.Random) -> Any:
    kind = rng.randrange(8)
    if kind < 4:
        return rng.choice((*NUMBERS, rng.getrandbits(rng.randrange(1, 63))))
    if kind == 4:
        return rng.choice((True, False, None, 1.0, 0.5))
    memory = torch.zeros(8, dtype=torch.float64)
    return memory.view(torch.uint8)[16 * rng.randrange(3) :].view(rng.choice(DTYPES))[
        rng.choice((0, 2)) :
    ]


def test_arguments_of_one_kind_are_compiled_alike() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    backend, rng = compiler.CUDABackend(target), random.Random(0)
    seen: dict[Any, Any] = {}
    for _ in range(20_000):
        argument = _argument(rng)
        compiled_for = jit.native_specialize_impl(type(backend), argument, False, True, True)
        assert seen.setdefault(_kind(argument), compiled_for) == compiled_for, argument
    assert len(seen) > 15


class _Kernel:
    """Compiles as Triton's do: once for each kind of arguments that `alike` tells apart."""

    arg_names = ("x", "size", "tile", "powers")

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*given: Any, **constants: Any) -> Any:
            self.calls.append(("compiled", grid, (*given, constants["tile"], constants["powers"])))
            return {(3, 1, 1): self._again((3, 1, 1)), (2, 5, 1): self._again((2, 5, 1))}

        return run

    def _again(self, grid: Any) -> Any:
        return lambda *every: self.calls.append(("again", grid, every))


def test_it_gets_what_it_got_when_it_was_compiled() -> None:
    kernel, x = _Kernel(), torch.zeros(64)
    ways = {"powers": True, "num_warps": 8, "tile": 128}  # options of Triton are none of its own
    for size, grid in ((32, (3,)), (48, (2, 5)), (33, (3,)), (35, (3,))):
        _launch_again(kernel, grid, (x, size), ways)
    _launch_again(kernel, (3,), (x, 32), ways | {"powers": False})
    _launch_again(kernel, (3,), (x[1:], 32), ways)
    assert [(how, grid, every[1:]) for how, grid, every in kernel.calls] == [
        ("compiled", (3,), (32, 128, True)),
        ("again", (2, 5, 1), (48, 128, True)),
        ("compiled", (3,), (33, 128, True)),
        ("again", (3, 1, 1), (35, 128, True)),
        ("compiled", (3,), (32, 128, False)),
        ("compiled", (3,), (32, 128, True)),
    ]
