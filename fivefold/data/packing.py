"""Turns windows of a token stream into the arrays that a training step reads.

Shapes: B samples per microbatch, S tokens per sample.
"""

from dataclasses import dataclass

import numpy as np

from fivefold.config.data import IGNORED

# What is known of a token of a conversation, as bits of a number beside it.
LEARNT = 1  # it is the assistant's, so predicting it is learnt
BEGINS = 2  # a conversation begins with it


@dataclass(frozen=True)
class Packing:
    """Rules for turning a window of seq_length + 1 tokens into a sample, as in Megatron-LM.

    Attributes:
        seq_length: tokens per sample, S.
        eod_id: id of the token that ends a document.
        reset_position_ids: whether positions start at 0 again after each end of document.
        reset_attention_mask: whether tokens attend only within their own document.
        eod_mask_loss: whether the loss of predicting the token after an end of document is masked.
    """

    seq_length: int
    eod_id: int
    reset_position_ids: bool = True
    reset_attention_mask: bool = True
    eod_mask_loss: bool = True


@dataclass(frozen=True)
class Microbatch:
    """The samples of one microbatch; every array [B, S], int64 unless noted.

    Attributes:
        tokens_BS: input tokens.
        labels_BS: the next token of each token, or -100 where the loss is masked.
        positions_BS: position of each token, for the position embedding.
        documents_BS: index of each token's document in the row, non-decreasing from 0.
        token_ids_BS: global sample index * S + place in the sample: unique in a run.
        loss_weights_BS: float weight of each token's loss; None: all weights are 1.
    """

    tokens_BS: np.ndarray
    labels_BS: np.ndarray
    positions_BS: np.ndarray
    documents_BS: np.ndarray
    token_ids_BS: np.ndarray
    loss_weights_BS: np.ndarray | None = None


def pack(
    windows: np.ndarray, indices: np.ndarray, packing: Packing, marks: np.ndarray | None = None
) -> Microbatch:
    """Cut windows, int64 [B, S + 1], into the samples with these global indices, [B].

    With `marks`, [B, S + 1], they say where documents begin and what is learnt: a conversation may
    hold the token that ends a document after each of its answers.
    """
    tokens_BS, following_BS = windows[:, :-1], windows[:, 1:]
    begins_BS = np.zeros(tokens_BS.shape, dtype=bool)
    if marks is None:
        ended_BS = tokens_BS == packing.eod_id
        begins_BS[:, 1:] = ended_BS[:, :-1]
        unlearnt_BS = ended_BS & packing.eod_mask_loss
    else:
        begins_BS[:, 1:] = marks[:, 1:-1] & BEGINS
        unlearnt_BS = marks[:, 1:] & LEARNT == 0

    place_S = np.arange(packing.seq_length)
    positions_BS = np.broadcast_to(place_S, tokens_BS.shape)
    if packing.reset_position_ids:
        positions_BS = place_S - np.maximum.accumulate(np.where(begins_BS, place_S, 0), axis=1)
    documents_BS = np.zeros_like(tokens_BS)
    if packing.reset_attention_mask:
        documents_BS = np.cumsum(begins_BS, axis=1)
    return Microbatch(
        tokens_BS=tokens_BS.copy(),
        labels_BS=np.where(unlearnt_BS, IGNORED, following_BS),
        positions_BS=positions_BS.copy(),
        documents_BS=documents_BS,
        token_ids_BS=indices[:, None] * packing.seq_length + place_S,
    )
