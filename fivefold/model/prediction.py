"""Multi-token prediction: modules that each predict one token further ahead, in sequence.

As DeepSeek-V3 (2024, section 2.2) trains it, in Megatron-LM's form. Depth d >= 1 takes the state of
depth d - 1 at token t (depth 0 is the output of the model's final norm) and the embedding of token
t + d, and predicts token t + d + 1 with the model's own output layer. That embedding is the
token's alone: a learned position and the norm of embeddings (`embed_layernorm`) are for the input
of the first layer. Shapes: D depths, B rows, S tokens of a row, T = B * S, H features.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fivefold.config.data import IGNORED
from fivefold.config.model import ModelConfig
from fivefold.model.batch import Batch
from fivefold.model.context import Context
from fivefold.model.layers import Column, Linear, plain_column
from fivefold.model.norms import make_norm


class MTPLayers(nn.ModuleList):
    """The layers of one prediction depth of a hybrid model; each has one mixer."""

    def forward(self, x_TH: Tensor, context: Context) -> Tensor:
        """[T, H] -> [T, H]."""
        for layer in self:
            x_TH = layer(x_TH, context)
        return x_TH


class MTPModule(nn.Module):
    """One depth: norms both inputs, projects them to one state, then a layer and a norm.

    One such module runs all depths in turn if they share weights (`mtp_use_repeated_layer`), so
    that whatever shards weights sees them once.

    Args:
        model: the architecture.
        layer: transformer layer of this depth, or layers.

    Attributes:
        column: seam around the projection.
        joined: seam that gathers the features which ranks split in the projection.
    """

    def __init__(self, model: ModelConfig, layer: nn.Module) -> None:
        super().__init__()
        self.hnorm, self.enorm = make_norm(model), make_norm(model)
        self.eh_proj = Linear(2 * model.hidden_size, model.hidden_size)
        self.layer = layer
        self.norm = make_norm(model)
        self.size = model.prediction_size
        self.column: Column = plain_column
        self.joined: Callable[[Tensor], Tensor] = lambda projected_TH: projected_TH

    def forward(
        self,
        x_TH: Tensor,
        *embedded: Tensor,
        context: Context,
        through: Callable[..., Tensor],
    ) -> tuple[Tensor, ...]:
        """The states [T, H] of its depths, from the previous state and each depth's embeddings.

        `through` runs each depth: the seam of the stage around its layers.
        """
        states = []
        for run, embedded_TH in enumerate(embedded):
            of_run = context.again(run, self.size) if run else context
            x_TH = through([partial(self.next, embedded_TH=embedded_TH)], x_TH, of_run)
            states.append(x_TH)
        return tuple(states)

    def next(self, x_TH: Tensor, context: Context, embedded_TH: Tensor) -> Tensor:
        """The state [T, H] of one depth.

        The embedding precedes the state in the projection, as in DeepSeek's published weights.
        """
        both_TH = torch.cat([self.enorm(embedded_TH), self.hnorm(x_TH)], dim=1)
        (projected_TH,) = self.column(both_TH, self.eh_proj)
        made_TH: Tensor = self.norm(self.layer(self.joined(projected_TH), context))
        return made_TH


def with_mtp_tokens(batch: Batch, depths: int) -> Batch:
    """A whole batch with the shifted tokens, labels and weights of multi-token prediction.

    Past the end of a document or row, a token gets an ignored label and an arbitrary token. That
    token changes nothing: with causal attention only states with ignored labels see it.

    Args:
        batch: whole rows, before any rank takes its part.
        depths: D; 0: no multi-token prediction.
    """
    if depths == 0:
        return batch
    documents = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    length = documents.shape[1]

    def moved(values_BS: Tensor, by: int, missing: int) -> Tensor:
        own_BS = documents[:, by:] == documents[:, : max(length - by, 0)]
        out = torch.full_like(values_BS, missing)
        kept = values_BS[:, by:].masked_fill(~own_BS, missing)
        out[:, : kept.shape[1]] = kept
        return out

    def of_all(values_BS: Tensor, missing: int) -> Tensor:
        return torch.stack([moved(values_BS, by, missing) for by in range(1, depths + 1)])

    weights = batch.loss_weights
    return replace(
        batch,
        mtp_tokens=of_all(batch.tokens, 0),
        mtp_labels=of_all(batch.labels, IGNORED),
        mtp_weights=None if weights is None else of_all(weights, 0),
    )


def targets(batch: Batch) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(labels [T], loss weights [T] or None) of each depth, that of the next token first."""
    weights = batch.loss_weights
    yield batch.labels.flatten(), None if weights is None else weights.flatten()
    if batch.mtp_labels is not None:
        for depth, labels_BS in enumerate(batch.mtp_labels):
            weights = batch.mtp_weights
            yield labels_BS.flatten(), None if weights is None else weights[depth].flatten()


def valid_by_depth(batch: Batch) -> list[int]:
    """Number of tokens with a loss, per depth."""
    return [int((labels_T != IGNORED).sum()) for labels_T, _ in targets(batch)]


def objective(losses: Tensor, scaling_factor: float) -> Tensor:
    """The scalar to differentiate: first loss + `scaling_factor` x mean of the further ones.

    Each loss is the sum over the valid tokens of its depth, divided by their number in the global
    batch, which no layout changes. Megatron-LM also divides by the valid tokens of each depth
    (fewer at greater depths), but per microbatch.

    Args:
        losses: [1 + D], that of the next token first; or a scalar without multi-token prediction.
        scaling_factor: Megatron-LM's mtp_loss_scaling_factor.
    """
    if losses.dim() == 0:
        return losses
    return losses[0] + scaling_factor * losses[1:].mean()
