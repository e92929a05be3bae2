"""Settings for other trainers: names that their own parsers have read, and what goes together."""

import json
import re
import shlex
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st

from benchmarks.check_exports import RECORD, cases, names
from benchmarks.export_cases import CHANGES, LAYOUTS, layouts
from benchmarks.export_combinations import combinations
from fivefold.check import check
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.tell.export.targets import export
from tests.predict.layouts import planned

KNOWN = json.loads(RECORD.read_text())


def text(layout: Layout, target: str) -> str:
    return export(layout, target).text


def missing(layout: Layout, target: str) -> str:
    return "\n".join(export(layout, target).missing)


def named(name: str) -> Layout:
    return next(layout for found, layout in layouts() if found == name)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Layout]:
    """The layouts whose exports the releases have read, by name."""
    return dict(cases())


@pytest.mark.slow
@pytest.mark.parametrize("target", KNOWN)
def test_settings_are_those_that_the_release_has_read(
    target: str, recorded: dict[str, Layout]
) -> None:
    """`python -m benchmarks.check_exports --record` reads and records them."""
    used = set().union(*(names(target, text(layout, target)) for layout in recorded.values()))
    assert used == set(KNOWN[target]["names"])


def flags(layout: Layout, target: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in shlex.split(text(layout, target).replace("\\\n", " ")):
        if word.startswith("--"):
            words = found[word[2:]] = []
        else:
            words.append(word)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_torchtitan_is_told_ranks_batch_and_stages(name: str) -> None:
    layout = named(name)
    said = flags(layout, "torchtitan")

    def number(key: str) -> int:
        return int(said[key][0])

    ranks = 1
    for axis in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel"):
        ranks *= number(f"parallelism.{axis}_degree")
    for axis in ("context_parallel", "pipeline_parallel"):
        ranks *= number(f"parallelism.{axis}_degree")
    assert ranks == layout.grid.world_size
    whole = number("training.global_batch_size")
    assert whole % (number("training.local_batch_size") * layout.grid.dp) == 0
    if layout.grid.pp > 1:
        stages = said["parallelism.module_fqns_per_model_part"]
        held = [module for stage in stages for module in stage.split(",")]
        layers = [f"layers.{n}" for n in range(layout.config.model.num_layers)]
        assert held == ["tok_embeddings", *layers, "norm", "lm_head"]
        assert "training.disable_cuda_graphs" in said
    last = text(layout, "torchtitan").splitlines()[-1]
    assert last == f"activation-checkpoint:{layout.config.memory.recompute_granularity or 'none'}"


def test_torchtitan_models_are_named_by_their_dimensions() -> None:
    assert flags(named("dense"), "torchtitan")["config"] == ["llama3_70b"]
    other = named("biased")
    assert "module" not in flags(other, "torchtitan")
    assert "must name a model" in missing(other, "torchtitan")


@pytest.mark.parametrize(
    ("settings", "present", "absent"),
    [
        ({"overlap_grad_reduce": False}, [], ["overlap-param-gather", "overlap-grad-reduce"]),
        ({}, ["overlap-param-gather", "overlap-grad-reduce"], ["ckpt-format"]),
        ({"zero": "optim_grads_params"}, ["use-megatron-fsdp", "ckpt-format"], []),
        ({"optimizer_cpu_offload": True}, ["use-precision-aware-optimizer"], []),
        ({"seq": 1 << 18}, [], []),
    ],
)
def test_megatron_gets_what_it_wants_together(
    settings: dict[str, Any], present: list[str], absent: list[str]
) -> None:
    layout = planned("llama3-8b", 8, **settings)
    said = flags(layout, "megatron")
    assert set(present) <= set(said) and not set(absent) & set(said)
    assert int(said["max-position-embeddings"][0]) >= int(said["seq-length"][0])


def test_what_a_trainer_cannot_do_is_said() -> None:
    experts = named("experts")
    assert flags(experts, "megatron")["recompute-modules"] == ["mla_up_proj", "moe"]
    assert flags(experts, "megatron")["fp8-recipe"] == ["tensorwise"]
    told = missing(experts, "megatron")
    assert "routed_experts became moe" in told and "no rowwise recipe" in told
    assert "has no dualpipe_v schedule" in missing(named("in a V"), "megatron")
    assert "8 or 4 bits" in missing(experts, "torchtitan")
    assert "MiCS" in missing(named("sharded"), "deepspeed")
    part = planned("llama3-8b", 8, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert "not a part" in missing(part, "deepspeed")
    zero = json.loads(text(part, "deepspeed"))["zero_optimization"]
    assert "ratio" not in zero["offload_optimizer"]


@pytest.mark.parametrize("loss", ["aux_loss", "none"])
@pytest.mark.parametrize("z_loss", [0.001, None])
@pytest.mark.parametrize("sizes", [{}, {"cp": 2}, {"tp": 2, "cp": 2, "sp": True}])
def test_megatron_weakens_auxiliary_losses_where_ranks_share_a_microbatch(
    loss: str, z_loss: float | None, sizes: dict[str, Any]
) -> None:
    losses = {"moe_router_load_balancing_type": (loss,), "moe_z_loss_coeff": z_loss}
    losses |= {"moe_aux_loss_coeff": (0.01 * (loss != "none"),)}
    layout = planned("mixtral-8x7b", 8, **losses, **sizes)
    told, ranks = missing(layout, "megatron"), layout.grid.tp * layout.grid.cp
    names = {"moe_aux_loss_coeff": loss != "none", "moe_z_loss_coeff": z_loss is not None}
    for name, is_given in names.items():
        assert (name in told) == (is_given and ranks > 1), told
    assert (f"1/{ranks} has an effect" in told) == (any(names.values()) and ranks > 1)


@pytest.mark.parametrize(
    ("preset", "settings", "flag", "words"),
    [
        (
            "mixtral-8x7b",
            {
                "ep": 2,
                "moe_token_dispatcher_type": "flex",
                "moe_shared_expert_intermediate_size": 64,
                "moe_shared_expert_overlap": True,
            },
            "moe-shared-expert-overlap",
            "it needs moe_token_dispatcher_type alltoall",
        ),
        (
            "mixtral-8x7b",
            {
                "ep": 2,
                "moe_shared_expert_intermediate_size": 64,
                "moe_shared_expert_overlap": True,
                "overlap_moe_expert_parallel_comm": True,
            },
            "moe-shared-expert-overlap",
            "hides the same messages",
        ),
        (
            "llama2-7b",
            {"multi_latent_attention": True, "num_query_groups": None},
            None,
            "rope_fusion was left out: with latent attention it needs rope_type yarn",
        ),
        (
            "llama3-8b",
            {
                "fp8_format": "hybrid",
                "recompute_granularity": "selective",
                "recompute_modules": ("layernorm",),
            },
            None,
            "it refuses recompute_modules layernorm with fp8_recipe delayed",
        ),
        (
            "mixtral-8x7b",
            {
                "moe_router_load_balancing_type": ("sinkhorn",),
                "moe_expert_capacity_factor": 1.5,
            },
            None,
            "it refuses moe_expert_capacity_factor",
        ),
        ("gpt-oss-20b", {"cp": 2}, None, "refuses windows (window_size) with cp_comm_type p2p"),
        (
            "deepseek-v2-lite",
            {"cp": 2, "cp_comm_type": ("a2a",)},
            None,
            "refuses multi_latent_attention with cp_comm_type a2a",
        ),
        (
            "llama3-8b",
            {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)},
            None,
            "NVTE_CPU_OFFLOAD_V1=1",
        ),
        (
            "nemotron-h-8b",
            {
                "fine_grained_activation_offloading": True,
                "offload_modules": ("mlp_norm", "qkv_linear"),
            },
            None,
            "its offload_modules qkv_linear move nothing of layers with a state",
        ),
        ("mixtral-8x7b", {"moe_router_topk": 1}, None, "it refuses moe_router_topk = 1"),
    ],
)
def test_megatron_gets_no_flag_that_it_refuses_beside_others_unless_it_is_said(
    preset: str, settings: dict[str, Any], flag: str | None, words: str
) -> None:
    """`python -m benchmarks.check_exports --random 1000` asks Megatron-LM itself."""
    layout = planned(preset, 8, **settings)
    assert words in missing(layout, "megatron") and flag not in flags(layout, "megatron")
    assert words not in missing(planned(preset, 8), "megatron")


def test_megatron_is_told_gelu_by_its_fusion() -> None:
    assert "activation_func" not in missing(planned("gpt2", 8, seq=1024), "megatron")
    for other in ("quick_gelu", "xielu"):
        layout = planned("gpt2", 8, seq=1024, activation_func=other)
        assert f"activation_func = {other}" in missing(layout, "megatron")


def test_megatron_gets_a_coefficient_for_each_balancing_loss() -> None:
    losses = ("aux_loss", "seq_aux_loss")
    for factors, wanted in (((0.01,), ["0.01", "0.01"]), ((0.01, 0.02), ["0.01", "0.02"])):
        balance = {"moe_router_load_balancing_type": losses, "moe_aux_loss_coeff": factors}
        said = flags(planned("mixtral-8x7b", 8, **balance), "megatron")
        assert said["moe-aux-loss-coeff"] == wanted


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_deepspeed_has_a_setting_by_its_name_or_is_said_once_to_lack_it(
    strategy: str, recorded: dict[str, Layout]
) -> None:
    for name in CHANGES:
        layout = recorded[name]
        config = layout.config.with_values(data_parallel_sharding_strategy=strategy)
        with suppress(ConfigError):
            layout = check(config, layout.grid.world_size, planned=True)
        exported = export(layout, "deepspeed")
        keys = {key.split(".")[-1] for key in names("deepspeed", exported.text)}
        said = re.findall(rf"\b{name} = ", "\n".join(exported.missing))
        assert len(said) + (name in keys) < 2, name


@given(seed=st.integers(0, 1 << 20))
@checked(max_examples=10)
def test_any_combination_has_names_that_the_release_has_read_and_our_words(
    seed: int,
) -> None:
    for _, layout in combinations(1, seed):
        for target, known in KNOWN.items():
            exported = export(layout, target)
            assert names(target, exported.text) <= set(known["names"])
            assert not re.search(r" (None|True|False)\b", "\n".join(exported.missing))


def test_deepspeed_batches_add_up_over_its_data_parallel_ranks() -> None:
    for _, layout in layouts():
        said = json.loads(text(layout, "deepspeed"))
        each = said["train_micro_batch_size_per_gpu"] * said["gradient_accumulation_steps"]
        assert said["train_batch_size"] == each * layout.grid.dp
        assert said.get("sequence_parallel_size", 1) == layout.grid.cp
