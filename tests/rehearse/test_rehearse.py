"""Rehearsed ranks against the same ranks run for real over gloo, and planted errors."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fivefold.audit.watch import watching
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.presets import resolve_model
from fivefold.counts.policy import StatePolicy, layout_policy
from fivefold.data_parallel import fsdp, fsdp_internals
from fivefold.description.activations import saved_activations, total
from fivefold.description.running import Running
from fivefold.layout import Layout
from fivefold.mesh.collectives import start_row_exchange
from fivefold.optim import offload
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.memory import peak as memory
from fivefold.rehearse.agree import disagreements
from fivefold.rehearse.ledger import StepLedger
from fivefold.rehearse.report import make_report
from fivefold.rehearse.roles import rehearsed_layout, roles
from fivefold.rehearse.run import rehearse_rank, rehearse_ranks, watched_step
from fivefold.rehearse.script import GRADIENTS, Issued, Script
from fivefold.rehearse.shadow import Shadow
from fivefold.rehearse.world import pretended_world
from fivefold.tensor.deferred_weight import Work, run_works
from tests.pool import run
from tests.verify.cases import chosen, shared_groups

# Tensors without values have no address, by which to tell whether two are one.
pytestmark = pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")

TOLERANCE = 0.03  # of a rank's peak, relative to the planner's
PIPELINE = {"pipeline_model_parallel_size": 2, "global_batch_size": 4}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "replicated pipeline": ("debug-llama", 4, {**PIPELINE}),
    "sharded": ("debug-llama", 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "tensor": (
        "debug-llama",
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "precision": "bf16"},
    ),
    "tensor in parts": (
        "debug-llama",
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "tp_comm_overlap": True,
            "precision": "bf16",
            **PIPELINE,
        },
    ),
    "gathered beside the update": (
        "debug-llama",
        2,
        {
            "data_parallel_sharding_strategy": "optim",
            "overlap_param_gather_with_optimizer_step": True,
        },
    ),
    "padding alone on a rank": (
        "debug-llama",
        4,
        {"tensor_model_parallel_size": 4, "sequence_parallel": True, "vocab_size": 257},
    ),
    "context": ("debug-llama", 2, {"context_parallel_size": 2}),
    "optimizer on the host": (
        "debug-llama",
        2,
        {"data_parallel_sharding_strategy": "optim_grads", "optimizer_cpu_offload": True},
    ),
    "weights off the device": (
        "debug-llama",
        2,
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "offload_optimizer_states": True,
            "param_cpu_offload": True,
            "param_offload_path": "away",
        },
    ),
    "experts": (
        "debug-mixtral",
        4,
        {**PIPELINE, "expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"},
    ),
    "flex": (
        "debug-deepseek-v3",
        2,
        {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex"},
    ),
}


# Pieces of 3 tokens, which are no whole turns of experts: ranks send each other different numbers.
UNEVEN = {"expert_model_parallel_size": 4, "context_parallel_size": 2, "seq_length": 12}
# A rehearsal gives experts tokens in turn, whatever would assign them.
ASSIGNED = {"tensor_model_parallel_size": 2, "moe_router_load_balancing_type": ("sinkhorn",)}
OF_GPUS = {
    "uneven experts": ("debug-mixtral", 4, UNEVEN),
    "assigned experts": ("debug-mixtral", 2, {**ASSIGNED, "sequence_parallel": True}),
}


def small(name: str) -> Layout:
    model, world, settings = (LAYOUTS | OF_GPUS)[name]
    common = {"num_layers": 2, "seq_length": 32, "precision": "fp32"}
    common |= {"micro_batch_size": 1, "global_batch_size": 4}
    config = Config(resolve_model(model)).with_values(**{**common, **settings})
    return rehearsed_layout(check(config, world))


@shared_groups()
def _watched(rank: int, world: int, layout: Layout) -> Script:
    return watched_step(layout, rank)


def traffic(script: Script) -> dict[tuple[Any, ...], int]:
    """Operations of each kind by axis, of one size: how often."""
    found: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    for call in script.issued:
        found[call.op, script.axes.get(call.group), call.size, call.dtype, call.peer] += 1
    return dict(found)


@cache
def played_on_cpus(name: str) -> tuple[Layout, list[Script]]:
    """Every rank of a layout, rehearsed once for all tests."""
    layout = small(name)
    return layout, rehearse_ranks(layout, range(layout.grid.world_size), gpus=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", chosen(LAYOUTS, "sharded", "experts", "gathered beside the update")
)
def test_a_rehearsal_is_the_run(name: str) -> None:
    """On CPUs, where both take the same path: each message, and each byte held."""
    layout, played = played_on_cpus(name)
    real = run(layout.grid.world_size, _watched, layout)
    for one, other in zip(real, played, strict=True):
        assert traffic(other) == traffic(one)
        assert other.by_axis() == pytest.approx(other.sent, rel=1e-12)
        assert one.by_axis() == other.by_axis()
        assert other.peak == one.peak
    assert disagreements(real, layout.grid.name) == []
    assert disagreements(played, layout.grid.name) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "tensor in parts",
        "padding alone on a rank",
        *OF_GPUS,
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("experts", "tensor")),
    ],
)
def test_the_paths_of_gpus_send_the_same(name: str) -> None:
    layout = small(name)
    report = make_report(
        layout, name, rehearse_ranks(layout, roles(layout)), load_cluster("H100", 8)
    )
    assert report.passed, report.text()
    assert (
        report.text().splitlines()[-1].endswith("agree on every message, and send what theory says")
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", chosen([1, 2], 1))
def test_gradients_of_ranks_that_share_nothing_are_copied_whole(ranks: int) -> None:
    """By FSDP2, twice, which is most of what a layer of large experts takes in its backward."""
    model = replace(resolve_model("mixtral-8x7b"), num_layers=2, vocab_size=1024)
    few = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.01}  # or FSDP2 is not
    layout = _rehearsed(model, ranks, seq_length=256, global_batch_size=2 * ranks, **few)
    cluster = load_cluster("H100", 8)
    report = make_report(layout, "", rehearse_ranks(layout, [0]), cluster)
    assert report.passed, report.text()
    assert abs(report.deviation) < TOLERANCE
    with patch.object(memory, "layout_policy", _without_copies):
        off = make_report(layout, "", report.scripts, cluster).deviation
    assert ranks == 1 or off > 4 * TOLERANCE  # one that is alone divides no copy


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_lie_beside_weights_that_are_not_sharded(ranks: int) -> None:
    model = replace(resolve_model("mixtral-8x7b"), num_layers=2, vocab_size=1024)
    layout = _rehearsed(model, ranks, seq_length=256, global_batch_size=2 * ranks)
    report = make_report(layout, "", rehearse_ranks(layout, [0]), load_cluster("H100", 8))
    assert report.passed, report.text()
    assert abs(report.deviation) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"gradient_accumulation_fusion": False, **PIPELINE}),  # autograd widens, then adds
        (2, {"untie_embeddings_and_output_weights": False, **PIPELINE}),  # no copy is summed
        (1, {"untie_embeddings_and_output_weights": False, "global_batch_size": 1}),  # no third
        (4, {"data_parallel_sharding_strategy": "optim", **PIPELINE, "global_batch_size": 8}),
        (
            2,
            {
                "data_parallel_sharding_strategy": "optim_grads",
                "grad_reduce_in_bf16": True,
                "global_batch_size": 4,
            },
        ),
    ],
)
def test_a_large_table_in_a_small_stage(ranks: int, settings: dict[str, Any]) -> None:
    """Where a mistake about one parameter's gradient shows."""
    model = replace(resolve_model("llama3-8b"), num_layers=2, vocab_size=65536)
    layout = _rehearsed(model, ranks, seq_length=256, **settings)
    report = make_report(layout, "", rehearse_ranks(layout, [0]), load_cluster("H100", 8))
    assert report.passed, report.text()
    assert abs(report.deviation) < 0.5 * TOLERANCE, report.text()


