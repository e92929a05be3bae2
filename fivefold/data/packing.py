"""Windows of a token stream become the arrays that a training step reads.

B samples of a microbatch, S tokens of a sample.
"""

from dataclasses import dataclass

import numpy as np

IGNORED = -100  # a label that counts for no loss, as in torch


@dataclass(frozen=True)
class Packing:
    """How a window of seq_length + 1 tokens becomes a sample; names and rules of Megatron-LM.

    Attributes:
        seq_length: tokens of a sample, S.
        eod_id: the token that ends a document.
        reset_position_ids: positions start at 0 again after each end of document.
        reset_attention_mask: each document of a sample gets its own index, to attend alone.
        eod_mask_loss: nothing is learnt from predicting what follows an end of document.
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
        tokens_BS: the input.
        labels_BS: the next token, or -100 where no loss is taken.
        positions_BS: position of each token, for the position embedding.
        documents_BS: index of its document in the row, non-decreasing from 0.
        token_ids_BS: global sample index * S + place in the sample: no two alike in a run.
        loss_weights_BS: float, what each token's loss weighs; None: all weigh one.
    """

    tokens_BS: np.ndarray
    labels_BS: np.ndarray
    positions_BS: np.ndarray
    documents_BS: np.ndarray
    token_ids_BS: np.ndarray
    loss_weights_BS: np.ndarray | None = None


def pack(windows: np.ndarray, indices: np.ndarray, packing: Packing) -> Microbatch:
    """Cut windows, int64 [B, S + 1], of the samples with these global indices, [B]."""
    tokens_BS, following_BS = windows[:, :-1], windows[:, 1:]
    ended_BS = tokens_BS == packing.eod_id
    begins_BS = np.zeros_like(ended_BS)
    begins_BS[:, 1:] = ended_BS[:, :-1]

    place_S = np.arange(packing.seq_length)
    positions_BS = np.broadcast_to(place_S, tokens_BS.shape)
    if packing.reset_position_ids:
        positions_BS = place_S - np.maximum.accumulate(np.where(begins_BS, place_S, 0), axis=1)
    documents_BS = np.zeros_like(tokens_BS)
    if packing.reset_attention_mask:
        documents_BS = np.cumsum(begins_BS, axis=1)
    labels_BS = following_BS
    if packing.eod_mask_loss:
        labels_BS = np.where(ended_BS, IGNORED, following_BS)
    return Microbatch(
        tokens_BS=tokens_BS.copy(),
        labels_BS=labels_BS.copy(),
        positions_BS=positions_BS.copy(),
        documents_BS=documents_BS,
        token_ids_BS=indices[:, None] * packing.seq_length + place_S,
    )
