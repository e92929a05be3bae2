"""Where tests run Triton kernels: interpreted on a CPU, or compiled on a GPU."""

import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.model.eight_bit.fp8 import E4M3, E5M2

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def run_kernels(device: Any, patch: pytest.MonkeyPatch, *users: ModuleType) -> str:
    """Let these modules take their kernels on a device, whose name is returned."""
    pytest.importorskip("triton")
    if device == "cpu":
        if "TRITON_INTERPRET" not in os.environ:
            pytest.skip("a process either interprets kernels or compiles them")
        for user in users:
            patch.setattr(user, "runs_triton", lambda _: True)
        _round_as_torch(patch)
        _replace_language_once(patch)
    return str(device)


def _round_as_torch(patch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds fp32 wrongly: to bf16 towards 0, and to 8-bit floats it loses
    carries, and ties go up."""
    import triton.language as tl
    from triton.runtime import interpreter

    types = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: E4M3, tl.float8e5: E5M2}
    convert = interpreter._convert_float

    def as_torch(x: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if given != tl.float32 or wanted not in types:
            return convert(x, given, wanted, rounding)
        rounded = torch.from_numpy(x.copy()).view(torch.float32).to(types[wanted])
        bits = torch.uint8 if rounded.itemsize == 1 else torch.uint16
        return rounded.view(bits).numpy().reshape(x.shape)

    patch.setattr(interpreter, "_convert_float", as_torch)


def _replace_language_once(patch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter replaces the whole language for a kernel, and then once more for every
    function that it calls, which takes nearly half of its time and changes nothing."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    # Functions of Triton's own know the language by its other name.
    every = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", lambda _: replace(every))
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
