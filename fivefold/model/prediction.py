"""Multi-token prediction: modules that predict tokens behind the next one, one after the other.

As DeepSeek-V3 (2024, section 2.2) trains it, in the form that Megatron-LM gives it. Depth d, from 1
on, takes the state of depth d - 1 at token t (depth 0 is the model itself, behind its final norm)
and the embedding of token t + d, and predicts token t + d + 1 with the model's own output layer.
Shapes: D depths, B rows, S tokens of a row, T = B * S, H features.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.model.batch import Batch
from fivefold.model.context import Context
from fivefold.model.layers import Column, Linear, make_norm, plain_column
from fivefold.model.loss import IGNORED


class FurtherToken(nn.Module):
    """One depth: both inputs are normed and projected to one state; a layer and a norm follow.

    Args:
        model: the architecture.
        layer: transformer layer of this depth.

    Attributes:
        column: seam around the projection.
        joined: seam that makes whole rows of what the projection gives.
    """

    def __init__(self, model: ModelConfig, layer: nn.Module) -> None:
        super().__init__()
        self.hnorm, self.enorm = make_norm(model), make_norm(model)
        self.eh_proj = Linear(2 * model.hidden_size, model.hidden_size)
        self.layer = layer
        self.norm = make_norm(model)
        self.column: Column = plain_column
        self.joined: Callable[[Tensor], Tensor] = lambda projected_TH: projected_TH

    def forward(self, x_TH: Tensor, context: Context, embedded_TH: Tensor) -> Tensor:
        """The next depth's state [T, H], of the one before and embeddings of further tokens.

        The embedding stands before the state, as in the weights that DeepSeek published.
        """
        both_TH = torch.cat([self.enorm(embedded_TH), self.hnorm(x_TH)], dim=1)
        (projected_TH,) = self.column(both_TH, self.eh_proj)
        made_TH: Tensor = self.norm(self.layer(self.joined(projected_TH), context))
        return made_TH


def with_further(batch: Batch, depths: int) -> Batch:
    """A whole batch with what further predictions need: tokens, labels and weights moved up.

    What a token would get from beyond its document, or its row, is no label, and a token that then
    does not matter: causal attention lets only states see it that have no label either.

    Args:
        batch: rows that are whole, before any rank takes its part.
        depths: D, 0 for none.
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
        further_tokens=of_all(batch.tokens, 0),
        further_labels=of_all(batch.labels, IGNORED),
        further_weights=None if weights is None else of_all(weights, 0),
    )


def targets(batch: Batch) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Labels [T] of each depth, that of the next token first, and the weights of their losses."""
    weights = batch.loss_weights
    yield batch.labels.flatten(), None if weights is None else weights.flatten()
    if batch.further_labels is not None:
        for depth, labels_BS in enumerate(batch.further_labels):
            weights = batch.further_weights
            yield labels_BS.flatten(), None if weights is None else weights[depth].flatten()


def valid_by_depth(batch: Batch) -> list[int]:
    """How many tokens take a loss, of each depth."""
    return [int((labels_T != IGNORED).sum()) for labels_T, _ in targets(batch)]


def objective(losses: Tensor, scaling_factor: float) -> Tensor:
    """What is differentiated, a scalar: the loss, and `scaling_factor` of the mean of further ones.

    Each is the sum over the valid tokens of its depth divided by their number in the global batch,
    which no layout changes. Megatron-LM means the same: it divides by the valid tokens of the depth
    as well, which are fewer the further one looks, but by those of each microbatch.

    Args:
        losses: [1 + D], that of the next token first; or a scalar, if it is the only one.
        scaling_factor: Megatron-LM's mtp_loss_scaling_factor.
    """
    if losses.dim() == 0:
        return losses
    return losses[0] + scaling_factor * losses[1:].mean()
