"""CUDA implementations of `model.attention.kernels.BlockKernel`, with checks of what each supports.

Every backward takes the output and the log-sum-exp over *all* keys, not only the block's. Shapes:
B batch, N query heads, G key/value heads, q queries, k keys, D features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fivefold.mesh.device import runs_triton, uses_gpu_kernels
from fivefold.model.attention.blocks import Block, Visibility, flash_takes
from fivefold.model.attention.scores import USUAL, Scores
from fivefold.model.dropout import HeadDropout, PairDropout

ATEN = torch.ops.aten
PLANNED = 128
"""cuDNN takes blocks whose lengths are multiples of this, since it plans for each new shape."""

MOST_FEATURES, MOST_BYTES = 256, 1024
"""Most features of a head in a tile of our own kernel, and their bytes. Twice as many would need
130 KiB with 16 rows, the fewest that GPUs multiply; some GPUs have 99."""

Grads = tuple[Tensor, Tensor, Tensor]


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    lengths: tuple[int, int],
    causal: bool,
    window: Mapping[str, int],
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention's output and log-sum-exp.

    The operators that `torch.nn.attention.varlen` calls: that function's backward insists on its
    own log-sum-exp.

    Args:
        q: queries [B, q, N, D]; with `starts` [T, N, D].
        k: keys, with heads that groups of query heads may share.
        v: values.
        starts: offset of each piece in the T tokens, then T; None: rows of equal length.
        lengths: longest piece of queries and of keys.
        causal: whether a query sees no later key.
        window: sizes to the left and right, by torch's names.
        scale: what q k^T is multiplied by; None: 1 / sqrt(D).
    """
    out, lse, *_ = ATEN._flash_attention_forward(
        q, k, v, starts, starts, *lengths, 0.0, causal, False, scale=scale, **window
    )
    return out, lse


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    lengths: tuple[int, int],
    causal: bool,
    window: Mapping[str, int],
    scale: float | None,
) -> Grads:
    """Gradients of q, k and v, for an output and log-sum-exp over all keys; see `flash_forward`."""
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # the random state of dropout
    saved = q, k, v, out, lse, starts, starts
    grads: Grads = ATEN._flash_attention_backward(
        grad, *saved, *lengths, 0.0, causal, unused, unused, scale=scale, **window
    )
    return grads


@dataclass(frozen=True)
class FlashOnCuda:
    """FlashAttention; its window covers a BAND.

    Attributes:
        scale: what q k^T is multiplied by; None: 1 / sqrt(D).
    """

    scale: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `model.attention.kernels.BlockKernel`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        lengths = q.shape[1], k.shape[1]
        out, lse = flash_forward(q, k, v, None, lengths, *_seen(block), self.scale)
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Grads:
        """See `model.attention.kernels.BlockKernel`."""
        grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        lengths, lse = (q.shape[1], k.shape[1]), lse.contiguous()
        rest = None, lengths, *_seen(block), self.scale
        dq, dk, dv = flash_backward(grad, q, k, v, out, lse, *rest)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _seen(block: Block) -> tuple[bool, dict[str, int]]:
    """Whether a block is causal, and its window in FlashAttention's words.

    The window of a BAND counts from the diagonal that ends at the last query and key.
    """
    if block.kind != Visibility.BAND:
        return block.kind == Visibility.CAUSAL, {}
    last = (block.k[1] - block.k[0]) - (block.q[1] - block.q[0])
    return False, {
        "window_size_left": last - block.shift + block.window,
        "window_size_right": block.shift - last,
    }