def _rehearsed(model: ModelConfig, ranks: int, **settings: Any) -> Layout:
    """The layout of a step in bf16, of as few microbatches as show all."""
    config = Config(model).with_values(precision="bf16", **settings)
    return rehearsed_layout(check(config, ranks))


def _without_copies(layout: Layout) -> StatePolicy:
    return replace(layout_policy(layout), reduces_whole=False)


@pytest.mark.slow
def test_a_rank_keeps_no_more_between_microbatches_than_is_planned() -> None:
    """Not the message that a backward reduced last, nor what deferred weight gradients had read."""
    model = replace(resolve_model("llama3-8b"), num_layers=8, vocab_size=16384)
    layout = _rehearsed(
        model,
        4,
        seq_length=2048,
        global_batch_size=16,
        pipeline_model_parallel_size=2,
        pipeline_schedule="interleaved_1f1b",
        num_virtual_stages_per_pipeline_rank=2,
        pipeline_dx_first=True,
        data_parallel_sharding_strategy="optim_grads",
    )
    report = make_report(layout, "", [rehearse_rank(layout, 0)], load_cluster("H100", 8))
    assert abs(report.deviation) < TOLERANCE
    frees = (fsdp_internals, "free_message", _nothing), (fsdp, "run_works", _held_to_the_end)
    for careless in frees:
        with patch.object(*careless):
            assert rehearse_rank(layout, 0).peak > 1.01 * report.scripts[0].peak


