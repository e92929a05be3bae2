"""The operations of attention with a softmax: projections or latents, norms of heads, scores."""

from dataclasses import dataclass

from fivefold.config.model import ModelConfig
from fivefold.description.core_attention import CoreAttention
from fivefold.description.latent import latent_projections
from fivefold.description.linear_attention import GatedHeads
from fivefold.description.operations import (
    QKV,
    ColumnLinear,
    Kept,
    Norm,
    Operation,
    RowLinear,
)
from fivefold.description.running import Running
from fivefold.description.sparse import SparseAttention, indexing
from fivefold.description.weights import Weight, column, row


@dataclass(frozen=True, kw_only=True)
class Clamp(Operation):
    """Bounds of queries, keys and values, as they are projected or normalised together.

    Attributes:
        queries: features of a token's queries, over all ranks.
        keys: features of a token's keys and values, over all ranks.
        heads: key/value heads of the model.
    """

    queries: int
    keys: int
    heads: int

    def kept_else(self, running: Running) -> tuple[Kept, ...]:
        """A byte for each number: whether it is within."""
        sizes = running.by_heads(self.queries), running.by_key_heads(self.keys, self.heads)
        within = tuple(size / running.element_bytes for size in sizes)
        return (Kept(self.name, within, ("a2a_overlap_attn",)),)


def softmax_attention(model: ModelConfig, before: tuple[str, ...]) -> tuple[Operation, ...]:
    """Attention with a softmax without the norms and the sum around it.

    `before`: recomputed modules that make its input again.
    """
    h, heads, latent = model.hidden_size, model.num_attention_heads, model.multi_latent_attention
    sinks: tuple[Weight, ...] = ()
    if model.softmax_type == "learnable":
        sinks = (Weight("self_attn.sinks.weight", (heads,), split=0),)
    core = SparseAttention if model.is_sparse else CoreAttention
    gate = GatedHeads("attn_gate", (), ("a2a_overlap_attn",), features=model.attention_size)
    return (
        *(latent_projections(model, before) if latent else _projections(model, before)),
        *((indexing(model),) if model.is_sparse else ()),
        core(
            "core_attn",
            sinks,
            ("core_attn", "a2a_overlap_attn"),
            model=model,
            from_latents=latent,
            sent_latent=model.kv_lora_rank + model.qk_pos_emb_head_dim if latent else 0,
        ),
        *((gate,) if model.attention_output_gate else ()),
        RowLinear(
            "attn_proj",
            row("self_attn.o_proj", model.attention_size, h, model.output_bias),
            inputs=model.attention_size,
            outputs=h,
            recomputed_by=("a2a_overlap_attn",),
        ),
    )


def _projections(model: ModelConfig, recomputed_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """The query, key and value projections; `recomputed_by`: modules whose recomputation
    recomputes their input."""
    h, bias = model.hidden_size, model.qkv_bias
    queries, keys = model.num_attention_heads, model.num_kv_heads
    weights = (
        *column("self_attn.q_proj", h, model.query_outputs, bias),
        *column("self_attn.k_proj", h, model.k_size, bias, keys),
        *(() if model.keys_as_values else column("self_attn.v_proj", h, model.v_size, bias, keys)),
    )
    outputs = model.query_outputs + model.k_size + model.value_outputs
    again = ("a2a_overlap_attn",)
    qkv = ColumnLinear(
        "qkv", weights, again, QKV, inputs=h, outputs=outputs, recomputed_by=recomputed_by
    )
    bounded = () if model.clip_qkv is None else (_clamp(model),)
    if not model.qk_layernorm:
        return qkv, *bounded
    names = [f"self_attn.{each}_norm.weight" for each in "qk"]
    scales = [Weight(name, (model.head_dim,), sees="heads") for name in names]
    if model.norms_together:
        sizes = zip(names, (model.q_size, model.k_size), (0, keys), strict=True)
        scales = [Weight(name, (size,), 0, heads) for name, size, heads in sizes]
    size, heads, together = model.q_size + model.k_size, (queries, keys), model.norms_together
    norm = Norm("qk_norm", tuple(scales), again, features=size, heads=heads, together=together)
    return (qkv, norm, *bounded) if together else (qkv, *bounded, norm)


def _clamp(model: ModelConfig) -> Clamp:
    return Clamp(
        "clip_qkv",
        (),
        ("a2a_overlap_attn",),
        queries=model.q_size,
        keys=model.k_size + model.v_size,
        heads=model.num_kv_heads,
    )
