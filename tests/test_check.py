"""Layouts at random: they pass and add up, or they are refused with splits that do pass."""

import re
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.config.config import SECTION_SETTINGS, SETTINGS, Config
from fivefold.config.divisors import divisors
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.config.rules.dependence import orphans
from fivefold.errors import ConfigError
from fivefold.pipeline.split.layout import NOT_AUTO
from fivefold.pipeline.validate import validate
from fivefold.predict.cluster import preset
from fivefold.search.request import Request
from fivefold.search.search import legal_space

SPLIT = re.compile(
    r"--tp (\d+) --pp (\d+) --dp-shard (\d+)(?: --dp-replicate (\d+))?(?: --gbs (\d+))?(.*)"
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    def small(*values: int) -> int:
        return draw(st.sampled_from(values))

    heads = small(1, 2, 3, 4, 6, 8)
    model = ModelConfig(
        num_layers=small(1, 2, 3, 4, 6, 8, 12),
        hidden_size=heads * 16,
        num_attention_heads=heads,
        num_query_groups=small(*divisors(heads)),
        ffn_hidden_size=small(96, 128, 192),
        vocab_size=500,
    )
    return Config(model).with_values(
        tensor_model_parallel_size=small(1, 1, 2, 3, 4),
        pipeline_model_parallel_size=small(1, 1, 2, 3, 4),
        data_parallel_shard_size=small(-1, -1, -1, 1, 2),
        num_distributed_optimizer_instances=small(1, 1, 1, 2),
        data_parallel_sharding_strategy=draw(st.sampled_from(("no_shard", "optim", "optim_grads"))),
        num_virtual_stages_per_pipeline_rank=draw(st.sampled_from((None, None, 1, 2))),
        account_for_embedding_in_pipeline_split=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        micro_batch_size=small(1, 2),
        global_batch_size=small(4, 8, 12, 16, 24),
        seq_length=small(12, 16),
    )


@pytest.mark.slow
@settings(max_examples=200)
@given(configs(), st.integers(1, 24))
def test_a_layout_adds_up_or_is_refused_with_splits_that_pass(config: Config, world: int) -> None:
    try:
        layout = check(config, world)
    except ConfigError as error:
        for mistake in error.mistakes:
            for choice in mistake.works:
                if match := SPLIT.fullmatch(choice):
                    check(_with_split(config, match), world)
        return
    grid, training = layout.grid, layout.config.training
    assert prod((grid.pp, grid.dp_replicate, grid.dp_shard, grid.cp, grid.tp)) == world
    batch = layout.num_microbatches * training.micro_batch_size * grid.dp
    assert batch == training.global_batch_size
    held = [layer for stage in layout.split.stages for layer in stage.layers]
    assert held == list(range(config.model.num_layers))
    assert set(layout.split.placement) == set(range(grid.pp))
    assert layout.config.parallel.data_parallel_shard_size == grid.dp_shard
    validate(layout.order().program())


def _with_split(config: Config, match: re.Match[str]) -> Config:
    tp, pp, shards, replicas = (int(match[i] or 1) for i in (1, 2, 3, 4))
    changed = config.with_values(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_shard_size=shards,
        num_distributed_optimizer_instances=replicas,
        global_batch_size=int(match[5] or config.training.global_batch_size),
    )
    off = {orphan.off: {orphan.name: orphan.default} for orphan in orphans(changed)}
    for flag in filter(None, re.split(r" (?=--)", match[6])):
        changed = changed.with_values(**off[flag])
    return changed


@given(configs(), st.integers(1, 24))
@settings(max_examples=60)
def test_each_suggested_flag_mends_its_mistake(config: Config, world: int) -> None:
    """A single flag removes the line that suggested it, whatever else is still wrong."""
    for mistake in _mistakes(config, world):
        for choice in mistake.works:
            if match := re.fullmatch(r"--(global-batch-size|seq-length) (\d+)", choice):
                mended = config.with_values(**{match[1].replace("-", "_"): int(match[2])})
                assert mistake.what not in [m.what for m in _mistakes(mended, world)]


def _mistakes(config: Config, world: int) -> tuple:
    try:
        check(config, world)
    except ConfigError as error:
        return error.mistakes
    return ()


@pytest.mark.parametrize("n", [1, 2, 12, 36, 97, 16384])
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_a_split_is_suggested_even_where_the_batch_has_to_follow() -> None:
    model = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=512)
    config = Config(model).with_values(tensor_model_parallel_size=2, global_batch_size=8)
    with pytest.raises(ConfigError, match="works: --tp 1 --pp 1 --dp-shard 3 --gbs 6") as caught:
        check(config, 3)
    assert "try:   --nproc 4" in str(caught.value)


