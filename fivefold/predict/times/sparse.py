"""Predicts the times of attention to the tokens that an indexer chooses, on one rank.

Fivefold and Megatron-LM 0.16 compute the scores of all heads with all keys in fp32 and mask those
of keys that were not chosen: it costs no less than attention to all keys.
"""

from math import ceil

from fivefold.config.config import Config
from fivefold.description.pieces import queries_at_once
from fivefold.description.running import Running
from fivefold.description.sparse import Indexing, SparseAttention
from fivefold.hardware import Gpu
from fivefold.predict.cluster import Cluster
from fivefold.predict.times.communication import GroupSpan, all_reduce, gather
from fivefold.predict.times.compute import Phases, elementwise, matmul
from fivefold.predict.times.stage import Times

_WIDE, _NARROW = 4.0, 2.0  # bytes of a number in fp32, and in 16 bits
_CHOICE = 12
"""Numbers read and written for each score of an indexer when the best are found: the best, masks,
counts of equal ones."""


def indexing(
    op: Indexing, config: Config, cluster: Cluster, tp: GroupSpan, products: Phases
) -> Times:
    """An indexer's projections of a rank's tokens, which have no dX; what they make is gathered,
    and its gradients are summed. The norm and the rotation are next to nothing.

    Args:
        op: the operation.
        config: configuration with the degrees.
        cluster: the hardware.
        tp: tensor-parallel ranks.
        products: of all its weights.
    """
    times = Times(Phases(products.forward, 0.0, products.dw))
    if config.parallel.tensor_model_parallel_size == 1:
        return times
    size, back = config.rank_tokens * _NARROW * op.features, not op.frozen
    if config.parallel.token_parts == 1:
        return times + Times(tp=Phases(0.0, back * all_reduce(cluster, tp, size)))
    move = gather(cluster, tp, size)
    return times + Times(tp=Phases(move, back * move))


def chosen_tokens(op: SparseAttention, config: Config, cluster: Cluster, tp: GroupSpan) -> Times:
    """Attention without the rotation before it; tensor-parallel ranks sum what all heads look at.

    Arguments as of `indexing`.
    """
    moved = 0.0
    if config.parallel.tensor_model_parallel_size > 1 and config.model.trains_indexer:
        moved = all_reduce(cluster, tp, _WIDE * op.summed(Running.of(config)))
    return Times(_computed(config, cluster.gpu), tp=Phases(0.0, moved))


def _computed(config: Config, gpu: Gpu) -> Phases:
    """Seconds of scores, choice, softmax and values for one layer and microbatch.

    The backward makes all scores again; where the indexer is trained it compares its softmax with
    that of all heads, over all keys or the chosen ones.

    Args:
        config: configuration with the degrees.
        gpu: the GPU.
    """
    model, training = config.model, config.training
    shape, rows, length = model.indexer, training.micro_batch_size, training.seq_length
    heads = model.num_attention_heads // config.parallel.tensor_model_parallel_size
    own = length // config.parallel.context_parallel_size  # queries of a row that are here
    queries = min(queries_at_once(rows, max(heads, shape.heads), length), own)
    keys, count = ceil(length / 2), ceil(own / queries)  # of a mean query, and of pieces

    def product(of: int, features: int) -> float:
        """Of scores of so many heads, or with them."""
        return count * matmul(gpu, queries, keys, features, "fp32", rows * of, _WIDE)

    def passes(of: int, numbers: float) -> float:
        """Numbers read and written for each score of so many heads, each pass apart."""
        size = _WIDE * numbers * rows * own * keys * of
        return elementwise(gpu, size, count * ceil(numbers / 2))

    scores, values = product(heads, model.query_dim), product(heads, model.value_dim)
    indexed = product(shape.heads, shape.dim)
    choice = indexed + passes(shape.heads, 3) + passes(1, _CHOICE)
    forward = scores + values + passes(heads, 7) + choice
    backward = 3 * scores + 2 * values + passes(heads, 9) + choice
    if model.trains_indexer:
        backward += 2 * indexed + passes(shape.heads, 6) + passes(1, _CHOICE)
        backward += passes(heads, 1 if model.dsa_indexer_use_sparse_loss else 5)
    return Phases(forward, backward)