@pytest.mark.slow
def test_norms_widen_no_gradients_of_their_block() -> None:
    """Where two backwards of dX run before the first weight gradients."""
    model = replace(resolve_model("llama3-8b"), num_layers=2, vocab_size=1024)
    layout = _rehearsed(
        model,
        16,
        seq_length=256,
        global_batch_size=32,
        pipeline_model_parallel_size=2,
        pipeline_schedule="zb_h1",
        data_parallel_sharding_strategy="optim_grads",
    )
    report = make_report(layout, "", [rehearse_rank(layout, 8)], load_cluster("H100", 8))
    assert abs(report.deviation) < TOLERANCE
    with patch.object(fsdp, "put_aside", _no_works):
        assert rehearse_rank(layout, 8).peak > 1.1 * report.scripts[0].peak


@pytest.mark.slow
def test_gradients_that_leave_are_not_kept_by_those_that_stay() -> None:
    """Norms' gradients await their sum over split tokens, in memory that all of a block shared."""
    model = replace(resolve_model("llama3-8b"), num_layers=2, vocab_size=1024)
    layout = _rehearsed(
        model,
        4,
        seq_length=256,
        global_batch_size=4,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        data_parallel_sharding_strategy="optim_grads_params",
        optimizer_cpu_offload=True,
    )
    kept = rehearse_rank(layout, 0)
    assert kept.held.get(GRADIENTS, 0) < 0.01 * kept.peak
    with patch.object(offload, "_own_memory", _nothing):
        assert rehearse_rank(layout, 0).held[GRADIENTS] > 0.1 * kept.peak


@pytest.mark.slow
def test_activations_that_leave_are_not_on_the_device() -> None:
    """Of layers without their norms' outputs, nearly all that is planned to go."""
    model = replace(resolve_model("debug-llama"), max_position_embeddings=4096)
    moved = _rehearsed(
        model,
        1,
        seq_length=4096,
        global_batch_size=1,
        recompute_granularity="selective",
        recompute_modules=("layernorm", "mlp"),
        fine_grained_activation_offloading=True,
        offload_modules=("attn_norm", "core_attn", "attn_proj", "mlp_norm"),
        min_offloaded_tensor_size=1,
    )
    off = {"fine_grained_activation_offloading": False, "offload_modules": ()}
    off |= {"min_offloaded_tensor_size": 1 << 20}
    kept = replace(moved, config=moved.config.with_values(**off))
    peaks = [rehearse_rank(layout, 0).peak for layout in (kept, moved)]
    running = Running.of(moved.config)
    away = 4096 * total(total(saved_activations(model, n, running)) for n in range(4)).offloaded
    assert peaks[0] - peaks[1] > 0.7 * away  # a layer's are back


