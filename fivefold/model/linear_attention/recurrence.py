"""What rules of states have in common: chunks of documents, a walk through them, and a backward
that makes all again but what was read.

Shapes: T tokens, G groups of heads, r heads of each, F features of a group; N chunks of C tokens,
K and V features of both sides of a state.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.model import StateShape
from fivefold.description.linear_attention import CHUNK
from fivefold.model.linear_attention.chunks import DocumentChunks


class StateGroup(NamedTuple):
    """Sizes of a group of heads, for example a key head and the value heads that share it.

    Attributes:
        key: K.
        value: V.
        shared: r.
    """

    key: int
    value: int
    shared: int

    @classmethod
    def of(cls, sizes: StateShape) -> "StateGroup":
        """One group of a model's heads."""
        return cls(sizes.key, sizes.value, sizes.heads // sizes.groups)

    @property
    def mixed(self) -> int:
        """Features of a group that the convolution mixes."""
        return 2 * self.key + self.shared * self.value


class StateRule(NamedTuple):
    """How states learn, forget and answer.

    Attributes:
        chunks: makes what the walk needs to know of chunks, in at least fp32, of (mixed [B, L, G,
            F], rates [B, L, G, ...], parameters, sizes, documents), by operations that autograd
            knows.
        walk: makes of that, and of the number of documents in each step, what states answer
            [N, G, r, C, V]; they begin as zeros.
    """

    chunks: Callable[
        [Tensor, Tensor, Sequence[Tensor], StateGroup, DocumentChunks], tuple[Tensor, ...]
    ]
    walk: Callable[[Sequence[Tensor], Sequence[int]], Tensor]


def attend(
    rule: StateRule,
    mixed_BLGF: Tensor,
    rates_BLGR: Tensor,
    parameters: Sequence[Tensor],
    group: StateGroup,
    of: DocumentChunks,
) -> Tensor:
    """What states answer, [B, L, G, r V].

    Saves only its arguments; the backward runs the forward again, since the intermediate results
    are many times as large.

    Args:
        rule: the rule of the states.
        mixed_BLGF: what the convolution reads of each group.
        rates_BLGR: numbers of each of its heads, those of one kind after those of another.
        parameters: parameters of these heads.
        group: sizes of a group.
        of: documents of the B * L tokens.
    """
    out: Tensor = _Attend.apply(rule, group, of, mixed_BLGF, rates_BLGR, *parameters)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rule: StateRule,
        group: StateGroup,
        of: DocumentChunks,
        mixed: Tensor,
        rates: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(mixed, rates, *parameters)
        ctx.rest = rule, group, of
        chunks = rule.chunks(mixed, rates, parameters, group, of)
        made = _by_token(rule.walk(chunks, of.active), of)
        return made.to(mixed.dtype).view(*mixed.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Goes first through the walk, then through what comes before it, so that both are never in
        memory together."""
        (rule, group, of), saved = ctx.rest, ctx.saved_tensors  # once, as a checkpoint wants it
        mixed, rates, *parameters = saved
        chunks = rule.chunks(mixed, rates, parameters, group, of)
        grads = _walked_back(rule, chunks, grad, of)
        del chunks
        wanted = ctx.needs_input_grad[3:]
        inputs = [x.detach().requires_grad_(wants) for x, wants in zip(saved, wanted, strict=True)]
        mixed, rates, *parameters = inputs
        with torch.enable_grad():
            again = rule.chunks(mixed, rates, parameters, group, of)
        asked = [x for x in inputs if x.requires_grad]
        made = iter(torch.autograd.grad(again, asked, grads))
        return None, None, None, *(next(made) if wants else None for wants in wanted)


def _walked_back(
    rule: StateRule, chunks: Sequence[Tensor], grad: Tensor, of: DocumentChunks
) -> tuple[Tensor, ...]:
    """The gradients of the chunks, from the gradient of what the states answer [B, L, G, r V]."""
    leaves = [x.detach().requires_grad_() for x in chunks]
    with torch.enable_grad():
        out = _by_token(rule.walk(leaves, of.active), of)
    return torch.autograd.grad(out, leaves, grad.reshape(out.shape).to(out.dtype))


def convolved(x_TF: Tensor, taps_FK: Tensor, position_T: Tensor) -> Tensor:
    """The causal convolution of each feature with its taps, within documents."""
    reach = taps_FK.shape[1]
    y_TF = x_TF * taps_FK[:, -1]
    for back in range(1, min(reach, len(x_TF))):
        before_TF = F.pad(x_TF[:-back], (0, 0, back, 0)) * (position_T >= back)[:, None]
        y_TF = y_TF + before_TF * taps_FK[:, -1 - back]
    return y_TF


def faded(fade_NGrC: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token what is left of what each token of its chunk before it, or itself, has written
    [N, G, r, C, C], and of what the state was before the chunk [N, G, r, C].

    Sums of the logarithms of decays between two tokens, not differences of sums, which cancel each
    other.
    """
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=fade_NGrC.device).triu(1)
    since = fade_NGrC[..., None].masked_fill(~later.mT, 0.0).cumsum(-2)
    return since.masked_fill(later, -torch.inf).exp(), fade_NGrC.cumsum(-1).exp()


def by_chunk(x: Tensor, of: DocumentChunks, dim: int) -> Tensor:
    """[T, ...] -> [N, ...], with the C tokens of a chunk in dim `dim`."""
    return x.index_select(0, of.take.flatten()).unflatten(0, (-1, CHUNK)).movedim(1, dim)


def _by_token(out_NGrCV: Tensor, of: DocumentChunks) -> Tensor:
    """[N, G, r, C, V] -> [T, G, r, V]."""
    return out_NGrCV.movedim(3, 1).flatten(0, 1).index_select(0, of.put)
