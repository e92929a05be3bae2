"""Each setting is exported, or named as one that the trainer has not, or without meaning there."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Set
from typing import Any

import pytest

from benchmarks.export_cases import CHANGES, changed, layouts
from fivefold.config.config import SECTIONS
from fivefold.config.model import INITIAL
from fivefold.config.settings import settings_of
from fivefold.optim.schedule import learning_rate
from fivefold.pipeline.split.layout import CUTTING, SplitSettings
from fivefold.pipeline.split.stages import layout_string
from fivefold.tell.export import settings as exporting
from fivefold.tell.export.settings import OWN, Settings
from fivefold.tell.export.targets import export
from fivefold.tell.export.torchtitan_models import WITHOUT_MEANING, known
from tests.predict.layouts import planned

TRAINERS = ("megatron", "torchtitan", "deepspeed")
SAME_LAYOUT = {"data_parallel_shard_size"}  # what the ranks leave, whether it is said or not
IN_OTHER_WORDS: Mapping[str, Mapping[str, str]] = {
    "megatron": {
        "add_bias_linear": "disable-bias-linear",
        "data_parallel_sharding_strategy": "use-megatron-fsdp",
        "gated_linear_unit": "swiglu",
        "min_offloaded_tensor_size": "min-offloaded-tensor-size",
        "muon_nesterov": "muon-use-nesterov",
        "no_rope_freq": "no-rope-freq",
        "pipeline_model_parallel_layout": "pipeline-model-parallel-layout",
        "precision": "bf16",
        "split": "split",
    },
    "torchtitan": {
        "deterministic_mode": "deterministic",
        "full_validation": "steps",
        "data_parallel_sharding_strategy": "fsdp_reshard_after_forward",
        "distributed_timeout_minutes": "train_timeout_seconds",
        "lr_wsd_decay_iters": "decay_ratio",
        "lr_wsd_decay_style": "decay_type",
        "min_lr": "min_lr_factor",
        "param_cpu_offload": "enable_cpu_offload",
        **dict.fromkeys(CUTTING, "module_fqns_per_model_part"),
        "precision": "mixed_precision_param",
        "recompute_granularity": "full",  # a subcommand
        "compile": "enable",
    },
    "deepspeed": {
        "data_parallel_sharding_strategy": "stage",
        "grad_reduce_in_bf16": "communication_data_type",
        "initial_loss_scale": "initial_scale_power",
        "lr_decay_iters": "total_num_steps",
        "lr_decay_style": "type",
        "lr_warmup_init": "warmup_min_ratio",
        "min_lr": "cos_min_ratio",
        "optimizer": "type",
        "optimizer_cpu_offload": "offload_optimizer",
        "param_cpu_offload": "offload_param",
        "overlap_grad_reduce": "overlap_comm",
        "overlap_param_gather": "stage3_prefetch_bucket_size",
        "precision": "enabled",
    },
}
"""The setting of each trainer that changes with one of ours, where neither name nor value shows it;
`benchmarks.check_exports` compares what the trainers make of them."""


def test_every_setting_is_looked_at() -> None:
    """A new one needs a value in `benchmarks.export_cases`, and a place in each export."""
    assert set(CHANGES) == {s.name for section in SECTIONS.values() for s in settings_of(section)}
    assert set(CHANGES) >= OWN


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_exported_or_named(name: str) -> None:
    before, after = changed(name)
    for target in TRAINERS:
        old, new = export(before, target), export(after, target)
        told = [sentence for sentence in new.missing if sentence not in old.missing]
        without = OWN | SAME_LAYOUT | set(WITHOUT_MEANING if target == "torchtitan" else ())
        if name in without:
            assert (new.text, told) == (old.text, [])
        elif not any(re.search(rf"\b{name}\b", sentence) for sentence in told):
            moved = {*pairs(target, old.text)} ^ {*pairs(target, new.text)}
            assert shows(name, target, moved), (target, moved, told)


def shows(name: str, target: str, moved: Set[tuple[str, str]]) -> bool:
    """Whether what changed in an export is the setting by its name, its new value, or another."""
    value, word = CHANGES[name].value, IN_OTHER_WORDS[target].get(name)
    if word is None and not isinstance(value, bool):
        parts = {part for _, text in moved for part in re.split(r"[][ ,]+", text)}
        wanted = value if isinstance(value, tuple) else (value,)
        return any(
            {str(part), f"{part:g}" if isinstance(part, float) else ""} & parts for part in wanted
        )
    names = {key.split(".")[-1].replace("-", "_") for key, _ in moved}
    return any(key.endswith((word or name).replace("-", "_")) for key in names)


def pairs(target: str, text: str) -> Iterator[tuple[str, str]]:
    """(setting, value as text) of an export."""
    if target == "deepspeed":
        yield from keys(json.loads(text))
        return
    for line in text.replace("\\\n", "\n").split("\n"):
        words = shlex.split(line)
        if words:
            yield words[0].lstrip("-"), " ".join(words[1:])


def keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield prefix + key, ""
            yield from keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value)


def test_a_setting_that_no_export_asks_for_is_named() -> None:
    """So that one that is new here cannot be forgotten there."""
    layout = planned("llama3-8b", 8, label_smoothing=0.125, save="here", log_interval=7)
    said = Settings(layout.config)
    said.mention(*CHANGES.keys() - {"label_smoothing", "save", "log_interval"})
    assert list(said.unread("nowhere")) == ["nowhere: label_smoothing = 0.125"]
    said["label_smoothing"]
    assert not list(said.unread("nowhere"))


@pytest.mark.parametrize("value", [1.23456789e-3, 1e-10, 500_000.0, 0.1 + 0.2])
def test_numbers_keep_all_their_digits(value: float) -> None:
    (text,) = exporting.flag("lr", value)
    assert float(text.split()[1]) == value


PIPELINES = [
    {"pp": 4, "pipeline_model_parallel_layout": "loop: Et*4 | (t*4|)*6 t*4 L"},
    {"pp": 2, "pipeline_model_parallel_layout": "E((t*5|)*2)*3 t*2 | L"},
    {"pp": 4, "pipeline_model_parallel_layout": "auto"},
    {"pp": 4, "pipeline_model_parallel_layout": "auto", "virtual": 2},
    {"pp": 4, "virtual": 2},
    {"pp": 4, "decoder_first_pipeline_num_layers": 5},
    {"pp": 2, "decoder_last_pipeline_num_layers": 0},
    {"pp": 4, "pipeline_schedule": "zb_v"},
    {
        "pp": 2,
        "pipeline_schedule": "v_half",
        "pipeline_model_parallel_layout": "v:Et*9|t*7|t*8|t*8L",
    },
    {"pp": 4, "pipeline_schedule": "dualpipe"},
    {"pp": 4, "pipeline_schedule": "interleaved_zb", "virtual": 4},
    {"pp": 4, "pipeline_schedule": "gpipe", "virtual": 2},
    {"pp": 4, "pipeline_schedule": "synthesised"},
    {"pp": 4, "virtual": 2, "gbs": 24},
]


@pytest.mark.parametrize("settings", PIPELINES, ids=lambda s: " ".join(map(str, s.values())))
def test_what_megatron_runs_is_written_in_its_words(settings: dict[str, Any]) -> None:
    """Stages as they are where it can run them, else 1F1B, with what that costs."""
    layout = planned("llama3-8b", 8, **{"gbs": 64, **settings})
    found = export(layout, "megatron")
    said = dict(pairs("megatron", found.text))
    text = said.get("pipeline-model-parallel-layout")
    virtual = said.get("num-virtual-stages-per-pipeline-rank")
    first, last = (said.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    split = SplitSettings(
        32,
        layout.grid.pp,
        virtual=virtual and int(virtual),
        first=first and int(first),
        last=last and int(last),
        layout=text,
    ).split()
    if text is not None:
        assert text == layout_string(split.stages) and not set(text) & set(" :,")
    costs = [sentence for sentence in found.missing if "pipeline_schedule" in sentence]
    costs += [sentence for sentence in found.missing if "by the model's arithmetic" in sentence]
    if split == layout.split and layout.schedule in ("1f1b", "interleaved_1f1b"):
        assert not costs
    else:
        assert any(
            re.search("a step takes .*; ?|a step takes .*, and the fullest rank", s) for s in costs
        )


def test_a_schedule_in_its_place_costs_what_is_said() -> None:
    halved = planned("llama3-8b", 8, pp=8, gbs=64, pipeline_schedule="v_half")
    for target in TRAINERS:
        told = " ".join(export(halved, target).missing)
        assert re.search(r"times as long, and the fullest rank holds activations of 8", told)
        assert "not 5" in told
    same = planned("llama3-8b", 8, pp=8, gbs=64)
    assert "arithmetic" not in " ".join(export(same, "megatron").missing)


RATES = [
    {"lr_decay_style": "constant"},
    {"lr_decay_style": "constant", "lr_warmup_iters": 7, "lr_warmup_init": 1e-5},
    {"lr_decay_style": "linear", "min_lr": 1e-5},
    {"lr_decay_style": "linear", "min_lr": 1e-5, "lr_warmup_iters": 1, "lr_warmup_init": 1e-5},
    {"lr_decay_style": "linear", "lr_warmup_iters": 9, "lr_decay_iters": 80},
    {"lr_decay_style": "cosine", "min_lr": 3e-5},
    {"lr_decay_style": "cosine", "min_lr": 3e-5, "lr_decay_iters": 60},
]


@pytest.mark.parametrize("settings", RATES)
def test_deepspeed_has_our_learning_rates(settings: dict[str, Any]) -> None:
    """By a linear and a cosine of its own kind, at the counts that it is told to run through."""
    layout = planned("llama3-8b", 8, **settings)
    found = json.loads(export(layout, "deepspeed").text)
    told = " ".join(export(layout, "deepspeed").missing)
    assert "warm-up" not in told and "warms up" not in told
    params, kind = (
        found.get("scheduler", {}).get("params", {}),
        found.get("scheduler", {}).get("type"),
    )
    optimizer, training = layout.config.optimizer, layout.config.training
    assert found["optimizer"]["params"]["lr"] == learning_rate(0, optimizer, training)
    if kind is None:
        assert optimizer.lr_decay_style == "constant"
        return
    warm, shift = params["warmup_num_steps"], params["last_batch_iteration"]
    assert warm >= 2
    for step in (1, 2, 5, 9, 50, 99):
        count = step + shift
        if kind == "WarmupCosineLR":
            assert count >= warm  # no warm-up at all, which it would run late
            continue
        share = min(count / warm, 1.0)
        if kind == "WarmupDecayLR" and count >= warm:
            total = params["total_num_steps"]
            share = max(0.0, (total - count) / (total - warm))
        rate = params["warmup_min_lr"] + share * (params["warmup_max_lr"] - params["warmup_min_lr"])
        assert rate == pytest.approx(learning_rate(step, optimizer, training), rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20}, "no scheduler for WSD"),
        ({"lr_warmup_iters": 9}, "warm-up of 9 steps (lr_warmup_iters) is a step late"),
        ({"lr_warmup_iters": 1}, "its cosine begins later than after 1"),
        (
            {"lr_decay_style": "linear", "lr_warmup_iters": 9, "min_lr": 1e-5},
            "warms up from min_lr",
        ),
    ],
)
def test_deepspeed_names_learning_rates_that_it_lacks(settings: dict[str, Any], words: str) -> None:
    assert words in " ".join(export(planned("llama3-8b", 8, **settings), "deepspeed").missing)


def test_torchtitan_decays_end_where_ours_do() -> None:
    """Its rate falls on below zero after its last step, and its configurations have ratios."""
    short = export(planned("llama3-8b", 8, lr_decay_iters=80), "torchtitan")
    said = dict(pairs("torchtitan", short.text))
    assert said["lr_scheduler.total_steps"] == "100"
    assert said["lr_scheduler.decay_ratio"] == "None"
    assert "lr_decay_iters = 80" in " ".join(short.missing)
    wsd = planned("llama3-8b", 8, lr_decay_style="WSD", lr_wsd_decay_iters=20)
    assert (
        dict(pairs("torchtitan", export(wsd, "torchtitan").text))["lr_scheduler.decay_ratio"]
        == "0.2"
    )
    none = export(planned("llama3-8b", 8, clip_grad=0.0), "torchtitan")
    assert dict(pairs("torchtitan", none.text))["training.max_norm"] == "inf"


def test_torchtitan_warms_up_as_long_and_cannot_decay_meanwhile() -> None:
    warm = export(
        planned("llama3-8b", 8, lr_decay_style="constant", lr_warmup_iters=150), "torchtitan"
    )
    assert dict(pairs("torchtitan", warm.text))["lr_scheduler.total_steps"] == "150"
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95}
    for warm_up, told in ((5, False), (6, True)):
        found = export(planned("llama3-8b", 8, **wsd, lr_warmup_iters=warm_up), "torchtitan")
        assert ("lr_wsd_decay_iters = 95 would begin" in " ".join(found.missing)) is told


def test_megatron_divides_the_loss_by_the_tokens_of_the_global_batch() -> None:
    """As is done here; its default weighs microbatches alike, whatever their valid tokens."""
    plain = export(planned("llama3-8b", 8), "megatron")
    assert "calculate-per-token-loss" in dict(pairs("megatron", plain.text))
    graphs = export(
        planned("llama3-8b", 8, cuda_graph_impl="local", reset_attention_mask=False), "megatron"
    )
    assert "calculate-per-token-loss" not in dict(pairs("megatron", graphs.text))
    assert "--calculate-per-token-loss" in " ".join(graphs.missing)


def test_megatron_accepts_a_warm_up_beyond_the_last_step() -> None:
    """It wants a decay after it, also of a constant rate."""
    warm = planned("llama3-8b", 8, lr_decay_style="constant", lr_warmup_iters=150)
    assert dict(pairs("megatron", export(warm, "megatron").text))["lr-decay-iters"] == "151"


MODEL = [s.name for s in settings_of(SECTIONS["model"]) if CHANGES[s.name].needs == {}]


@pytest.mark.parametrize("name", MODEL)
def test_torchtitan_trains_a_model_under_its_own_name_alone(name: str) -> None:
    before, after = changed(name)
    assert known(before.config.model, before.config.training) == "llama3_8b"
    same = name in (*WITHOUT_MEANING, *INITIAL)
    assert (known(after.config.model, after.config.training) == "llama3_8b") is same
    told = " ".join(export(after, "torchtitan").missing)
    assert same or f"of llama3_8b it differs in {name} = " in told


def test_torchtitan_computes_in_bf16_where_the_plan_does() -> None:
    """Its llama3_405b converts its linears to Float8, in rows."""
    settings = {"tp": 8, "pp": 2, "pipeline_model_parallel_layout": "auto"}
    wide = planned("llama3-405b", 64, **settings)
    assert "--config" not in export(wide, "torchtitan").text
    assert "llama3_405b computes in 8 bits" in " ".join(export(wide, "torchtitan").missing)
    narrow = planned("llama3-405b", 64, fp8_format="e4m3", fp8_recipe="rowwise", **settings)
    assert "--config llama3_405b" in export(narrow, "torchtitan").text


@pytest.mark.parametrize(
    ("settings", "schedule"),
    [
        ({}, "1F1B"),
        ({"gbs": 8}, "GPipe"),  # two microbatches are too few for its 1F1B of four ranks
        ({"virtual": 2}, "Interleaved1F1B"),
        (  # 14 microbatches are no equal rounds of 4 and more
            {
                "virtual": 2,
                "gbs": 56,
                "microbatch_group_size_per_virtual_pipeline_stage": 7,
            },
            "1F1B",
        ),
        ({"pipeline_schedule": "gpipe", "virtual": 2}, "LoopedBFS"),
        ({"pipeline_schedule": "interleaved_zb", "virtual": 2}, "InterleavedZeroBubble"),
        ({"pipeline_schedule": "zb_v"}, "ZBVZeroBubble"),
        ({"pipeline_schedule": "v_min"}, "1F1B"),
        ({"pipeline_schedule": "zb_h2"}, "1F1B"),
        ({"pipeline_schedule": "dualpipe"}, "1F1B"),
    ],
)
def test_torchtitan_runs_what_its_classes_can(settings: dict[str, Any], schedule: str) -> None:
    layout = planned("llama3-8b", 16, **{"pp": 4, "gbs": 64, **settings})
    found = export(layout, "torchtitan")
    said = dict(pairs("torchtitan", found.text))
    assert said["parallelism.pipeline_parallel_schedule"] == schedule
    stages = said["parallelism.module_fqns_per_model_part"].split()
    own = len(stages) == len(layout.split.stages) and (schedule, layout.schedule) in {
        ("1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("LoopedBFS", "gpipe"),
        ("InterleavedZeroBubble", "interleaved_zb"),
        ("ZBVZeroBubble", "zb_v"),
    }
    assert own or len(stages) == 4
    assert ("a step takes" in " ".join(found.missing)) is not own


@pytest.mark.parametrize("name", ["dense", "in a V"])
def test_torchtitan_is_told_what_its_configurations_would_choose(name: str) -> None:
    """llama3_405b compiles, deepseek_v3 decays by a ratio, llama3 profiles."""
    layout = dict(layouts())[name]
    said = dict(pairs("torchtitan", export(layout, "torchtitan").text))
    for setting in ("total_steps", "decay_ratio", "decay_type", "min_lr_factor", "warmup_steps"):
        assert f"lr_scheduler.{setting}" in said
    assert {"compile.enable", "compile.no_enable"} & set(said)
    assert {
        "compile.enable_async_tensor_parallel",
        "compile.no_enable_async_tensor_parallel",
    } & set(said)
    assert "profiler.no_enable_profiling" in said and "validator.no_enable" in said
