"""Peaks: worked out by hand, published, and what techniques must do to them."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.counts.policy import StatePolicy, megatron_policy
from fivefold.counts.state import model_state
from fivefold.counts.volumes import step_volumes
from fivefold.description.running import Running
from fivefold.layout import Layout
from fivefold.pipeline.ir import Program
from fivefold.pipeline.order import Order
from fivefold.predict.cluster import preset
from fivefold.predict.memory import stage as stage_memory
from fivefold.predict.memory.backward import backward_points
from fivefold.predict.memory.liveness import moments
from fivefold.predict.memory.peak import MemoryPrediction, peak_memory
from fivefold.predict.memory.sizes import buffers

H100 = preset("H100", 64)
SHORT_LLAMA = replace(PRESETS["llama3-70b"], num_layers=12)


def _layout(model: ModelConfig, world: int, **values: Any) -> Layout:
    config = Config(model).with_values(
        **{"seq_length": 4096, "data_parallel_sharding_strategy": "optim"} | values
    )
    return check(config, world, planned=True)


def _peak(model: ModelConfig, world: int, **values: Any) -> MemoryPrediction:
    return peak_memory(_layout(model, world, **values), H100)


# Measured with torch.cuda.max_memory_allocated, as SimuMax publishes it for Megatron-LM on B200s:
# GiB, of cut models in bf16 with ZeRO-1 and a fused loss.
@pytest.mark.parametrize(
    ("model", "world", "values", "measured"),
    [
        (SHORT_LLAMA, 8, {"pp": 2, "gbs": 16}, 66.55),
        (SHORT_LLAMA, 8, {"tp": 2, "gbs": 16}, 60.68),
        (SHORT_LLAMA, 8, {"tp": 8, "gbs": 4}, 28.29),
        (SHORT_LLAMA, 8, {"tp": 2, "cp": 4, "gbs": 4, "seq_length": 32768}, 68.43),
        (replace(PRESETS["llama3-405b"], num_layers=4), 8, {"pp": 2, "gbs": 16}, 87.08),
        (
            replace(
                PRESETS["deepseek-v3"],
                num_layers=4,
                mtp_num_layers=0,
                moe_layer_freq="[0]*1+[1]*3",
            ),
            8,
            {"ep": 8, "gbs": 32},
            104.30,
        ),
    ],
)
def test_published_peaks(
    model: ModelConfig, world: int, values: dict[str, int], measured: float
) -> None:
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "gbs": "global_batch_size",
    }
    settings: dict[str, Any] = {names.get(name, name): value for name, value in values.items()}
    settings |= {"sequence_parallel": "tp" in values}
    settings |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    layout = _layout(model, world, **settings)
    predicted = peak_memory(layout, H100, policy=megatron_policy(True))
    assert predicted.max_allocated / 2**30 == pytest.approx(measured, rel=0.02)


GPT_7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=131072,
    max_position_embeddings=8192,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    activation_func="gelu",
    gated_linear_unit=False,
    add_bias_linear=True,
    hidden_dropout=0.1,
)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (
            {
                "pipeline_model_parallel_size": 4,
                "num_virtual_stages_per_pipeline_rank": 8,
                "micro_batch_size": 1,
            },
            60.49e9,
            60.72e9,
        ),
        ({"tensor_model_parallel_size": 4, "micro_batch_size": 2}, 57.14e9, 58.22e9),
    ],
    ids=["pp4 vpp8", "tp4"],
)
def test_megatron_s_golden_values_of_a_7b_model(
    values: dict[str, int], low: float, high: float
) -> None:
    """gpt3_7b_*_memory_speed of its functional tests: the last rank, three kinds of GPU."""
    policy = replace(megatron_policy(True), placeholder=0)  # --no-gradient-accumulation-fusion
    loss = {"cross_entropy_loss_fusion": True}  # it works in place on one fp32 copy
    layout = _layout(GPT_7B, 8, seq_length=8192, global_batch_size=8, **values, **loss)
    last = peak_memory(layout, H100, policy=policy).ranks[-1]
    assert 0.98 * low < last.peak < 1.02 * high


def test_the_parts_add_up_and_the_phases_hold_the_peak() -> None:
    predicted = _peak(
        SHORT_LLAMA, 8, pipeline_model_parallel_size=4, global_batch_size=32, precision="bf16"
    )
    for rank in predicted.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.peak)
        assert rank.phases[rank.phase] == pytest.approx(rank.peak)
        assert max(rank.phases.values()) == rank.phases[rank.phase]
    assert predicted.worst.peak == max(rank.peak for rank in predicted.ranks)
    assert predicted.device_total == predicted.max_allocated + H100.reserved_bytes


@pytest.mark.parametrize("model", ["debug-llama", "debug-mixtral", "debug-deepseek-v3"])
@pytest.mark.parametrize("name", ["kept", "full", "block", "selective", "moved"])
def test_no_part_of_a_peak_is_negative(model: str, name: str) -> None:
    """What a backward frees is a part of what was kept, made again or brought back."""
    technique: dict[str, Any] = {
        "kept": {},
        "full": {"recompute_granularity": "full"},
        "block": {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": (1,),
        },
        "selective": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
        "moved": {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)},
    }[name]
    for pp, sharding in ((1, "optim"), (1, "optim_grads_params"), (2, "optim_grads")):
        ways = {"pipeline_model_parallel_size": pp, "data_parallel_sharding_strategy": sharding}
        settings = {"global_batch_size": 8, "seq_length": 32} | ways | technique
        for rank in _peak(PRESETS[model], 4, **settings).ranks:
            assert min(rank.parts.values()) >= 0, (rank, settings)


def test_the_first_rank_of_1f1b_keeps_most_and_the_last_pays_for_the_loss() -> None:
    long = {"global_batch_size": 32, "seq_length": 16384, "micro_batch_size": 1}
    predicted = _peak(SHORT_LLAMA, 4, pipeline_model_parallel_size=4, **long)
    assert predicted.worst.pp_rank == 0
    kept = [rank.parts["activations"] for rank in predicted.ranks]
    assert kept == sorted(kept, reverse=True)
    assert "loss" in predicted.ranks[-1].parts
    assert "loss" not in predicted.ranks[0].parts


def test_a_model_with_hardly_any_tokens_peaks_where_weight_gradients_are_made() -> None:
    predicted = _peak(SHORT_LLAMA, 1, seq_length=128, global_batch_size=2).worst
    state = model_state(_layout(SHORT_LLAMA, 1, seq_length=128, global_batch_size=2), 0)
    assert state.total < predicted.peak < 1.1 * state.total
    assert predicted.parts["arriving gradients"] > predicted.parts["activations"]


@pytest.mark.parametrize(
    "technique",
    [
        {"recompute_granularity": "full"},
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": (6,),
        },
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
        {
            "recompute_granularity": "selective",
            "recompute_modules": ("mlp",),
            "tiled_mlp_num_shards": 8,
        },
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
        {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
        {"data_parallel_sharding_strategy": "optim_grads_params"},
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "recompute_in_flight_limit": 1},
    ],
)
def test_every_technique_saves_memory(technique: dict[str, Any]) -> None:
    plain = {"global_batch_size": 16, "seq_length": 8192}
    assert _peak(SHORT_LLAMA, 8, **plain | technique).max_allocated < (
        _peak(SHORT_LLAMA, 8, **plain).max_allocated
    )


def test_a_rank_holds_as_many_microbatches_as_it_may() -> None:
    shape = {"pipeline_model_parallel_size": 4, "global_batch_size": 16}
    plain, few = (
        _layout(SHORT_LLAMA, 4, recompute_in_flight_limit=limit, **shape) for limit in (None, 2)
    )
    for rank in range(4):
        held = [moments(layout, splits_backward=True)[rank].kept.max() for layout in (plain, few)]
        assert held == [4 - rank, min(4 - rank, 2)]
    peaks = [peak_memory(layout, H100).ranks for layout in (plain, few)]
    assert [few.peak < plain.peak for plain, few in zip(*peaks, strict=True)] == [True] * 2 + [
        False
    ] * 2
    assert peaks[0][3] == peaks[1][3]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_the_peak_of_a_long_step_is_that_of_a_short_one(schedule: str) -> None:
    """A search asks for thousands of peaks, and programs of all microbatches take seconds each."""
    layout = _layout(
        PRESETS["mixtral-8x7b"],
        8,
        expert_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        num_virtual_stages_per_pipeline_rank=2 if schedule == "interleaved_1f1b" else None,
        global_batch_size=4096,
        pipeline_schedule=schedule,
        overlap_moe_expert_parallel_comm=schedule == "dualpipe_v",
        data_parallel_sharding_strategy="optim_grads_params",
    )
    built: list[int] = []

    def counting(self: Order, **options: bool) -> Program:
        built.append(self.num_microbatches)
        return executed(self, **options)

    executed = Order.executed
    with patch.object(Order, "executed", counting):
        peak_memory(layout, H100)
    assert max(built, default=0) <= layout.enough_microbatches < 64


GROUPED = [replace(SHORT_LLAMA, num_query_groups=groups) for groups in (1, 2, 8)]
MTP = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|ttt|m|L"}


@pytest.mark.parametrize(
    ("model", "world", "values"),
    [
        *((model, 8, {"tensor_model_parallel_size": 4}) for model in GROUPED),
        (PRESETS["debug-deepseek-v3"], 8, MTP),
    ],
)
def test_a_ring_has_room_for_two_blocks_and_their_gradients(
    model: ModelConfig, world: int, values: dict[str, Any]
) -> None:
    """Blocks are as large as what `counts.volumes`, which audits compare with runs, has sent."""
    layout = _layout(model, world, context_parallel_size=2, global_batch_size=8, **values)
    running = Running.of(layout.config)
    for pp_rank in range(layout.grid.pp):
        flows = step_volumes(layout, pp_rank * layout.grid.ranks_per_stage)
        sent = sum(flow.size for flow in flows if flow.axis == "cp")
        ((_, stage),) = layout.stages_of(pp_rank).items()
        passes = layout.num_microbatches * (len(stage.layers) + stage.mtp)
        between, inside, *_ = buffers(layout, stage, running)
        # There in forward and backward, and gradients that are summed in fp32.
        block = sent / max(passes, 1) * running.element_bytes / (2 * running.element_bytes + 4)
        assert inside - between == 4 * block


def test_two_copies_of_the_model_keep_its_state_twice() -> None:
    shape = {"pipeline_model_parallel_size": 4, "global_batch_size": 16}
    one, two = (
        _peak(SHORT_LLAMA, 4, pipeline_schedule=schedule, **shape).ranks[1]
        for schedule in ("1f1b", "dualpipe")
    )
    assert two.parts["weights"] == 2 * one.parts["weights"]


def test_what_does_not_fit_is_said() -> None:
    assert not _peak(SHORT_LLAMA, 1, global_batch_size=1).fits
    assert _peak(PRESETS["gpt2"], 1, global_batch_size=1, seq_length=1024).fits


def test_a_policy_is_what_a_parameter_costs() -> None:
    layout = _layout(SHORT_LLAMA, 8, global_batch_size=8)
    lean = StatePolicy(copy=2, narrow_copy=2, gradient=2, master=0, moments=2)
    state = model_state(layout, 0, policy=lean)
    assert state.total == 6 * state.parameters


@pytest.mark.parametrize("margin", [0.0, 0.05, 0.3])
def test_plans_leave_a_share_of_the_device_free(margin: float) -> None:
    layout = check(Config(PRESETS["llama3-8b"]).with_values(tensor_model_parallel_size=8), 8)
    peak = peak_memory(layout, H100).max_allocated
    size = (peak + H100.reserved_bytes) / (1 - margin)
    for more, fits in ((1e6, True), (-1e6, False)):
        gpu = replace(H100.gpu, memory_bytes=size + more)
        cluster = replace(H100, gpu=gpu, memory_margin=margin)
        assert peak_memory(layout, cluster).fits is fits
        assert (cluster.room >= peak) is fits
    exact = replace(H100, memory_margin=margin).within(peak + 1)
    assert peak_memory(layout, exact).fits
    assert not peak_memory(layout, exact.within(peak - 1)).fits


@pytest.mark.parametrize(
    ("sharding", "most"),
    [
        ("optim_grads_params", 3),  # dX; the first weight gradients, which make the sums; others
        ("optim_grads", 4),  # and the last of them, which frees copies of weights
    ],
)
def test_backwards_that_are_alike_are_worked_out_once(sharding: str, most: int) -> None:
    layout = _layout(
        SHORT_LLAMA,
        32,
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=2,
        global_batch_size=64,
        data_parallel_sharding_strategy=sharding,
    )
    with patch.object(stage_memory, "backward_points", wraps=backward_points) as worked_out:
        peak_memory(layout, H100)
    found = Counter(id(call.args[0]) for call in worked_out.call_args_list)
    assert len(found) == 3 and max(found.values()) == most  # the first, the last, those between
