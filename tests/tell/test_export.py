"""Settings for other trainers: names that their own parsers have read, and what goes together."""

import json
import shlex
from typing import Any

import pytest

from benchmarks.check_exports import RECORD, cases, names
from benchmarks.export_cases import LAYOUTS, layouts
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


@pytest.mark.slow
@pytest.mark.parametrize("target", KNOWN)
def test_settings_are_those_that_the_release_has_read(target: str) -> None:
    """`python -m benchmarks.check_exports --record` reads and records them."""
    used = set().union(*(names(target, text(layout, target)) for _, layout in cases()))
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
    for name, given in names.items():
        assert (name in told) == (given and ranks > 1), told
    assert (f"1/{ranks} has an effect" in told) == (any(names.values()) and ranks > 1)


def test_deepspeed_batches_add_up_over_its_data_parallel_ranks() -> None:
    for _, layout in layouts():
        said = json.loads(text(layout, "deepspeed"))
        each = said["train_micro_batch_size_per_gpu"] * said["gradient_accumulation_steps"]
        assert said["train_batch_size"] == each * layout.grid.dp
        assert said.get("sequence_parallel_size", 1) == layout.grid.cp
