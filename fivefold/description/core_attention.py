"""The scores, softmax and weighted sum of attention, and what they cost."""

from dataclasses import dataclass, field

from fivefold.config.model import ModelConfig
from fivefold.description.operations import Kept, Operation
from fivefold.description.running import Running, row_parts

LOG_SUM_EXP = 4  # bytes per value, fp32; with fp64 as the compute dtype it takes 8


@dataclass(frozen=True, kw_only=True)
class CoreAttention(Operation):
    """Scores, softmax and the weighted sum of values, for heads that tensor-parallel ranks split.

    Attributes:
        model: gives the heads and their features.
        from_latents: whether queries, keys and values can be recomputed from latents.
        sent_latent: features of the latent that context-parallel ranks gather instead of keys and
            values; 0: they gather keys and values.
        shares_output: whether the output projection keeps the output, too, as its input.
    """

    model: ModelConfig = field(repr=False)
    from_latents: bool
    sent_latent: int
    shares_output: bool = True

    @property
    def flops_per_key(self) -> int:
        """FLOPs of one query token per key it attends to."""
        return 2 * (self.model.q_size + self.model.attention_size)

    def key_value_features(self, tp: int, *, gathered: bool = False) -> int:
        """Features per token of the keys and values that context-parallel ranks exchange.

        Args:
            tp: ranks that split the heads.
            gathered: whether they are all-gathered, rather than passed on in a ring or exchanged by
                all-to-all.
        """
        model = self.model
        whole = model.kv_heads_of(tp) * (model.query_dim + model.value_dim)
        return self.sent_latent if self.sent_latent and gathered else whole

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """Queries, keys and values or their latents, more heads of these for ranks that have fewer,
        and what a norm keeps of them beside; softmax statistics or unfused scores; output.

        The output is also the input of the output projection, or of its gate.
        """
        model = self.model
        latent = running.element_bytes * self.sent_latent
        attended = (
            running.by_heads(model.q_size),
            running.by_key_heads(model.k_size, model.num_kv_heads),
            running.by_key_heads(model.v_size, model.num_kv_heads),
        )
        if running.keeps_latents:
            attended = attended[0], latent, 0.0
        recomputed = ("a2a_overlap_attn", *(["mla_up_proj"] if self.from_latents else ()))
        again = ("core_attn", "a2a_overlap_attn")
        scores = Kept("attn_scores", (self._scores(running),), again, "core_attn")
        apart = self._keeps_output(running) or not running.fused_attention
        gated = model.attention_output_gate
        result = Kept(
            "attn_output",
            (0.0 if apart else running.by_heads(model.attention_size),),
            again,
            "core_attn",
            held_by="attn_gate" if gated else "attn_proj" if self.shares_output else "",
        )
        repeats = max(running.exchanging_ranks / model.kv_heads_of(running.tensor_parallel), 1) - 1
        repeated = Kept(
            "repeated_heads", tuple(repeats * each for each in attended[1:]), again, "core_attn"
        )
        twice = "".join(running.normed_twice[:1])
        normed = tuple(size for name, size in zip("qkv", attended, strict=True) if name in twice)
        beside = Kept("normed_heads", normed, again)
        return Kept("core_attn", attended, recomputed), repeated, beside, scores, result

    def working(self, running: Running) -> float:
        """Bytes per token of the gradients of its result and of queries, keys and values, and of
        copies with as many features as queries; and where keys and values, or latents of them, come
        from other ranks, of what is summed in fp32 at least."""
        model = self.model
        q, kv = model.q_size, model.k_size + model.v_size
        queries, keys = float(q), float(kv)
        if model.value_dim < model.query_dim and not running.others:
            queries += 2 * q  # the result and its gradient
            keys += 2 * model.k_size - model.v_size
        wide = max(running.element_bytes, 4) / running.element_bytes
        parts, exchanging = row_parts(running), running.exchanging_ranks
        if running.keeps_latents:  # half of the queries at a time, keys and values of all tokens
            queries, keys = queries / 2 + wide * q, parts * (keys + (1 + wide) * kv)
        elif parts > exchanging:  # half of the tokens at a time; a ring passes sums on
            longer = parts > 2 * exchanging
            passing = 1 + 3 * wide + 2 * longer
            queries, keys = queries / 2 + wide * q, keys * (1 + longer) / 2 + passing * kv
        queries += model.attention_size
        return running.by_heads(queries) + running.by_key_heads(keys, model.num_kv_heads)

    def _keeps_output(self, running: Running) -> bool:
        """Whether attention keeps its output in addition to its reader's copy: because ranks
        exchange it, or the output projection keeps 8 bits of it."""
        narrow = running.input_bytes < running.element_bytes
        return running.exchanging_ranks > 1 or (narrow and not self.model.attention_output_gate)

    def _scores(self, running: Running) -> float:
        model, element = self.model, running.element_bytes
        heads = model.num_attention_heads
        if running.fused_attention:
            output = element * model.attention_size if self._keeps_output(running) else 0.0
            return (max(LOG_SUM_EXP, element) * heads + output) / running.tensor_parallel
        per_score = element
        if model.attention_dropout:
            per_score += element + running.mask_bytes
        return per_score * heads * running.seq_length / running.tensor_parallel