def test_bf16_on_the_wire_is_refused_where_nothing_would_honour_it() -> None:
    model = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=512)
    config = Config(model).with_values(precision="bf16", optimizer_cpu_offload=True)
    for name, value in (("grad_reduce_in_bf16", True), ("ddp_bucket_size", 1000)):
        asked = config.with_values(**{name: value})
        with pytest.raises(ConfigError, match=f"{name} has no effect on no_shard of bf16 with opt"):
            check(asked, 2)
        check(asked.with_values(precision="fp32"), 2)
        check(asked.with_values(optimizer_cpu_offload=False), 2)
    config = config.with_values(grad_reduce_in_bf16=True)
    check(config.with_values(data_parallel_sharding_strategy="optim"), 2)


SPARSE = {
    "sequence_parallel": True,
    "tensor_model_parallel_size": 2,
    "global_batch_size": 64,
    "seq_length": 512,
}


def _refusal(preset: str, world: int = 16, **values: object) -> str:
    config = Config(PRESETS[preset]).with_values(**{**SPARSE, **values})
    with pytest.raises(ConfigError) as caught:
        check(config, world, planned=True)
    return str(caught.value)


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"])
def test_sparse_models_are_planned_and_trained(preset: str) -> None:
    config = Config(PRESETS[preset]).with_values(**SPARSE, expert_model_parallel_size=8)
    grid = check(config, 16, planned=True).grid
    assert (grid.dp, grid.ep, grid.edp) == (8, 8, 2)
    assert check(config, 16).grid == grid


def test_layers_of_further_prediction_are_in_the_stages() -> None:
    config = Config(PRESETS["deepseek-v3"]).with_values(
        **SPARSE,
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et*31|t*30mL",
    )
    assert [s.mtp for s in check(config, 16, planned=True).split.stages] == [0, 1]


@pytest.mark.parametrize(
    ("preset", "values", "parts"),
    [
        (
            "mixtral-8x7b",
            {"expert_model_parallel_size": 3},
            [
                "ep 3 x etp 1 does not divide",
                "3 does not divide num_experts 8",
                "works: --ep 2 | --ep 4",
            ],
        ),
        (
            "qwen3-30b-a3b",
            {"expert_model_parallel_size": 32},
            [
                "dp 8 x cp 1 x tp 2 = 16, and 16 / (32 x 1) = 0.5",
                "works: --ep 16 --etp 1 | --ep 8 --etp 1",
            ],
        ),
        (
            "mixtral-8x7b",
            {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 4},
            ["16 / (8 x 4) = 0.5", "works: --ep 4 --etp 4"],
        ),
        (
            "qwen3-30b-a3b",
            {"expert_tensor_parallel_size": 512, "moe_ffn_hidden_size": 768},
            ["512 does not divide an expert's 768 features", "works: --etp 256 | --etp 384"],
        ),
        (
            "mixtral-8x7b",
            {"sequence_parallel": False},
            ["experts with tp 2 need sequence_parallel", "works: --sequence-parallel"],
        ),
        (
            "llama3-8b",
            {"expert_model_parallel_size": 2},
            ["= 2 has no effect", "num_experts is none"],
        ),
        ("llama3-8b", {"moe_router_topk": 1}, ["works: --num-experts 8 | --moe-router-topk 2"]),
        ("llama3-8b", {"q_lora_rank": 8}, ["works: --multi-latent-attention | --q-lora-rank none"]),
        (
            "mixtral-8x7b",
            {"overlap_moe_expert_parallel_comm": True, "recompute_granularity": "full"},
            ["and ep is 1", "a forward of its own"],
        ),
        (
            "mixtral-8x7b",
            {
                "overlap_moe_expert_parallel_comm": True,
                "expert_model_parallel_size": 8,
                "moe_token_dispatcher_type": "allgather",
            },
            ["works: --moe-token-dispatcher-type alltoall"],
        ),
        (
            "deepseek-v3",
            {"moe_shared_expert_intermediate_size": 2047},
            ["2 does not divide moe_shared_expert_intermediate_size 2047"],
        ),
    ],
)
def test_experts_divide_over_ranks(preset: str, values: dict, parts: list[str]) -> None:
    message = _refusal(preset, **values)
    assert all(part in message for part in parts), message


