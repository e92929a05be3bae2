"""Narrower layers for verification; sizes that parallelism divides stay divisible. No torch."""

from math import lcm
from typing import Any

from fivefold.config.config import Config
from fivefold.config.model import INITIAL, ModelConfig
from fivefold.counts.shards import num_expert_shards
from fivefold.layout import Layout

MOST_FEATURES = 512  # inner features of all experts of a layer, if their ranks allow it


def narrower(layout: Layout, config: Config) -> Config:
    """Few, small heads and a small vocabulary; sizes that tp divides stay divisible."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = _few_heads(model, tp * _exchanging(config))
    even = 2 if model.kv_channels_local is None else 8  # for partial RoPE
    head_dim = min(model.head_dim, max(4, even, 64 // heads // even * even))
    hidden = heads * head_dim
    if model.q_size != model.hidden_size:
        hidden += 8
    ffn = tp * max(1, min(model.ffn_size, 2 * hidden) // tp)
    multiple = lcm(tp, min(model.make_vocab_size_divisible_by, 64))
    padding = min(model.padded_vocab_size - model.vocab_size, 7)
    if model.num_experts is not None:
        config = config.with_values(**_fewer_experts(layout, config, hidden))
    if model.has_linear_layers:
        config = config.with_values(**_small_states(config))
    wider = (model.hidden_size / hidden) ** 0.5
    stds = {n: std * wider for n in INITIAL if (std := getattr(model, n)) is not None}
    return config.with_values(
        hidden_size=hidden,
        num_attention_heads=heads,
        **_small_heads(model, groups, head_dim),
        ffn_hidden_size=ffn,
        vocab_size=4 * multiple - padding,
        make_vocab_size_divisible_by=multiple,
        **stds,
    )


def _small_heads(model: ModelConfig, groups: list[int], head_dim: int) -> dict[str, Any]:
    """Sizes of heads and latents; features without positions remain if there were any."""
    if model.multi_latent_attention:
        most = {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 6,
            "dsa_indexer_n_heads": 4,
            "dsa_indexer_head_dim": 8,
            "dsa_indexer_topk": 8,
        }
        given = {name: getattr(model, name) for name in most}
        small = {n: None if size is None else min(size, most[n]) for n, size in given.items()}
        return {"num_query_groups": None, "kv_channels": None, **small}
    share = model.rotary_percent
    if share != 1.0:
        share = (max(2, int(head_dim * share) // 2 * 2) + 0.5) / head_dim
    sizes: dict[str, Any] = {"num_query_groups": groups[0], "kv_channels": head_dim}
    if model.v_channels is not None:
        sizes["v_channels"] = max(2, head_dim * model.v_channels // model.head_dim)
    if model.num_query_groups_local is not None:
        sizes["num_query_groups_local"] = groups[-1]
    if model.kv_channels_local is not None:
        wider = model.kv_channels_local > model.head_dim
        sizes["kv_channels_local"] = head_dim * 2 if wider else head_dim // 2
        share = share if share == 1.0 else 0.5  # both head sizes stay even
    return sizes | {"rotary_percent": share}


def _few_heads(model: ModelConfig, ranks: int) -> tuple[int, list[int]]:
    """Query heads that divide evenly over the ranks, and key/value heads: of layers without a
    window, and of those with one."""
    every, groups = model.num_attention_heads, list[int]()
    kinds = (False, True) if model.has_local_sizes else (False,)
    before = [model.attention_of(local).num_kv_heads for local in kinds]
    for kv_heads in before:
        held = kv_heads // ranks
        groups.append(ranks * min(held, 2) if kv_heads % ranks == 0 else kv_heads)
    least = max(few * min(every // kv, 2) for few, kv in zip(groups, before, strict=True))
    unit = lcm(ranks, *groups)
    return -(-least // unit) * unit, groups


def _fewer_experts(layout: Layout, config: Config, hidden: int) -> dict[str, Any]:
    """Few, narrow experts, in the same relation to ranks, groups and choices as before.

    Several experts stay on a rank and in a group, at most half of them are chosen, and what expert
    ranks, shards and expert tensor parallelism divide is divided as before.
    """
    model, parallel = config.model, config.parallel
    assert model.num_experts is not None
    ep, groups = parallel.expert_model_parallel_size, model.moe_router_num_groups or 1
    topk, chosen = min(model.moe_router_topk, 3), model.moe_router_group_topk or 1
    sharded = ep * num_expert_shards(layout)
    ranks = ep if model.num_experts % sharded else sharded
    unit = lcm(ranks, groups)
    scored = model.moe_router_group_scores or max(topk // chosen, 1)

    def relates(experts: int) -> bool:
        """Whether this number has the same relation to ranks, groups and choices."""
        enough = topk <= chosen * experts // groups and scored <= experts // groups
        of_each = (experts // part > 1 or experts == model.num_experts for part in (ranks, groups))
        return enough and all(of_each) and 2 * topk <= experts

    few = next(filter(relates, range(unit, model.num_experts, unit)), model.num_experts)
    etp, shared = parallel.expert_tensor_parallel_size, model.shared_ffn_size
    tp = parallel.tensor_model_parallel_size
    inner = min(model.expert_ffn_size, hidden, max(1, MOST_FEATURES // few))
    return {
        "num_experts": few,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": etp * max(1, inner // etp),
        "moe_shared_expert_intermediate_size": tp * max(1, min(shared, hidden) // tp)
        if shared
        else model.moe_shared_expert_intermediate_size,
    }


def _exchanging(config: Config) -> int:
    """Ranks that exchange heads for tokens; their least common multiple if layers differ."""
    parallel = config.parallel
    sizes = {"a2a": parallel.context_parallel_size}
    if parallel.hierarchical_context_parallel_sizes:
        sizes["a2a+p2p"] = parallel.hierarchical_context_parallel_sizes[0]
    return lcm(*(sizes.get(kind, 1) for kind in parallel.cp_comm_type))


def _small_states(config: Config) -> dict[str, Any]:
    """Few and small heads with states; ranks hold as many groups as before, or two."""
    parallel, sizes = config.parallel, config.model.states
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    groups = ranks * min(sizes.groups // ranks, 2)
    names = (
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    )
    if config.model.hybrid_override_pattern is not None:
        names = "mamba_num_groups", "mamba_num_heads", "mamba_state_dim", "mamba_head_dim"
    heads = groups * min(sizes.heads // sizes.groups, 2)
    return dict(zip(names, (groups, heads, min(sizes.key, 16), min(sizes.value, 8)), strict=True))
