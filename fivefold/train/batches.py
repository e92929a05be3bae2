"""Converts the loader's microbatches to what the model takes."""

import torch

from fivefold.data.packing import Microbatch
from fivefold.model.batch import Batch
from fivefold.model.prediction import with_mtp_tokens


def as_batch(microbatch: Microbatch, step: int, depths: int = 0) -> Batch:
    """Convert a microbatch of the loader to the model's batch for optimizer step `step`.

    `depths`: how many tokens behind the next one are to be predicted as well.
    """
    weights = microbatch.loss_weights_BS
    batch = Batch(
        tokens=torch.from_numpy(microbatch.tokens_BS),
        labels=torch.from_numpy(microbatch.labels_BS),
        positions=torch.from_numpy(microbatch.positions_BS),
        documents=torch.from_numpy(microbatch.documents_BS),
        token_ids=torch.from_numpy(microbatch.token_ids_BS),
        loss_weights=None if weights is None else torch.from_numpy(weights),
        step=step,
    )
    return with_mtp_tokens(batch, depths)
