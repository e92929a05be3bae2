"""Predicts the times of attention to the tokens that an indexer chooses, on one rank.

Fivefold and Megatron-LM 0.16 compute the scores of all heads with all keys in fp32 and mask those
of keys that were not chosen: it costs no less than attention to all keys. Where Fivefold reads the
latents of chosen tokens alone, the scores of the indexer are what costs most.
"""

from math import ceil

from fivefold.config.config import Config
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
_PLACES = 8
"""The same to write down where they are, of which each is 8 bytes."""


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
        products: seconds of the products with all its weights.
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
    moved, running = 0.0, Running.of(config)
    if config.parallel.tensor_model_parallel_size > 1 and config.model.trains_indexer:
        moved = all_reduce(cluster, tp, _WIDE * op.summed(running))
    work = _Work(config, cluster.gpu, op.at_once(running))
    computed = work.of_chosen() if running.reads_chosen else work.of_all()
    return Times(computed, tp=Phases(0.0, moved))


class _Work:
    """Seconds of scores, choice, softmax and values for one layer and microbatch.

    The backward makes all scores again; where the indexer is trained it compares its softmax with
    that of all heads, over all keys or the chosen ones.

    Args:
        config: configuration with the degrees.
        gpu: the GPU.
        queries: queries of each row that are taken at once.
    """

    def __init__(self, config: Config, gpu: Gpu, queries: int) -> None:
        training, parallel = config.training, config.parallel
        self.model, self.gpu, self.queries = config.model, gpu, queries
        self.rows, self.length = training.micro_batch_size, training.seq_length
        self.heads = self.model.num_attention_heads // parallel.tensor_model_parallel_size
        self.own = self.length // parallel.context_parallel_size  # queries of a row on this rank
        self.keys = ceil(self.length / 2)  # of an average query
        self.count = ceil(self.own / queries)

    def of_all(self) -> Phases:
        """With a mask over keys that were not chosen."""
        model, shape, heads = self.model, self.model.indexer, self.heads
        scores = self._product(heads, self.keys, model.query_dim)
        values = self._product(heads, self.keys, model.value_dim)
        indexed, choice = self._indexed(), self._choice()
        forward = scores + values + self._passes(heads, 7) + choice
        backward = 3 * scores + 2 * values + self._passes(heads, 9) + choice
        if model.trains_indexer:
            backward += 2 * indexed + self._passes(shape.heads, 6) + self._passes(1, _CHOICE)
            backward += self._passes(heads, 1 if model.dsa_indexer_use_sparse_loss else 5)
        return Phases(forward, backward)

    def of_chosen(self) -> Phases:
        """From the latents of chosen tokens: the heads of a query form a matrix, and queries and
        sums pass through the up-projection."""
        model, shape, heads = self.model, self.model.indexer, self.heads
        topk, latent = shape.topk, model.kv_lora_rank
        both = latent + model.qk_pos_emb_head_dim
        scores, sums = self._each(heads, topk, both), self._each(heads, topk, latent)
        up, down = (
            self._product(heads, latent, features)
            for features in (model.qk_head_dim, model.v_head_dim)
        )
        taken = self._of_chosen(both, 3)
        choice = self._choice() + self._passes(1, _PLACES)
        forward = scores + sums + up + down + taken + self._of_chosen(heads, 6) + choice
        backward = 3 * scores + 3 * sums + 3 * up + 2 * down + 3 * taken
        backward += self._of_chosen(heads, 8) + choice
        if model.trains_indexer:
            backward += 2 * self._each(shape.heads, topk, shape.dim) + self._of_chosen(1, _CHOICE)
            backward += self._of_chosen(shape.heads, 6) + self._of_chosen(shape.dim, 4)
        return Phases(forward, backward)

    def _choice(self) -> float:
        """The indexer's scores, and the choice of the best."""
        heads = self.model.indexer.heads
        return self._indexed() + self._passes(heads, 3) + self._passes(1, _CHOICE)

    def _indexed(self) -> float:
        shape = self.model.indexer
        return self._product(shape.heads, self.keys, shape.dim)

    def _product(self, heads: int, keys: int, features: int) -> float:
        """A product of all queries with these keys, for this many heads, or its backward."""
        matrix = self.queries, keys, features
        return self.count * matmul(self.gpu, *matrix, "fp32", self.rows * heads, _WIDE)

    def _each(self, heads: int, keys: int, features: int) -> float:
        """A product of each query's heads with its own keys."""
        matrix, batch = (heads, keys, features), self.rows * self.queries
        return self.count * matmul(self.gpu, *matrix, "fp32", batch, _WIDE)

    def _passes(self, heads: int, numbers: float) -> float:
        """Separate passes over the scores of this many heads, by numbers read and written per
        score."""
        return self._moved(numbers, self.keys * heads)

    def _of_chosen(self, features: int, numbers: float) -> float:
        """The same over the scores of chosen tokens."""
        return self._moved(numbers, self.model.indexer.topk * features)

    def _moved(self, numbers: float, of_query: int) -> float:
        size = _WIDE * numbers * self.rows * self.own * of_query
        return elementwise(self.gpu, size, self.count * ceil(numbers / 2))