def _nothing(*_: Any) -> None:
    pass


def _no_works(*_: Any) -> list[Work]:
    return []


def _held_to_the_end(works: list[Work]) -> Iterator[torch.Tensor]:
    held = list(works)
    yield from run_works(works)
    del held


@pytest.fixture(scope="module")
def scripts() -> tuple[Layout, list[Script]]:
    return played_on_cpus("experts")


def _changed(script: Script, op: str, change: Issued | None) -> Script:
    """A script of which the last operation of a kind is another one, or left out."""
    issued = list(script.issued)
    place = max(i for i, call in enumerate(issued) if call.op == op)
    issued[place : place + 1] = [] if change is None else [change]
    return replace(script, issued=tuple(issued))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "change", "told"),
    [
        ("all_reduce", None, "never enters|is all_reduce of"),
        ("receive", None, "never receives it"),
        ("send", None, "never sends it"),
    ],
)
def test_what_is_missing_is_named(
    scripts: tuple[Layout, list[Script]], op: str, change: Issued | None, told: str
) -> None:
    layout, (first, *others) = scripts
    found = disagreements([_changed(first, op, change), *others], layout.grid.name)
    assert found
    assert any(any(part in what for part in told.split("|")) for what in found), found
    assert all("rank 0" in what for what in found)


def test_other_sizes_are_named(scripts: tuple[Layout, list[Script]]) -> None:
    layout, (first, *others) = scripts
    for op in ("all_reduce", "send"):
        call = [call for call in first.issued if call.op == op][-1]
        wrong = _changed(first, op, replace(call, size=call.size + 4))
        found = disagreements([wrong, *others], layout.grid.name)
        assert found and "rank 0" in found[0], found


@pytest.mark.parametrize("op", ["send", "receive"])
def test_messages_in_another_order_are_named(scripts: tuple[Layout, list[Script]], op: str) -> None:
    """NCCL pairs messages of the same size by their order, whatever their tags."""
    layout, (first, *others) = scripts
    issued = list(first.issued)
    pp = {group for group, axis in first.axes.items() if axis == "pp"}
    calls = enumerate(issued)
    one, other = [at for at, call in calls if call.op == op and call.group in pp][:2]
    assert replace(issued[one], tag=issued[other].tag) == issued[other]
    issued[one], issued[other] = issued[other], issued[one]
    found = disagreements([replace(first, issued=tuple(issued)), *others], layout.grid.name)
    assert found and all("in its place" in what for what in found), found


def test_a_rehearsal_makes_the_groups_of_gpus() -> None:
    """A group for each direction between neighbours of a pipeline, as NCCL wants it."""
    layout = small("replicated pipeline")
    (here,) = rehearse_ranks(layout, [0])
    messages = {call.group for call in here.issued if call.op in ("send", "receive")}
    pairs = [ranks for ranks in here.groups.values() if len(ranks) == 2]
    assert len(messages) == 2
    assert {here.groups[group] for group in messages} == {(0, 2)}
    assert len(pairs) > len(set(pairs))


def test_a_circular_wait_of_three_ranks_is_named() -> None:
    """Each pair of them has one collective, and nothing that it could differ in."""

    def script(rank: int, *groups: str) -> Script:
        issued = tuple(Issued("all_reduce", g, 8, "float32", 8.0, None, 0, ()) for g in groups)
        ranks = {"01": (0, 1), "12": (1, 2), "20": (0, 2)}
        members = {g: ranks[g] for g in groups}
        return Script(rank, members, {}, issued, 0, "", {}, 0, 0, {}, 0, 0, 0.0)

    def told(rank: int) -> str:
        return f"({rank})"

    first, last = script(0, "01", "20"), script(2, "20", "12")
    (found,) = disagreements([first, script(1, "12", "01"), last], told)
    assert found.startswith("a circular wait: ") and found.count(" enters ") == 3
    assert "rank 0 (0) enters collective 1 of its 01 group before collective 1 of its 20" in found
    assert disagreements([first, script(1, "12", "01")], told) == []
    assert disagreements([first, script(1, "01", "12"), script(2, "12", "20")], told) == []


