"""The operations of attention to chosen tokens (DeepSeek Sparse Attention), and their costs."""

from dataclasses import dataclass, replace

from fivefold.config.model import IndexerShape, ModelConfig
from fivefold.description.operations import CoreAttention, Kept, Operation
from fivefold.description.pieces import pieces, queries_at_once
from fivefold.description.running import Running, row_parts
from fivefold.description.weights import Weight, whole

AGAIN = ("a2a_overlap_attn",)
"""Recomputed modules that rerun an indexer."""


@dataclass(frozen=True, kw_only=True)
class Indexing(Operation):
    """The projections of an indexer, the norm of its keys, and their rotation; replicated over TP.

    It reads what others keep, and passes no gradient to it. Frozen, it has none either.

    Attributes:
        shape: its sizes.
    """

    shape: IndexerShape

    @property
    def features(self) -> int:
        """Features per token of its queries, its key and the weights of its heads."""
        return self.shape.size + self.shape.dim + self.shape.heads

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Keys before their norm, of this rank's tokens; and what attention is given, of all."""
        own = running.element_bytes * self.shape.dim / running.token_parts
        sizes = self.shape.size, self.shape.dim, self.shape.heads
        tensors = tuple(running.element_bytes * size for size in sizes)
        given = Kept(self.name, tensors, AGAIN, "core_attn")
        return (given,) if self.frozen else (Kept("indexer_key", (own,), AGAIN), given)

    def deferred(self, running: Running) -> float:
        """Gradients of its outputs."""
        return 0.0 if self.frozen else running.element_bytes * self.features / running.token_parts

    def tensor_features(self, *, sequence_parallel: bool) -> tuple[int, int]:
        """Gathered of all tokens, and their gradients scattered; else these are summed."""
        back = 0 if self.frozen else self.features
        return (self.features, back) if sequence_parallel else (0, 2 * back)


@dataclass(frozen=True, kw_only=True)
class SparseAttention(CoreAttention):
    """Attention to the best tokens by the scores of an indexer, some queries at a time."""

    def summed(self, running: Running) -> int:
        """Numbers of a microbatch that tensor-parallel ranks sum in a backward, to tell the loss of
        an indexer: for each query and key, what all heads together look at."""
        if not self.model.trains_indexer:
            return 0
        rows, length = running.microbatch_rows, running.seq_length
        parts = row_parts(running)
        chunk = length // (2 * parts)
        # Of the first of the ranks that split rows; the sum is that of all.
        spans = [(0, chunk), (length - chunk, length)] if parts > 1 else [(0, length)]
        each = pieces(rows, self._heads(running), spans, length)
        return rows * sum((stop - start) * stop for start, stop in each)

    def key_value_features(self, tp: int, *, gathered: bool = False) -> int:
        """Those of the latents that are gathered, and of the indexer's key."""
        sent = super().key_value_features(tp, gathered=gathered)
        return sent + self.model.indexer.dim * gathered

    def _heads(self, running: Running) -> int:
        """Heads of which scores are held at once."""
        heads = self.model.num_attention_heads // running.tensor_parallel
        return max(heads, self.model.indexer.heads)

    def working(self, running: Running) -> float:
        """Most bytes per token of its backward: what it reads, in fp32 at least, and their
        gradients, with one more of keys that is added; and scores of some queries at a time. Where
        ranks split rows, keys and values are made here of all tokens."""
        model, wide = self.model, max(running.element_bytes, 4)
        parts, narrow = row_parts(running), running.element_bytes / wide
        q, out, keys = model.q_size, model.attention_size, model.k_size + model.v_size
        copied, made = narrow < 1, narrow * (1 + (parts > 1))
        of_heads = copied * (q + 2 * out) + q + narrow * (q + out)
        of_heads += parts * ((copied + 1 + made) * keys + model.k_size)
        shape = model.indexer
        of_index = shape.size + parts * shape.dim + shape.heads
        heads = model.num_attention_heads / running.tensor_parallel
        length, rows, taught = running.seq_length, running.microbatch_rows, model.trains_indexer
        scored = shape.heads * (taught or length > shape.topk)
        compared = taught and not model.dsa_indexer_use_sparse_loss
        of_scores = (2 + compared) * heads + scored
        at_once = max(of_scores, taught * (heads + 3.25 * shape.heads)) + _FEW
        queries = parts * queries_at_once(rows, self._heads(running), length)
        return wide * (of_heads / running.tensor_parallel + of_index + at_once * queries)


def index_flops_per_key(model: ModelConfig) -> int:
    """FLOPs of an indexer's score: of its heads' products, and of their weighted sum."""
    return 2 * model.indexer.heads * (model.indexer.dim + 1)


_FEW = 10
"""Tensors of one number for each query and key at once: masks, scores, and what is made of them."""


def indexing(model: ModelConfig) -> Indexing:
    """The indexer of a layer, whose products keep the compute dtype where others have 8 bits."""
    shape, h, name = model.indexer, model.hidden_size, "self_attn.indexer"
    weights = (
        *whole(f"{name}.wq_b", model.q_lora_rank or h, shape.size, False),
        *whole(f"{name}.wk", h, shape.dim, False),
        *whole(f"{name}.weights_proj", h, shape.heads, False),
    )
    norm = (Weight(f"{name}.k_norm.{kind}", (shape.dim,)) for kind in ("weight", "bias"))
    wide = (replace(weight, wide=True, passes_on=False) for weight in weights)
    return Indexing("indexer", (*wide, *norm), AGAIN, shape=shape)