OF_EXPERTS = {
    setting.name: setting
    for setting in SECTION_SETTINGS["parallel"]
    if re.search("expert|moe|delay_wgrad", setting.name) and setting.name != "moe_deepep_num_sms"
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_what_is_of_experts_is_taken_back_where_there_are_none(name: str) -> None:
    """Not changed further: every other flag that is suggested would be refused as well."""
    setting = OF_EXPERTS[name]
    value = {bool: True, int: 2, str: "flex"}[setting.kind]
    with pytest.raises(ConfigError) as refused:
        check(Config(PRESETS["debug-llama"]).with_values(**{name: value}), 2)
    assert [mistake.works for mistake in refused.value.mistakes] == [
        (setting.typed(setting.default),)
    ]


def test_inner_features_of_dense_layers_matter_only_where_there_are_some() -> None:
    config = Config(PRESETS["qwen3-30b-a3b"]).with_values(**SPARSE, ffn_hidden_size=6145)
    check(config, 16, planned=True)
    assert "ffn_hidden_size 6145" in _refusal("deepseek-v3", ffn_hidden_size=6145)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"seq_length": 510}, ["510 / (2 x 4) = 63.75", "--seq-length 504 | --seq-length 512"]),
        ({"cp_comm_type": ("p2p", "a2a")}, ["2 given, 32 layers"]),
        (
            {"cp_comm_type": ("a2a+p2p",)},
            ["with the product cp 4\n  none", "--hierarchical-context-parallel-sizes 2 2"],
        ),
        (
            {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 4)},
            ["2 x 4 = 8"],
        ),
        ({"hierarchical_context_parallel_sizes": (2, 2)}, ["are for cp_comm_type a2a+p2p"]),
        (
            {"cp_comm_type": ("a2a",), "num_attention_heads": 12, "num_query_groups": 12},
            ["4 ranks cannot exchange tokens for 6 query heads", "12 heads / tp 2 = 6"],
        ),
        (
            {"cp_comm_type": ("a2a",), "num_attention_heads": 24, "num_query_groups": 6},
            ["4 ranks cannot exchange tokens for 3 key/value heads"],
        ),
        (
            {
                "cp_comm_type": ("a2a+p2p",),
                "hierarchical_context_parallel_sizes": (4, 1),
                "num_attention_heads": 12,
                "num_query_groups": 12,
            },
            ["4 ranks cannot exchange tokens for 6 query heads"],
        ),
    ],
)
def test_sequences_and_heads_divide_over_context_ranks(values: dict, parts: list[str]) -> None:
    sizes = {"kv_channels": 128, "context_parallel_size": 4}
    message = _refusal("llama3-8b", **sizes, **values)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "values",
    [
        {"cp_comm_type": ("a2a",)},
        {"cp_comm_type": ("a2a",), "tensor_model_parallel_size": 8, "context_parallel_size": 2},
        {"cp_comm_type": ("p2p", "a2a") * 16},
        {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)},
    ],
)
def test_context_parallelism_that_divides_is_planned_with(values: dict) -> None:
    values = {**SPARSE, "context_parallel_size": 4, **values}
    config = Config(PRESETS["llama3-8b"]).with_values(**values)
    assert check(config, 16, planned=True).grid.cp == values["context_parallel_size"]


