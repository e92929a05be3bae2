"""The operations of attention with a softmax: projections or latents, norms of heads, scores."""

from fivefold.config.model import ModelConfig
from fivefold.description.latent import latent_projections
from fivefold.description.linear_attention import GatedHeads
from fivefold.description.operations import (
    QKV,
    ColumnLinear,
    CoreAttention,
    Norm,
    Operation,
    RowLinear,
)
from fivefold.description.sparse import SparseAttention, indexing
from fivefold.description.weights import Weight, column, row


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
            row("self_attn.o_proj", model.attention_size, h, model.add_bias_linear),
            inputs=model.attention_size,
            outputs=h,
            remade_by=("a2a_overlap_attn",),
        ),
    )


def _projections(model: ModelConfig, remade_by: tuple[str, ...]) -> tuple[Operation, ...]:
    """The query, key and value projections; `remade_by`: recomputed modules that recompute their
    input."""
    h, bias = model.hidden_size, model.qkv_bias
    queries, keys = model.num_attention_heads, model.num_kv_heads
    weights = (
        *column("self_attn.q_proj", h, model.query_outputs, bias),
        *column("self_attn.k_proj", h, model.k_size, bias, keys),
        *(() if model.keys_as_values else column("self_attn.v_proj", h, model.v_size, bias, keys)),
    )
    outputs = model.query_outputs + model.k_size + model.value_outputs
    again = ("a2a_overlap_attn",)
    qkv = ColumnLinear("qkv", weights, again, QKV, inputs=h, outputs=outputs, remade_by=remade_by)
    if not model.qk_layernorm:
        return (qkv,)
    names = [f"self_attn.{each}_norm.weight" for each in "qk"]
    scales = [Weight(name, (model.head_dim,), sees="heads") for name in names]
    if model.norms_together:
        sizes = zip(names, (model.q_size, model.k_size), (0, keys), strict=True)
        scales = [Weight(name, (size,), 0, heads) for name, size, heads in sizes]
    size, heads, together = model.q_size + model.k_size, (queries, keys), model.norms_together
    return qkv, Norm("qk_norm", tuple(scales), again, features=size, heads=heads, together=together)
