"""Bytes really sent, on every rank and axis, against the closed forms: equal, not close.

The rows of tests/verify/test_matrix.py are measured too, where they are verified.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fivefold.audit.traffic import Traffic, axes_of
from fivefold.audit.work import Multiplications
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.counts.volumes import by_axis, step_volumes
from fivefold.data.packing import Microbatch
from fivefold.errors import FivefoldError
from fivefold.layout import Layout
from fivefold.model.layers import Linear
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.linear import ColumnParallel, RowParallel
from fivefold.train.engine import Engine
from tests.pool import run
from tests.tensor.ways import WAYS, exchanging
from tests.verify.cases import chosen, shared_groups

# Sizes that sharding over 2 or 4 ranks has to pad.
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 18,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "num_query_groups": 2,
    "ffn_hidden_size": 20,
    "vocab_size": 250,
    "make_vocab_size_divisible_by": 4,
}


def _layout(world: int, settings: dict[str, Any]) -> Layout:
    parts = settings.get(TP, 1) * settings.get(PP, 1) * settings.get(CP, 1)
    samples = 2 * world // parts  # two microbatches
    values = {
        "seq_length": 4 if CP not in settings else 16,
        "global_batch_size": samples,
        "precision": "fp32",
    }
    config = Config(model=ModelConfig(**MODEL)).with_values(**(values | settings))
    return check(config, world)


def _microbatches(layout: Layout, rank: int) -> list[Microbatch]:
    training = layout.config.training
    shape = training.micro_batch_size, training.seq_length
    random = np.random.default_rng(rank)
    positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
    return [
        Microbatch(
            random.integers(0, 250, shape),
            random.integers(0, 250, shape),
            positions,
            np.zeros(shape, np.int64),
            np.arange(shape[0] * shape[1]).reshape(shape),
        )
        for _ in range(layout.num_microbatches)
    ]


def _unknown_operation(rank: int, world: int) -> None:
    with Traffic({}), pytest.raises(FivefoldError, match="no wire model is known for c10d::broad"):
        dist.broadcast(torch.zeros(1), 0)
    dist.barrier()


def test_nothing_goes_uncounted() -> None:
    run(2, _unknown_operation)


@shared_groups()
def _measure(rank: int, world: int, settings: dict[str, Any]) -> list[dict[str, float]]:
    layout = _layout(world, settings)
    engine = Engine(layout, rank, torch.device("cpu"))
    microbatches = _microbatches(layout, layout.grid.dp_rank(rank))
    measured = []
    for _ in range(2):  # the second step starts from what the first has left gathered
        with Traffic(axes_of(engine.groups)) as traffic:
            engine.step(microbatches)
        measured.append(traffic.by_axis)
    return measured


TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
CP = "context_parallel_size"
KIND = "cp_comm_type"
SIZES = "hierarchical_context_parallel_sizes"
SCHEDULE = "pipeline_schedule"
STAGES = "pipeline_model_parallel_layout"
V = "num_virtual_stages_per_pipeline_rank"
ZERO = "data_parallel_sharding_strategy"
HSDP = "num_distributed_optimizer_instances"
SP = {TP: 2, "sequence_parallel": True}
GPT = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "untie_embeddings_and_output_weights": False,
}
MTP = {"mtp_num_layers": 2}
BF16 = {"precision": "bf16"}
FULL = {"recompute_granularity": "full"}
FUSED = {"cross_entropy_loss_fusion": True}
TILES = {"tiled_mlp_num_shards": 3, "recompute_num_layers": (2,)}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ("core_attn", "mlp", "layernorm"),
}
ZERO3 = {ZERO: "optim_grads_params"}
QWZ, HPZ = {"zero_quantized_weights": True}, {"zero_hpz_partition_size": 2}
QGZ = {"zero_quantized_gradients": True}
NARROW = BF16 | {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True}
QGZ_OF_NODES = QGZ | {"zero_qgz_partition_size": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "no_shard": (4, {}),
    "no_shard, bf16 on the wire": (2, {"grad_reduce_in_bf16": True}),
    "no_shard in bf16": (2, BF16),
    "optim": (4, {ZERO: "optim"}),
    "optim_grads": (4, {ZERO: "optim_grads"}),
    "optim_grads_params": (4, {ZERO: "optim_grads_params"}),
    "optim_grads_params, nothing overlapped": (
        2,
        {ZERO: "optim_grads_params", "overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    "optim, reduced after the backward": (2, {ZERO: "optim", "overlap_grad_reduce": False}),
    "optim_grads_params in bf16": (4, {ZERO: "optim_grads_params"} | BF16),
    "optim in bf16, kept in bf16, summed in fp32": (
        4,
        {
            ZERO: "optim",
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": "bf16",
            "ddp_reduce_scatter_with_fp32_accumulation": True,
        }
        | BF16,
    ),
    "optim in bf16, bf16 on the wire": (4, {ZERO: "optim", "grad_reduce_in_bf16": True} | BF16),
    "optim, bf16 on the wire, summed in fp32": (
        4,
        {
            ZERO: "optim",
            "grad_reduce_in_bf16": True,
            "ddp_reduce_scatter_with_fp32_accumulation": True,
        },
    ),
    "hsdp optim": (4, {ZERO: "optim", HSDP: 2}),
    "hsdp optim_grads": (8, {ZERO: "optim_grads", HSDP: 2}),
    "hsdp optim_grads_params": (4, {ZERO: "optim_grads_params", HSDP: 2}),
    "hsdp of one shard": (2, {ZERO: "optim", HSDP: 2}),
    "tp": (2, {TP: 2, "label_smoothing": 0.1}),
    "tp over more ranks than key/value heads": (4, {TP: 4, "qk_layernorm": True}),
    "tp + sp": (2, SP | {"qk_layernorm": True}),
    "tp + sp of a GPT": (2, SP | GPT),
    "tp in bf16": (2, {TP: 2} | BF16),
    "pp": (4, {PP: 4}),
    "pp, tied": (2, {PP: 2} | GPT),
    "pp of 4, tied": (4, {PP: 4} | GPT),
    "interleaved pp": (2, {PP: 2, V: 2}),
    "interleaved pp + optim_grads_params": (
        4,
        {PP: 2, V: 2, ZERO: "optim_grads_params", "num_layers": 8, "global_batch_size": 8},
    ),
    "pp + optim_grads_params": (8, {PP: 4, ZERO: "optim_grads_params", "num_layers": 8}),
    "two copies of the model": (2, {PP: 2, SCHEDULE: "dualpipe", "global_batch_size": 4}),
    "two copies of a tied model, sharded": (
        8,
        {PP: 4, SCHEDULE: "dualpipe", ZERO: "optim_grads_params", "global_batch_size": 16} | GPT,
    ),
    "slices + optim_grads_params": (
        4,
        {PP: 2, SCHEDULE: "sliced_1f1b", "num_sequence_slices": 2, ZERO: "optim_grads_params"},
    ),
    "MTP, tp": (2, {TP: 2, "mtp_num_layers": 2}),
    "MTP, tp + sp, layers recomputed": (2, SP | FULL | {"mtp_num_layers": 1}),
    "MTP, pp, copies of the embedding": (4, {PP: 4, STAGES: "Ett|t|tmm|L"} | MTP),
    "MTP, pp, tied, both copies of the model": (
        4,
        {PP: 4, STAGES: "Ett|tt|mm|L", SCHEDULE: "dualpipe", "global_batch_size": 8} | MTP | GPT,
    ),
    "MTP, optim_grads_params": (2, {ZERO: "optim_grads_params"} | MTP),
    "stages kept gathered": (
        4,
        {
            PP: 2,
            SCHEDULE: "zb_v",
            ZERO: "optim_grads_params",
            "global_batch_size": 6,
            "pipeline_max_unsharded_stages": 1,
        },
    ),
    "one microbatch of optim_grads_params": (
        2,
        {ZERO: "optim_grads_params", "global_batch_size": 2},
    ),
    "pp + optim": (4, {PP: 2, ZERO: "optim"}),
    "pp + tp + sp + optim_grads of a GPT": (8, {PP: 2, ZERO: "optim_grads"} | SP | GPT),
    "pp + tp + no_shard": (8, {PP: 2, TP: 2, "qk_layernorm": True}),
    "tp, layers recomputed": (2, {TP: 2} | FULL),
    "tp + sp, pairs of layers recomputed": (2, SP | FULL | {"recompute_num_layers": (2,)}),
    "tp + sp, layers with dropout recomputed": (2, SP | FULL | GPT | {"hidden_dropout": 0.1}),
    "tp + sp, some layers recomputed": (
        2,
        SP | FULL | {"recompute_method": "block", "recompute_num_layers": (3,)},
    ),
    "tp, modules recomputed": (2, {TP: 2} | SELECTIVE),
    "tp + sp, modules recomputed": (2, SP | SELECTIVE | GPT),
    "tp + sp, pairs of layers recomputed in tiles": (2, SP | FULL | TILES),
    "tp, layers with dropout recomputed in tiles": (
        2,
        {TP: 2} | FULL | TILES | GPT | {"recompute_num_layers": (1,), "hidden_dropout": 0.1},
    ),
    "tp, pairs of layers recomputed in tiles": (2, {TP: 2} | FULL | TILES),
    "tp + sp, modules recomputed in tiles": (2, SP | SELECTIVE | {"tiled_mlp_num_shards": 3}),
    "tp + sp, stages recomputed": (
        4,
        SP | GPT | {PP: 2, "recompute_in_flight_limit": 1, "label_smoothing": 0.1},
    ),
    "cp, stages recomputed": (4, {CP: 2, PP: 2, "recompute_in_flight_limit": 1}),
    "optim_grads_params, stages recomputed": (
        4,
        {ZERO: "optim_grads_params", PP: 2, "recompute_in_flight_limit": 1},
    ),
    "tp, loss fused": (2, {TP: 2} | FUSED),
    "tp + sp, loss fused with the output layer": (
        2,
        SP | FUSED | {"cross_entropy_fusion_impl": "linear", "label_smoothing": 0.1},
    ),
    "optim_grads_params, pairs of layers recomputed": (
        2,
        {ZERO: "optim_grads_params", "recompute_num_layers": (2,)} | FULL,
    ),
    "zero bubbles + optim_grads": (4, {PP: 2, ZERO: "optim_grads", "pipeline_schedule": "zb_h1"}),
    "zero bubbles + hsdp optim_grads": (
        8,
        {PP: 2, ZERO: "optim_grads", HSDP: 2, "pipeline_schedule": "zb_h1"},
    ),
    "zero bubbles + tp + sp, layers recomputed": (
        4,
        SP | FULL | {PP: 2, "pipeline_schedule": "zb_h2", "global_batch_size": 4},
    ),
    "zero bubbles + optim_grads_params": (
        4,
        {PP: 2, ZERO: "optim_grads_params", "pipeline_schedule": "zb_h1"},
    ),
    "hsdp + tp + sp": (8, {ZERO: "optim_grads_params", HSDP: 2} | SP | BF16),
    "cp in a ring": (4, {CP: 4}),
    "cp in a ring in bf16": (4, {CP: 4} | BF16),
    "cp by all-gather": (4, {CP: 4, KIND: ("all_gather",)}),
    "cp by all-gather in bf16": (2, {CP: 2, KIND: ("all_gather",)} | BF16),
    "cp by Ulysses": (2, {CP: 2, KIND: ("a2a",)}),
    "cp by Ulysses over more ranks than key/value heads": (4, {CP: 4, KIND: ("a2a",)} | BF16),
    "cp in a hierarchy": (4, {CP: 4, KIND: ("a2a+p2p",), SIZES: (2, 2)}),
    "cp in a hierarchy over more ranks than key/value heads": (
        8,
        {CP: 8, KIND: ("a2a+p2p",), SIZES: (4, 2)},
    ),
    "cp, a kind for each layer": (
        4,
        {CP: 4, KIND: ("p2p", "a2a", "a2a+p2p", "all_gather"), SIZES: (2, 2)},
    ),
    "cp with a window": (4, {CP: 4, "window_size": 3}),
    "cp with a window, a kind for each layer": (
        4,
        {CP: 4, KIND: ("p2p", "a2a", "a2a+p2p", "all_gather"), SIZES: (2, 2), "window_size": 3},
    ),
    "cp by all-gather with a window": (4, {CP: 4, KIND: ("all_gather",), "window_size": 1}),
    "cp in a hierarchy with a window": (
        8,
        {CP: 8, KIND: ("a2a+p2p",), SIZES: (2, 4), "window_size": 2},
    ),
    "cp + dp + optim_grads_params": (4, {CP: 2, ZERO: "optim_grads_params"}),
    "cp + hsdp": (8, {CP: 2, ZERO: "optim", HSDP: 2}),
    "cp + tp + sp": (4, {CP: 2} | SP),
    "cp + tp over more ranks than key/value heads": (8, {CP: 2, TP: 4, KIND: ("all_gather",)}),
    "cp + pp": (4, {CP: 2, PP: 2, KIND: ("a2a",)}),
    "qwZ, optim in bf16": (2, {ZERO: "optim"} | QWZ | BF16),
    "gathered in 8 bits, optim": (2, {ZERO: "optim"} | NARROW | {"fp8_recipe": "tensorwise"}),
    "gathered in 8 bits, scales of earlier steps, pp": (
        4,
        {ZERO: "optim", PP: 2} | NARROW | {"fp8_recipe": "delayed"},
    ),
    "gathered in 8 bits, hpZ, tp + sp": (8, ZERO3 | HPZ | SP | NARROW),
    "gathered in 8 bits but for the ends, tp + sp, interleaved": (
        8,
        ZERO3 | SP | NARROW | {PP: 2, V: 2, "first_last_layers_bf16": True},
    ),
    "gathered in 8 bits, hsdp, pp": (8, ZERO3 | {HSDP: 2, PP: 2} | NARROW),
    "qwZ + hpZ": (4, ZERO3 | QWZ | HPZ),
    "hpZ in bf16, layers recomputed": (4, ZERO3 | HPZ | BF16 | FULL),
    "hpZ, stages kept gathered": (
        8,
        ZERO3
        | HPZ
        | {PP: 2, SCHEDULE: "zb_v", "global_batch_size": 12, "pipeline_max_unsharded_stages": 1},
    ),
    "qgZ": (4, {ZERO: "optim_grads"} | QGZ),
    "qgZ of nodes, tp + sp + cp": (8, ZERO3 | QGZ_OF_NODES | SP | {CP: 2} | BF16),
    "all of ZeRO++, hsdp": (8, ZERO3 | QWZ | HPZ | QGZ_OF_NODES | {HSDP: 2}),
    "all of ZeRO++, tied over pp": (8, ZERO3 | QWZ | HPZ | QGZ_OF_NODES | {PP: 2} | GPT),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    chosen(
        CASES,
        "no_shard, bf16 on the wire",
        "MTP, pp, copies of the embedding",
        "stages kept gathered",
        "tp + sp, pairs of layers recomputed in tiles",
        "cp with a window, a kind for each layer",
        "qgZ",
        "all of ZeRO++, tied over pp",
    ),
)
def test_a_step_sends_exactly_what_the_formulas_say(name: str) -> None:
    world, settings = CASES[name]
    layout = _layout(world, settings)
    for rank, steps in enumerate(run(world, _measure, settings)):
        for measured in steps:
            assert measured == by_axis(step_volumes(layout, rank)), f"rank {rank}"


def _sent_and_multiplied(rank: int, world: int, way: str) -> tuple[float, int]:
    deferred = DeferredWeights()
    with exchanging(way) as exchange, Traffic({}) as traffic, Multiplications() as work:
        column, row = ColumnParallel(exchange, deferred), RowParallel(exchange, deferred)
        linears = [Linear(3, 4), Linear(3, 4), Linear(4, 3)]
        x_tH = torch.ones(2, 3, requires_grad=True)
        row(torch.mul(*column(x_tH, *linears[:2])), linears[2]).sum().backward()
    return sum(traffic.sent.values()), work.flops


def test_tokens_in_parts_are_as_many_bytes_and_products() -> None:
    whole, *others = (run(2, _sent_and_multiplied, way) for way in WAYS if way != "tp")
    assert others == [whole, whole]