@pytest.mark.parametrize(
    ("preset", "values", "part"),
    [
        (
            "llama3-8b",
            {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
            "recompute_modules: moe needs a model with num_experts",
        ),
        (
            "mixtral-8x7b",
            {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)},
            "mla_up_proj needs a model with multi_latent_attention",
        ),
        (
            "mixtral-8x7b",
            {"recompute_granularity": "selective", "recompute_modules": ("shared_experts",)},
            "shared_experts needs moe_shared_expert_intermediate_size",
        ),
        (
            "llama3-8b",
            {"fine_grained_activation_offloading": True, "offload_modules": ("attn_proj",)},
            "attn_proj needs core_attn",
        ),
        (
            "llama3-8b",
            {"fine_grained_activation_offloading": True, "offload_modules": ("expert_fc1",)},
            "offload_modules: expert_fc1 needs a model with num_experts",
        ),
        ("llama3-8b", {"fine_grained_activation_offloading": True}, "needs offload_modules"),
        (
            "llama3-8b",
            {"offload_modules": ("attn_norm",)},
            "fine_grained_activation_offloading is false",
        ),
        (
            "llama3-8b",
            {
                "fine_grained_activation_offloading": True,
                "offload_modules": ("attn_norm",),
                "recompute_granularity": "full",
            },
            "full recomputation keeps only the inputs of layers",
        ),
        (
            "llama3-8b",
            {"recompute_granularity": "full", "recompute_in_flight_limit": 2},
            "recompute_in_flight_limit = 2 runs whole stages again",
        ),
        ("llama3-8b", {"recompute_in_flight_limit": 0}, "must be at least 1, not 0"),
        (
            "llama3-8b",
            {"recompute_in_flight_limit": 2},
            "has no effect: it limits the microbatches",
        ),
        (
            "mixtral-8x7b",
            {
                "fine_grained_activation_offloading": True,
                "offload_modules": ("moe_act",),
                "recompute_granularity": "selective",
                "recompute_modules": ("moe",),
            },
            "moe_act cannot be both recomputed and offloaded",
        ),
    ],
)
def test_memory_settings_fit_the_model_and_each_other(preset: str, values: dict, part: str) -> None:
    assert part in _refusal(preset, **values)
    if "recompute_modules" in values:  # named, but not asked for
        unused = {"recompute_modules": values["recompute_modules"]}
        assert "recompute_granularity is none" in _refusal(preset, **unused)


def test_modules_of_experts_can_be_recomputed() -> None:
    config = Config(model=replace(PRESETS["debug-llama"], num_experts=8)).with_values(
        recompute_granularity="selective", recompute_modules=("layernorm", "moe_act")
    )
    check(config, 1)
    with pytest.raises(ConfigError, match="recompute_modules: mla_up_proj needs a model"):
        check(config.with_values(recompute_modules=("mla_up_proj",)), 1)


def test_what_norms_read_is_moved_and_what_they_made_is_not() -> None:
    config = Config(model=PRESETS["debug-llama"]).with_values(
        recompute_granularity="selective",
        recompute_modules=("layernorm",),
        fine_grained_activation_offloading=True,
        offload_modules=("attn_norm", "mlp_norm", "core_attn"),
    )
    check(config, 1)
    with pytest.raises(ConfigError, match="the input of qkv_linear cannot be offloaded"):
        check(config.with_values(offload_modules=("qkv_linear",)), 1)


def test_queries_are_made_again_of_a_latent_and_not_of_what_is_moved() -> None:
    config = Config(model=PRESETS["deepseek-v2-lite"]).with_values(
        recompute_granularity="selective",
        recompute_modules=("mla_up_proj",),
        fine_grained_activation_offloading=True,
        offload_modules=("qkv_linear",),
    )
    check(config.with_values(q_lora_rank=16), 1)
    with pytest.raises(ConfigError, match="offload_modules qkv_linear moves"):
        check(config, 1)


def test_a_limit_that_no_rank_comes_up_to_is_refused() -> None:
    config = Config(model=PRESETS["debug-llama"]).with_values(
        pipeline_model_parallel_size=2, global_batch_size=8, recompute_in_flight_limit=2
    )
    with pytest.raises(ConfigError, match="1f1b keeps 2 microbatches in flight on a rank at most"):
        check(config, 2)
    assert check(config.with_values(recompute_in_flight_limit=1), 2).recomputed() == {0: 7}
    assert check(config.with_values(pipeline_schedule="gpipe"), 2).recomputed() == {0: 6, 1: 6}


def test_layers_of_cut_sequences_are_not_recomputed() -> None:
    config = Config(model=PRESETS["debug-llama"]).with_values(
        recompute_granularity="full", num_sequence_slices=2, pipeline_schedule="sliced_1f1b"
    )
    with pytest.raises(ConfigError, match="keys and values of later slices"):
        check(config, 1)


@pytest.mark.parametrize("name", NOT_AUTO)
def test_an_automatic_layout_refuses_every_other_cut(name: str) -> None:
    """Whatever its value: a stage without layers is a cut, too."""
    setting = SETTINGS[name]
    least = int(name == "num_layers_per_virtual_pipeline_stage")
    for value in (True,) if setting.kind is bool else (least, 4):
        cuts = {"pipeline_model_parallel_layout": "auto", name: value}
        config = Config(PRESETS["llama3-8b"]).with_values(pipeline_model_parallel_size=4, **cuts)
        with pytest.raises(ConfigError, match=f"auto and {setting.flag} exclude each other"):
            check(config, 8, planned=True)
        question = Request(config, frozenset(cuts), preset("H100", 8))
        assert not len(legal_space(question)), value
