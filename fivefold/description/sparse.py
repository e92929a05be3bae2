"""The operations of attention to chosen tokens (DeepSeek Sparse Attention), and their costs."""

from dataclasses import dataclass, replace

from fivefold.config.model import IndexerShape, ModelConfig
from fivefold.description.core_attention import CoreAttention
from fivefold.description.operations import Kept, Operation
from fivefold.description.pieces import of_all, of_chosen, pieces, queries_at_once
from fivefold.description.running import Running, row_parts
from fivefold.description.weights import Weight, whole

RERUN_BY = ("a2a_overlap_attn",)
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
        given = Kept(self.name, tensors, RERUN_BY, "core_attn")
        return (given,) if self.frozen else (Kept("indexer_key", (own,), RERUN_BY), given)

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

    def summed(self, running: Running, rank: int | None = None) -> int:
        """Numbers of a microbatch that tensor-parallel ranks sum in a backward, to tell the loss of
        an indexer: for each query and key that it is of, what all heads together look at.

        Args:
            running: how the layer runs.
            rank: which of the ranks that split rows; None: the one with most.
        """
        if not self.model.trains_indexer:
            return 0
        length, parts = running.seq_length, row_parts(running)
        spans, chunk = [(0, length)], length // (2 * parts)
        if parts > 1:
            starts = chunk * (parts - 1 if rank is None else rank)
            spans = [(starts, starts + chunk), (length - chunk - starts, length - starts)]
        most = self.model.indexer.topk if running.reads_chosen else length
        each = pieces(running.microbatch_rows, self.numbers(running), spans)
        return running.microbatch_rows * sum((b - a) * min(b, most) for a, b in each)

    def numbers(self, running: Running) -> int:
        """Numbers per query that are held at once."""
        shape, length = self.model.indexer, running.seq_length
        heads = self.model.num_attention_heads // running.tensor_parallel
        if running.reads_chosen:
            return of_chosen(heads, self.sent_latent, shape.heads, shape.topk, length)
        return of_all(heads, shape.heads, length)

    def at_once(self, running: Running) -> int:
        """Number of queries of each row that are processed at once."""
        parts = row_parts(running)
        longest = running.seq_length // (2 * parts if parts > 1 else 1)
        return min(queries_at_once(running.microbatch_rows, self.numbers(running)), longest)

    def key_value_features(self, tp: int, *, gathered: bool = False) -> int:
        """Those of the latents that are gathered, and of the indexer's key."""
        sent = super().key_value_features(tp, gathered=gathered)
        return sent + self.model.indexer.dim * gathered

    def working(self, running: Running) -> float:
        """Most bytes per token of its backward, which takes some queries at a time."""
        if running.reads_chosen:
            return self._working_of_chosen(running)
        return self._working_of_all(running)

    def _working_of_all(self, running: Running) -> float:
        """What it reads, in fp32 at least, and their gradients, with one more of keys that is
        added; and scores. Where ranks split rows, keys and values are made here of all tokens."""
        model, wide = self.model, max(running.element_bytes, 4)
        parts, narrow = row_parts(running), running.element_bytes / wide
        q, out, keys = model.q_size, model.attention_size, model.k_size + model.v_size
        copied, made = narrow < 1, narrow * (1 + (parts > 1))
        of_heads = copied * (q + 2 * out) + q + narrow * (q + out)
        of_heads += parts * ((copied + 1 + made) * keys + model.k_size)
        shape = model.indexer
        of_index = shape.size + parts * shape.dim + shape.heads
        heads = model.num_attention_heads / running.tensor_parallel
        taught = model.trains_indexer
        scored = shape.heads * (taught or running.seq_length > shape.topk)
        compared = taught and not model.dsa_indexer_use_sparse_loss
        of_scores = (2 + compared) * heads + scored
        at_once = max(of_scores, taught * (heads + 3.25 * shape.heads)) + _FEW
        queries = parts * self.at_once(running)
        return wide * (of_heads / running.tensor_parallel + of_index + at_once * queries)

    def _working_of_chosen(self, running: Running) -> float:
        """Gradients of its result and of queries; latents and indexer's keys of all tokens, and
        their gradients; the up-projection in fp32 at least, with its gradient, and one more that is
        added or narrowed; of the queries that are taken at once, scores of the indexer, and the
        latents that they chose with all that is made of them."""
        model, element, parts = self.model, running.element_bytes, row_parts(running)
        shape, wide = model.indexer, max(element, 4)
        heads, features = model.num_attention_heads / running.tensor_parallel, self.sent_latent
        of_heads = element * (model.q_size + model.attention_size) / running.tensor_parallel
        of_all = parts * (wide + element) * (features + shape.dim)
        of_all += element * (shape.size + shape.heads)
        projected = heads * (model.qk_head_dim + model.v_head_dim) * model.kv_lora_rank
        chosen = shape.topk * (2 * heads + 2 * features) + 4 * heads * features
        chosen += model.trains_indexer * shape.topk * (3 * shape.heads + 2 * shape.dim)
        scored = running.seq_length * (shape.heads + _FEW)
        queries = running.microbatch_rows * self.at_once(running)
        at_once = running.by_microbatch(wide * (3 * projected + queries * (chosen + scored)))
        return of_heads + of_all + at_once


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
    return Indexing("indexer", (*wide, *norm), RERUN_BY, shape=shape)