@dataclass(frozen=True)
class CudnnOnCuda:
    """cuDNN attention, the fastest from Hopper on, for large regular blocks.

    Bands and lengths that are not multiples of PLANNED fall back to FlashAttention.

    Attributes:
        scale: what q k^T is multiplied by; None: 1 / sqrt(D).
    """

    scale: float | None = None

    @property
    def others(self) -> FlashOnCuda:
        """The kernel for all other blocks."""
        return FlashOnCuda(self.scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `model.attention.kernels.BlockKernel`."""
        if not _regular(q, k, block):
            return self.others.forward(q, k, v, block)
        causal = block.kind == Visibility.CAUSAL
        out, lse, *_ = ATEN._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=self.scale
        )
        return out, lse[..., 0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Grads:
        """See `model.attention.kernels.BlockKernel`."""
        if not _regular(q, k, block):
            return self.others.backward(grad, q, k, v, out, lse, block)
        # Without dropout the random state is unused.
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        grads: Grads = ATEN._scaled_dot_product_cudnn_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse[..., None].contiguous(),
            state,
            state,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            block.kind == Visibility.CAUSAL,
            scale=self.scale,
        )
        return grads


def _regular(q: Tensor, k: Tensor, block: Block) -> bool:
    return block.kind != Visibility.BAND and q.shape[2] % PLANNED == 0 == k.shape[2] % PLANNED


Attend = Callable[[Tensor, Tensor, Tensor, Block], tuple[Tensor, Tensor]]
"""(q, k, v, block) -> output [B, N, q, D] and log-sum-exp [B, N, q], both differentiable."""


@dataclass(frozen=True)
class Differentiated:
    """A kernel whose backward cannot take a log-sum-exp: uses autograd through the block instead.

    The output over all keys is o = sum_b s_b o_b with the share s_b = exp(l_b - l) of each block b.
    So the gradient is s_b do for o_b, and s_b do (o_b - o) for l_b. It costs one more forward of
    the block.

    Attributes:
        attend: differentiable forward.
    """

    attend: Attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `model.attention.kernels.BlockKernel`."""
        with torch.no_grad():
            return self.attend(q, k, v, block)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Grads:
        """See `model.attention.kernels.BlockKernel`."""
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            own_out, own_lse = self.attend(q, k, v, block)
        grad = grad * (own_lse.detach() - lse).exp()[..., None]
        d_lse = (grad * (own_out.detach() - out)).sum(-1)
        grads = grad.to(own_out.dtype), d_lse.to(own_lse.dtype)
        dq, dk, dv = torch.autograd.grad((own_out, own_lse), (q, k, v), grads)
        return dq, dk, dv


@dataclass(frozen=True)
class Flex:
    """FlexAttention (Dong et al. 2024): any dtype but fp64; skips fully masked tiles.

    Attributes:
        scale: what q k^T is multiplied by; None: 1 / sqrt(D).
        compiled: False: run uncompiled, which holds the scores but runs anywhere, also on CPUs in
            fp64.
    """

    scale: float | None = None
    compiled: bool = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `Attend`."""
        attention, make_mask, request = self._functions
        mask, lengths = None, (q.shape[2], k.shape[2])
        if block.kind != Visibility.FULL:
            window = block.window if block.kind == Visibility.BAND else lengths[1]
            # Tensors, so that a new value does not recompile; filled on the device, because a copy
            # from the host would wait for it.
            shift, reach = (torch.full((), x, device=q.device) for x in (block.shift, window))

            def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return (j <= i + shift) & (i + shift - j <= reach)

            mask = make_mask(seen, None, None, *lengths, device=q.device)
        if self.scale is not None:
            # Compiled for any length, a scale becomes a symbol, for which no GPU kernel exists.
            q = q * (self.scale * q.shape[-1] ** 0.5)
        shared = q.shape[1] != k.shape[1]
        wants = {"block_mask": mask, "enable_gqa": shared, "return_aux": request(lse=True)}
        out, more = attention(q, k, v, **wants)
        return out, more.lse

    @cached_property
    def _functions(self) -> tuple[Any, Any, Any]:
        """FlexAttention, imported and compiled (for dynamic lengths) on first use."""
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        if not self.compiled:
            return flex_attention, create_block_mask, AuxRequest
        attention = torch.compile(flex_attention, dynamic=True)
        make_mask = torch.compile(create_block_mask, dynamic=True)
        return attention, make_mask, AuxRequest


@dataclass(frozen=True)
class OwnOnCuda:
    """Our FlashAttention with dropout by hash, caps and recorded scores, where `runs_own` allows
    it.

    Attributes:
        drop: dropout of the probabilities between all queries and keys that blocks are of.
        scores: how scores are made of q k^T.
    """

    drop: PairDropout | None = None
    scores: Scores = USUAL

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `model.attention.kernels.BlockKernel`."""
        from fivefold.model.kernels import attention as attention_kernels

        shape, rest = (len(q), -1), (*self._within(q, k, block), self.scores)
        q, k, v = (_token_rows(x) for x in (q, k, v))
        out, lse = attention_kernels.forward(q, k, v, *rest)
        return out.unflatten(0, shape).transpose(1, 2), lse.unflatten(1, shape).transpose(0, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block
    ) -> Grads:
        """See `model.attention.kernels.BlockKernel`."""
        from fivefold.model.kernels import attention as attention_kernels

        shape, rest = (len(q), -1), (*self._within(q, k, block), self.scores)
        grad, q, k, v, out = (_token_rows(x) for x in (grad, q, k, v, out))
        lse = lse.transpose(0, 1).flatten(1)
        grads = attention_kernels.backward(grad, q, k, v, out, lse, *rest)
        dq, dk, dv = (x.unflatten(0, shape).transpose(1, 2) for x in grads)
        return dq, dk, dv

    def _within(self, q: Tensor, k: Tensor, block: Block) -> tuple[Any, PairDropout | None]:
        from fivefold.model.kernels.attention import Seen

        drop, longest = self.drop, (q.shape[2], k.shape[2])
        if drop is not None:
            drop = drop.between(slice(*block.q), slice(*block.k))
        ends = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        window = block.window if block.kind == Visibility.BAND else None
        causal = block.kind != Visibility.FULL
        starts = ends * longest[0], ends * longest[1]
        return Seen(*starts, longest, causal, block.shift, window), drop


def _token_rows(x: Tensor) -> Tensor:
    """[B, N, q, D] -> [B * q, N, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def runs_own(q: Tensor, v: Tensor, drop: HeadDropout | None) -> bool:
    """Whether our own kernel supports queries [.., D] and values like these, with dropout."""
    features = max(q.shape[-1], v.shape[-1])
    fits = features <= MOST_FEATURES and features * q.itemsize <= MOST_BYTES
    if not (fits and (drop is None or drop.fused) and runs_triton(q)):
        return False
    return not _lacking_capability(q, 8)


def lacking_flash(q: Tensor) -> str:
    """Why FlashAttention does not support queries [B, N, q, D] like these; '' if it does."""
    if not uses_gpu_kernels(q):
        return _ELSEWHERE
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 and fp16, not in {q.dtype}"
    if not flash_takes(q.shape[-1]):
        return f"heads must have a multiple of 8 features and at most 256, not {q.shape[-1]}"
    return _lacking_capability(q, 8)


def lacking_cudnn(q: Tensor) -> str:
    """Why cuDNN, or FlashAttention as its fallback, does not support these queries."""
    if lacking := lacking_flash(q):
        return lacking
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients are not the same bits each time"
    if q.shape[-1] > 128:
        return f"heads must have at most 128 features, not {q.shape[-1]}"
    if (torch.backends.cudnn.version() or 0) < 90000:
        return "it needs cuDNN 9"
    return _lacking_capability(q, 9)


def lacking_flex(q: Tensor) -> str:
    """Why FlexAttention does not support these queries."""
    if not q.is_cuda:
        return _ELSEWHERE
    if q.dtype == torch.float64:
        return "it does not compute in fp64"
    if q.shape[-1] not in (16, 32, 64, 128, 256):
        return f"heads must have 16, 32, 64, 128 or 256 features, not {q.shape[-1]}"
    return "" if find_spec("triton") else "it needs Triton"


_ELSEWHERE = "it runs on CUDA devices"


def _lacking_capability(q: Tensor, major: int) -> str:
    """'' also for a tensor on a CPU: Triton interprets kernels, and a shape runs none."""
    if not q.is_cuda:
        return ""
    found = torch.cuda.get_device_capability(q.device)
    return "" if found >= (major, 0) else f"it needs compute capability {major}.0"
