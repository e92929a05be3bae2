"""The planner's peak of layers of real width against rehearsed ranks, with settings at random."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.presets import resolve_model
from fivefold.config.sharding import SHARDING
from fivefold.errors import ConfigError
from fivefold.hardware import GPUS
from fivefold.layout import Layout
from fivefold.predict.cluster_file import load_cluster
from fivefold.rehearse.report import make_report
from fivefold.rehearse.roles import rehearsed_layout, roles
from fivefold.rehearse.run import rehearse_ranks
from tests.verify.cases import chosen

LIMIT = 0.05
"""A rank may need so much more or less than predicted, relative to that, of a model of few layers,
in which what one block needs for a moment weighs much."""
DENSE = ("llama3-8b", "qwen3-8b")
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "deepseek-v3")
LINEAR = ("qwen3.5-27b", "qwen3-next-80b-a3b")
HYBRIDS = ("nemotron-h-8b", "nemotron-3-nano-30b-a3b")
LOCAL = ("gemma4-31b", "mimo-v2-flash")
INDEXERS = ("deepseek-v3.2", "glm-5")
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "gpipe", "dualpipe_v")
RECOMPUTED = ("core_attn", "mlp", "layernorm")


def drawn(seed: int, models: Sequence[str] = DENSE, **more: Any) -> Layout:
    """A legal layout of up to 256 ranks, with eight layers of one of the models."""
    draw = random.Random(seed)
    while True:
        model = _model(draw, draw.choice(models))
        settings = dict(_settings(draw))
        ranks = settings.pop("ranks")
        if model.num_experts is not None:
            ranks *= settings.setdefault("context_parallel_size", draw.choice((1, 1, 1, 2, 4)))
            settings |= dict(_of_experts(draw, model, ranks, settings))
        try:
            config = Config(model).with_values(**settings | more)
            return rehearsed_layout(check(config, ranks))
        except ConfigError:
            continue


def _model(draw: random.Random, name: str) -> ModelConfig:
    """Eight layers of a model, the first without experts where its own first ones are."""
    model = resolve_model(name)
    if model.hybrid_override_pattern is not None:
        mixers = model.hybrid_override_pattern[:8]
        model = replace(model, num_layers=8, vocab_size=32768, hybrid_override_pattern=mixers)
        return replace(model, num_experts=model.num_experts and 64)
    if model.v_channels is not None:  # layers are listed one by one
        model = replace(model, window_attn_skip_freq="4", moe_layer_freq="[0]*1+[1]*7")
    if model.num_experts is None:
        return replace(model, num_layers=8, vocab_size=32768)
    model = replace(model, num_experts=min(model.num_experts, 64))
    frequency = "[0]*1+[1]*7" if model.multi_latent_attention else model.moe_layer_freq
    vocabulary = draw.choice((32768, 131072))
    model = replace(model, num_layers=8, moe_layer_freq=frequency, vocab_size=vocabulary)
    return replace(model, linear_attention_freq="4") if model.fades_features else model


def _of_experts(
    draw: random.Random, model: ModelConfig, ranks: int, settings: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    tp, cp = settings["tensor_model_parallel_size"], settings["context_parallel_size"]
    stage = ranks // settings["pipeline_model_parallel_size"]
    ep = draw.choice([each for each in (1, 2, 4, 8) if stage % each == 0])
    yield "sequence_parallel", tp > 1
    yield "expert_model_parallel_size", ep
    yield "expert_tensor_parallel_size", draw.choice([e for e in (1, tp) if stage % (e * ep) == 0])
    yield "moe_token_dispatcher_type", draw.choice(("alltoall", "alltoall", "allgather", "flex"))
    if cp > 1:
        yield "cp_comm_type", (draw.choice(("p2p", "all_gather", "a2a")),)
    if settings["data_parallel_sharding_strategy"] == "optim_grads_params":
        yield "zero_quantized_weights", draw.random() < 0.3
    if settings["recompute_granularity"] == "selective":
        yield "recompute_modules", tuple(draw.sample((*RECOMPUTED, "moe_act", "moe"), 2))


def _settings(draw: random.Random) -> Iterator[tuple[str, Any]]:
    tp, pp, dp = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4))
    rows, micro = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 2))
    yield "ranks", tp * pp * dp
    yield "precision", "bf16"
    yield "tensor_model_parallel_size", tp
    yield "sequence_parallel", tp > 1 and draw.random() < 0.7
    yield "pipeline_model_parallel_size", pp
    yield "data_parallel_sharding_strategy", draw.choice([*SHARDING])
    yield "seq_length", draw.choice((1024, 2048, 4096))
    yield "micro_batch_size", micro
    yield "global_batch_size", micro * dp * (rows if pp == 1 else 2 * pp)
    if pp > 1:
        schedule = draw.choice(SCHEDULES)
        yield "pipeline_schedule", schedule
        yield "num_virtual_stages_per_pipeline_rank", 1 + (schedule == "interleaved_1f1b")
        yield "pipeline_dx_first", draw.random() < 0.8
    granularity = draw.choice((None, None, "selective", "full"))
    yield "recompute_granularity", granularity
    if granularity == "selective":
        yield "recompute_modules", tuple(draw.sample(RECOMPUTED, draw.choice((1, 2))))
    yield "optimizer_cpu_offload", draw.random() < 0.15
    yield "cross_entropy_loss_fusion", draw.random() < 0.7


def shorter(layers: int, *seeds: int) -> list[Any]:
    """Seeds with fewer layers than eight, of which a wrong plan of a block is a larger part."""
    return [pytest.param(seed, {"num_layers": layers}, id=f"{seed}-{layers}") for seed in seeds]


def whole(seeds: int) -> list[Any]:
    """All seeds, with as many layers as they draw."""
    return [pytest.param(n, {}, id=f"{n}", marks=pytest.mark.exhaustive) for n in range(seeds)]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "more"), shorter(2, 0, 1) + whole(100))
def test_a_rank_needs_what_is_planned(seed: int, more: dict[str, Any]) -> None:
    _needs_what_is_planned(drawn(seed, **more))


@pytest.mark.slow
# 23: replicas divide messages by one; 56: of rows of split experts each rank has all; 88: replicas
# make gradients once, and they leave.
@pytest.mark.parametrize(("seed", "more"), shorter(4, 0) + whole(100))
def test_a_rank_with_experts_needs_what_is_planned(seed: int, more: dict[str, Any]) -> None:
    _needs_what_is_planned(drawn(seed, EXPERTS, **more))


@pytest.mark.slow
@pytest.mark.parametrize("seed", chosen(range(40)))
def test_a_rank_with_linear_attention_needs_what_is_planned(seed: int) -> None:
    _needs_what_is_planned(drawn(seed, LINEAR))


@pytest.mark.slow
@pytest.mark.parametrize("seed", chosen(range(20)))
def test_a_rank_with_kimi_delta_attention_needs_what_is_planned(seed: int) -> None:
    _needs_what_is_planned(drawn(seed, ("kimi-linear-48b-a3b",)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", chosen(range(60), 11))
def test_a_rank_with_one_mixer_a_layer_needs_what_is_planned(seed: int) -> None:
    _needs_what_is_planned(drawn(seed, HYBRIDS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", chosen(range(20)))
def test_a_rank_with_sizes_by_layer_needs_what_is_planned(seed: int) -> None:
    _needs_what_is_planned(drawn(seed, LOCAL))


@pytest.mark.slow
@pytest.mark.parametrize("seed", chosen((0, 4, 7)))
def test_a_rank_with_an_indexer_needs_what_is_planned(seed: int) -> None:
    taught = {"dsa_indexer_loss_coeff": (None, 0.1)[seed % 2]}
    _needs_what_is_planned(drawn(seed, INDEXERS, **taught))


@pytest.mark.slow
@pytest.mark.parametrize("models", [DENSE, EXPERTS])
@pytest.mark.parametrize(("seed", "more"), shorter(2, 1) + whole(30))
def test_a_rank_with_muon_needs_what_is_planned(
    seed: int, more: dict[str, Any], models: Sequence[str]
) -> None:
    """Of dense models in rows so short that the update may need most."""
    muon = {"optimizer": "muon", "muon_nesterov": seed % 2 == 0} | more
    muon |= {"seq_length": 256} if models == DENSE else {}
    _needs_what_is_planned(drawn(seed, models, **muon))


LATENTS: dict[str, Any] = {
    "moe_layer_freq": "1",
    "num_experts": 8,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 4,
    "moe_router_group_scores": 1,
    "mtp_num_layers": 0,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "optimizer_cpu_offload": True,
}
"""Little beside attention."""
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    # Bits that come in a gather's message were taken for integers, of which a rehearsal kept some.
    "gathers in 8 bits": (
        "llama3-8b",
        {
            "fp8_format": "e4m3",
            "fp8_recipe": "tensorwise",
            "fp8_param_gather": True,
            "data_parallel_sharding_strategy": "optim_grads",
        },
    ),
    "gathers in 8 bits, optimizer on the host": (
        "llama3-8b",
        {
            "fp8_format": "e4m3",
            "fp8_recipe": "tensorwise",
            "fp8_param_gather": True,
            "data_parallel_sharding_strategy": "optim",
            "optimizer_cpu_offload": True,
        },
    ),
    # The message of a forward's last gather is free before the loss, which caps logits in place.
    "one microbatch, capped logits": (
        "llama3-8b",
        {
            "data_parallel_sharding_strategy": "optim",
            "final_logit_softcapping": 30.0,
            "seq_length": 2048,
            "micro_batch_size": 2,
            "vocab_size": 32768,
        },
    ),
    # Experts without replicas have no message for gradients, which are made as a backward comes.
    "one microbatch, experts on a rank each": (
        "gpt-oss-20b",
        {
            "num_experts": 8,
            "expert_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "no_shard",
            "seq_length": 1024,
            "global_batch_size": 2,
            "vocab_size": 50257,
        },
    ),
    # The message of the ends stays until the only layer's is copied.
    "stages of one layer": (
        "llama3-8b",
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "interleaved_1f1b",
            "num_virtual_stages_per_pipeline_rank": 2,
            "global_batch_size": 16,
            "micro_batch_size": 1,
            "vocab_size": 32768,
            "num_layers": 4,
            "ranks": 8,
        },
    ),
    # The first backward makes 8-bit copies of weights, layer after layer, for gradients of inputs.
    "8 bits, sums split, optimizer on the host": (
        "llama3-8b",
        {
            "fp8_format": "e4m3",
            "fp8_recipe": "tensorwise",
            "data_parallel_sharding_strategy": "optim_grads",
            "optimizer_cpu_offload": True,
            "num_layers": 6,
        },
    ),
    # Layers at the ends keep bf16: their weights arrive so, and what they read stays so.
    "ends in bf16": (
        "llama3-8b",
        {
            "num_layers": 6,
            "fp8_format": "e4m3",
            "fp8_recipe": "tensorwise",
            "fp8_param_gather": True,
            "first_last_layers_bf16": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
        },
    ),
    # What is gathered beside a layer was taken to be as large as beside the last one.
    "first layer in bf16": (
        "llama3-8b",
        {
            "num_layers": 3,
            "fp8_format": "e4m3",
            "fp8_recipe": "tensorwise",
            "fp8_param_gather": True,
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 0,
            "data_parallel_sharding_strategy": "optim_grads_params",
        },
    ),
    # Gradients of experts were made one by one and then stacked.
    "experts in 8 bits": ("mixtral-8x7b", {"fp8_format": "e4m3", "fp8_recipe": "rowwise"}),
    # Experts have replicas where other layers are split by tensor parallelism.
    "sums of experts": (
        "mixtral-8x7b",
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_tensor_parallel_size": 1,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "optimizer_cpu_offload": True,
        },
    ),
    # Its gradient is made with dX, and waits for the deferred ones of its block.
    "an output layer that makes logits again": (
        "llama3-8b",
        {
            "ranks": 4,
            "vocab_size": 32768,
            "seq_length": 2048,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zb_h1",
            "data_parallel_sharding_strategy": "optim_grads",
            "recompute_granularity": "full",
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "linear",
        },
    ),
    # Gradients of an MLP in tiles are made with dX, too, and wait.
    "tiles and deferred gradients": (
        "llama3-8b",
        {
            "ranks": 4,
            "num_layers": 4,
            "global_batch_size": 16,
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zb_v",
            "data_parallel_sharding_strategy": "optim_grads_params",
            "recompute_granularity": "selective",
            "recompute_modules": ("mlp",),
            "tiled_mlp_num_shards": 4,
        },
    ),
    # What is cut along another dim than the first is rearranged, around each message.
    "fewer experts than shards": (
        "mixtral-8x7b",
        {
            "ranks": 4,
            "num_experts": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
        },
    ),
    # The copies in which replicas' sums travel were counted when all layers are done.
    "sums that travel in bf16": (
        "llama3-8b",
        {
            "num_layers": 3,
            "seq_length": 1024,
            "grad_reduce_in_bf16": True,
            "recompute_granularity": "selective",
            "recompute_modules": ("mlp",),
            "tiled_mlp_num_shards": 4,
        },
    ),
    # The last new mean of gradients was there while all matrices were orthogonalised, and two new
    # weights while one was written.
    "means of Muon": (
        "llama3-8b",
        {"num_layers": 1, "optimizer": "muon", "global_batch_size": 2},
    ),
    # What attention makes was taken for what its projection reads, after an exchange of heads.
    "heads that are exchanged": (
        "llama3-8b",
        {
            "num_layers": 8,
            "context_parallel_size": 2,
            "cp_comm_type": ("a2a",),
            "seq_length": 65536,
            "data_parallel_sharding_strategy": "optim_grads",
        },
    ),
    # In a forward each rank has the rows of all that split an expert.
    "rows of split experts": (
        "qwen3-30b-a3b",
        {
            "tensor_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "sequence_parallel": True,
            "seq_length": 16384,
            "recompute_granularity": "full",
            "data_parallel_sharding_strategy": "optim",
        },
    ),
    # Of replicas, all gradients of an MLP were counted where they had been added up one by one.
    "gradients behind states": (
        "qwen3.5-27b",
        {
            "num_layers": 4,
            "seq_length": 512,
            "global_batch_size": 2,
            "recompute_granularity": "full",
        },
    ),
    # Where one microbatch is all, the first layer's states meet shards of all others' gradients.
    "first states": (
        "qwen3.5-27b",
        {
            "num_layers": 3,
            "linear_attention_freq": "[1,0,1]",
            "seq_length": 1024,
            "global_batch_size": 2,
            "data_parallel_sharding_strategy": "optim",
            "recompute_granularity": "full",
        },
    ),
    # What goes to the host was counted beside the next layer, and sums there came back in a first
    # backward, when there are none.
    "gradients that leave": (
        "llama3-8b",
        {"data_parallel_sharding_strategy": "optim_grads", "optimizer_cpu_offload": True},
    ),
    # A layer's gradients are all there while the message of the layer behind it is not yet free.
    "gradients beside a message": (
        "llama3-8b",
        {
            "num_layers": 4,
            "global_batch_size": 2,
            "data_parallel_sharding_strategy": "optim_grads",
        },
    ),
    # Gradients that replicas have added stay on the device until the backwards are over.
    "sums of experts in one microbatch": (
        "mixtral-8x7b",
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_tensor_parallel_size": 1,
            "global_batch_size": 1,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "optimizer_cpu_offload": True,
        },
    ),
    # The shard that visits the device for a gather was counted in all of a step.
    "weights on the host": (
        "llama3-8b",
        {
            "num_layers": 4,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "optimizer_cpu_offload": True,
            "param_cpu_offload": True,
        },
    ),
    # Of the gradients of an MLP's last tile only the first two were counted beside their sums, and
    # none where products add to a sum; nor was what a whole sum is narrowed into.
    "sums of tiles": (
        "llama3-8b",
        {
            "seq_length": 1024,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "optimizer_cpu_offload": True,
            "recompute_granularity": "selective",
            "recompute_modules": ("mlp",),
            "tiled_mlp_num_shards": 4,
        },
    ),
    # Only the last layer's tiles were counted, and only some layers have a dense MLP.
    "tiles before experts": (
        "deepseek-v2-lite",
        {
            "num_experts": 8,
            "moe_layer_freq": "[0,1]",
            "seq_length": 512,
            "expert_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads",
            "optimizer_cpu_offload": True,
            "recompute_granularity": "selective",
            "recompute_modules": ("mlp",),
            "tiled_mlp_num_shards": 4,
        },
    ),
    # A block's last gradient, summed over microbatches, stays until FSDP2 has reduced the block.
    "narrow messages of sums": (
        "mixtral-8x7b",
        {
            "num_experts": 4,
            "data_parallel_sharding_strategy": "optim",
            "grad_reduce_in_bf16": True,
            "optimizer_cpu_offload": True,
        },
    ),
    # A narrow message was counted beside the host's sum, which comes back when it is gone.
    "narrow messages, sums on the host": (
        "llama3-8b",
        {
            "vocab_size": 65536,
            "global_batch_size": 6,
            "data_parallel_sharding_strategy": "optim_grads",
            "grad_reduce_in_bf16": True,
            "offload_optimizer_states": True,
        },
    ),
    # A layer's states run again beside the message of the gradients of its own experts.
    "states behind experts": (
        "kimi-linear-48b-a3b",
        {
            "moe_layer_freq": "[0,1]",
            "linear_attention_freq": "[0,1]",
            "num_experts": 32,
            "expert_model_parallel_size": 2,
            "seq_length": 1024,
            "global_batch_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "recompute_granularity": "full",
        },
    ),
    # Attention of values with fewer features than queries copies them; and what a GPU does in one
    # call was rehearsed block by block.
    "latents": ("deepseek-v3", LATENTS | {"seq_length": 4096, "recompute_granularity": "full"}),
    # Of rows that ranks split, what is summed in fp32 was not planned, and most of it was held
    # twice: gradients of keys and values in a ring, and of heads that are exchanged.
    "latents in a ring": (
        "deepseek-v3",
        LATENTS
        | {
            "context_parallel_size": 2,
            "cp_comm_type": ("p2p",),
            "seq_length": 8192,
            "recompute_granularity": "full",
        },
    ),
    "latents that are gathered": (
        "deepseek-v3",
        LATENTS
        | {
            "ranks": 4,
            "context_parallel_size": 4,
            "cp_comm_type": ("all_gather",),
            "seq_length": 8192,
        },
    ),
    "latents, heads exchanged": (
        "deepseek-v3",
        LATENTS
        | {
            "context_parallel_size": 2,
            "cp_comm_type": ("a2a",),
            "seq_length": 8192,
            "recompute_granularity": "full",
        },
    ),
    # The message of weights that are gathered to run experts again stayed until the next one.
    "experts that run again": (
        "deepseek-v2-lite",
        {
            "ranks": 4,
            "num_layers": 4,
            "moe_layer_freq": "1",
            "vocab_size": 65536,
            "seq_length": 4096,
            "micro_batch_size": 2,
            "global_batch_size": 16,
            "pipeline_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "optimizer_cpu_offload": True,
            "recompute_granularity": "full",
        },
    ),
    # The rows of experts, and gradients of what each makes of them, were free while those of the
    # rows are added.
    "gradients of rows": (
        "qwen3-30b-a3b",
        {
            "num_experts": 16,
            "seq_length": 4096,
            "global_batch_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "recompute_granularity": "full",
        },
    ),
    # Messages of rows were counted beside what experts do with these.
    "rows that have arrived": (
        "deepseek-v2-lite",
        {
            "ranks": 4,
            "num_layers": 4,
            "moe_layer_freq": "1",
            "num_experts": 16,
            "seq_length": 4096,
            "global_batch_size": 8,
            "expert_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "recompute_granularity": "selective",
            "recompute_modules": ("moe", "mlp"),
        },
    ),
    # The ends of a stage, unpacked from few bits, were counted beside their copy and the layers'.
    "ends in few bits": (
        "qwen3-8b",
        {
            "vocab_size": 65536,
            "seq_length": 4096,
            "micro_batch_size": 4,
            "global_batch_size": 16,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "zero_quantized_weights": True,
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "linear",
        },
    ),
}


RARE = (
    "tiles and deferred gradients",
    "sums of experts",
    "sums of experts in one microbatch",
    "weights on the host",
    "tiles before experts",
    "narrow messages, sums on the host",
    "gathers in 8 bits, optimizer on the host",
    "8 bits, sums split, optimizer on the host",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(SMALL, *(n for n in SMALL if n not in RARE)))
def test_a_few_layers_on_few_ranks_need_what_is_planned(name: str) -> None:
    _needs_what_is_planned(layout_of(name), LIMIT / 2)


def layout_of(name: str) -> Layout:
    """The layout of that name in SMALL."""
    preset, settings = SMALL[name]
    asked = {"precision": "bf16", "seq_length": 256, "global_batch_size": 4} | settings
    layers, size = asked.pop("num_layers", 2), asked.pop("vocab_size", 1024)
    model, ranks = resolve_model(preset), asked.pop("ranks", 2)
    model = replace(model, num_layers=layers, vocab_size=size)
    return rehearsed_layout(check(Config(model).with_values(**asked), ranks))


@pytest.mark.parametrize("gpu", GPUS)
def test_what_fits_on_paper_fits_where_it_needs_as_much_more_as_these_tests_allow(gpu: str) -> None:
    cluster = load_cluster(gpu, 8)
    assert cluster.room * (1 + LIMIT) + cluster.reserved_bytes <= cluster.gpu.memory_bytes


def _needs_what_is_planned(layout: Layout, limit: float = LIMIT) -> None:
    one_of_each = {layout.grid.coordinates(rank)["pp"]: rank for rank in reversed(roles(layout))}
    scripts = rehearse_ranks(layout, sorted(one_of_each.values()))
    report = make_report(layout, "", scripts, load_cluster("H100", 8))
    assert report.passed, report.text()
    told = f"{layout.config.parallel}\n{layout.config.training}\n{report.as_json()['ranks']}"
    for script, planned in zip(scripts, report.planned, strict=True):
        assert abs(script.peak / planned.peak - 1) < limit, told
