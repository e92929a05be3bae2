"""Makes megatron-core run on a CPU: import it before anything of megatron-core.

It has no CPU path: tensors are created on `torch.cuda.current_device()`, and random states are
those of the CUDA device. This answers for that device with the CPU, and for its streams with one
that is always done; it changes no arithmetic.
"""

import contextlib
import functools
import types

import torch


def on_cpu(create):
    @functools.wraps(create)
    def call(*values, **options):
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return create(*values, **options)

    return call


torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
stream = types.SimpleNamespace(
    wait_stream=lambda _: None,
    record_event=lambda: types.SimpleNamespace(synchronize=lambda: None),
)
torch.cuda.Stream = lambda *_, **__: stream  # type: ignore[assignment, misc]
torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[assignment]
tensor_type = torch.Tensor.type
torch.Tensor.type = lambda self, *to, **options: (  # type: ignore[method-assign, assignment]
    tensor_type(self, *to, **options) if to else tensor_type(self).replace("torch.", "torch.cuda.")
)
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
for name in ("tensor", "ones", "zeros", "empty", "triu"):
    setattr(torch, name, on_cpu(getattr(torch, name)))
