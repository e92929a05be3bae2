"""Layers of one mixer each, Mamba-2 among them, against transformers' Nemotron-H."""

import pytest
import torch
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h import modeling_nemotron_h as theirs

from fivefold.config.model import ModelConfig
from fivefold.description.shape import parameter_shapes
from fivefold.model.transformer import Stage
from tests.model.models import batch_of
from tests.model.wide import Wide

GROUPS, HEADS, STATE, SIZE, HIDDEN = 2, 6, 10, 8, 32
INNER = HEADS * SIZE


def _pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Stage, nn.Module]:
    """A model of ours, and one of transformers' with the same weights, both in fp64 throughout."""
    pattern = "M-EM*-M"
    config = NemotronHConfig(
        **{"vocab_size": 96, "hidden_size": HIDDEN, "hybrid_override_pattern": pattern},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
        **{"intermediate_size": 40, "ssm_state_size": STATE, "mamba_num_heads": HEADS},
        **{"mamba_head_dim": SIZE, "n_groups": GROUPS, "time_step_min": 1e-9, "chunk_size": 16},
        **{"n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
        **{"moe_shared_expert_intermediate_size": 20, "routed_scaling_factor": 2.5},
        **{"attn_implementation": "eager", "experts_implementation": "eager"},
    )
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(theirs, "torch", Wide())
    model = ModelConfig(
        **{"num_layers": 7, "hidden_size": HIDDEN, "num_attention_heads": 4},
        **{"num_query_groups": 2, "kv_channels": 12, "ffn_hidden_size": 40, "vocab_size": 96},
        **{"make_vocab_size_divisible_by": 1, "position_embedding_type": "none"},
        **{"activation_func": "squared_relu", "gated_linear_unit": False},
        **{"hybrid_override_pattern": pattern, "mamba_state_dim": STATE, "mamba_head_dim": SIZE},
        **{"mamba_num_groups": GROUPS, "mamba_num_heads": HEADS, "num_experts": 4},
        **{"moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_score_function": "sigmoid"},
        **{"moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5},
        moe_shared_expert_intermediate_size=20,
    )
    stage, other = Stage(model).double(), NemotronHForCausalLM(config).double()
    torch.manual_seed(3)
    held = dict(other.named_parameters())
    with torch.no_grad():
        for parameter in held.values():
            nn.init.normal_(parameter, std=0.3)
        for name, parameter in stage.named_parameters():
            parameter.copy_(_ordered(name, held))
    return stage, other


def _ordered(name: str, held: dict[str, Tensor]) -> Tensor:
    """What a parameter of ours is among theirs, group by group where they have part by part."""
    where, _, part = name.partition(".self_attn.")
    if not where.startswith("layers."):
        return held[_their_name(name)]
    mixer = f"model.{where}.mixer"
    if f"{mixer}.A_log" not in held or part in ("A_log", "dt_bias", "D", "out_proj.weight"):
        return held[_their_name(name)]
    if part == "norm.weight":
        return held[f"{mixer}.norm.weight"]
    sizes = [INNER, GROUPS * STATE, GROUPS * STATE]
    if part.startswith("conv1d."):
        return _by_group(held[f"{mixer}.{part}"].split(sizes))
    z, *parts, dt = held[f"{mixer}.in_proj.weight"].split([INNER, *sizes, HEADS])
    return dt if "dt" in part else _by_group([*parts, z])


def _by_group(parts: "list[Tensor] | tuple[Tensor, ...]") -> Tensor:
    return torch.cat([part.unflatten(0, (GROUPS, -1)) for part in parts], 1).flatten(0, 1)


def _their_name(name: str) -> str:
    if not name.startswith("layers."):
        ends = {"embed_tokens.weight": "embeddings.weight", "norm.weight": "norm_f.weight"}
        return name if name.startswith("lm_head") else f"model.{ends[name]}"
    for ours, mine in (
        (".input_layernorm.", ".norm."),
        (".post_attention_layernorm.", ".norm."),
        (".self_attn.", ".mixer."),
        (".mlp.router.", ".mixer.gate."),
        (".mlp.experts.up_proj.weight", ".mixer.experts.up_proj"),
        (".mlp.experts.down_proj.weight", ".mixer.experts.down_proj"),
        (".mlp.", ".mixer."),
    ):
        name = name.replace(ours, mine)
    return f"model.{name}"


def test_logits_and_gradients_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, other = _pair(monkeypatch)
    batch = batch_of(stage.model, [[150], [150]])
    logits, expected = stage.logits(batch), other(batch.tokens).logits.flatten(0, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7)).double()
    for x in (logits, expected):
        (x * weights).sum().backward()
    held = {name: x.grad for name, x in other.named_parameters() if x.grad is not None}
    assert {name for name, _ in stage.named_parameters()} == {*parameter_shapes(stage.model)}
    for name, parameter in stage.named_parameters():
        grad = _ordered(name, held)
        scale = grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, grad, rtol=0.0, atol=1e-11 * scale)