def test_a_group_that_another_rank_does_not_make_is_named(
    scripts: tuple[Layout, list[Script]],
) -> None:
    layout, (first, *others) = scripts
    pp = next(name for name, axis in first.axes.items() if axis == "pp")
    lacking = replace(first, groups={n: ranks for n, ranks in first.groups.items() if n != pp})
    lacking = replace(lacking, issued=tuple(c for c in first.issued if c.group != pp))
    found = disagreements([lacking, *others], layout.grid.name)
    assert any("does not" in what for what in found), found


@pytest.mark.slow
def test_a_layout_of_thousands_of_ranks() -> None:
    """A mesh like the published one of DeepSeek-V3 around a small model: one of 2048 ranks."""
    settings: dict[str, Any] = {
        "num_layers": 8,
        "moe_layer_freq": "1",
        "num_experts": 64,
        "pipeline_model_parallel_size": 8,
        "pipeline_schedule": "1f1b",
        "expert_model_parallel_size": 64,
        "data_parallel_sharding_strategy": "optim",
        "seq_length": 64,
        "micro_batch_size": 1,
        "global_batch_size": 256 * 32,
        "mtp_num_layers": 0,
    }
    config = Config(resolve_model("debug-deepseek-v3")).with_values(**settings)
    layout = rehearsed_layout(check(config, 2048))
    assert layout.num_microbatches < 32
    script = rehearse_rank(layout, 1024)
    assert script.by_axis() == pytest.approx(script.sent, rel=1e-12)
    assert len(script.groups) > 4


def test_what_is_made_again_is_told_by_identity() -> None:
    """Tensors on shapes all have the same address, by which nothing may be taken for another."""
    settings = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
    short = {"seq_length": 32, "micro_batch_size": 1, "global_batch_size": 1, "num_layers": 1}
    config = Config(resolve_model("debug-llama")).with_values(**short, precision="fp32")
    whole, again = (
        rehearse_rank(rehearsed_layout(check(c, 1)), 0, gpus=False)
        for c in (config, config.with_values(**settings))
    )
    # Discarded are the outputs of two norms, and no queries, keys or values beside them.
    norms = 2 * 32 * config.model.hidden_size * 4
    assert 0 <= whole.peak - again.peak <= norms


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_not_where_another_was(rank: int) -> None:
    """torch keeps what operations give by mesh, and a mesh equals that of another rank; and it
    names a rank before each line of an error."""
    shown = sys.excepthook
    for place in (1 - rank, rank):
        with pretended_world(place, 2, gpus=False):
            assert sys.excepthook is shown
            mesh = init_device_mesh("cpu", (2,))
            part = DTensor.from_local(torch.ones(3, 5), mesh, [Shard(0)]).detach()
            assert part.device_mesh.get_coordinate() == (place,)


def test_integers_that_ranks_exchange_are_as_many_as_they_send() -> None:
    """Of uneven parts: every rank is taken to send what this one sends to itself."""
    group = dist.distributed_c10d._get_default_group
    with pretended_world(1, 2, gpus=True), Shadow(gpus=True):
        out = torch.empty(6, dtype=torch.int64)
        start_row_exchange(torch.arange(7), out, [4, 3], [3, 3], group()).wait()
    assert out.tolist() == [4, 5, 6, 4, 5, 6]


def test_all_numbers_of_a_tensor_are_read_at_once() -> None:
    ledger = StepLedger()
    with patch.object(ledger, "read_by_host") as read, watching(Shadow(gpus=True), ledger):
        assert torch.empty(3, 2).tolist() == [[1.0, 1.0]] * 3
        assert torch.empty(2, 0).tolist() == [[], []]
    assert read.call_count == 1
