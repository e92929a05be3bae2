"""Jobs of torchtitan in settings: nothing is read and ignored, what was exported comes back, and
models have as many parameters as there.
"""

import json
import re
import shlex
from collections.abc import Iterator
from math import cos, pi
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.config.config import SETTINGS, Config
from fivefold.config.megatron_job.command import ScriptEnvironment
from fivefold.config.model import ModelConfig
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.sources import read_config, to_toml
from fivefold.config.torchtitan_job.command import job_of_script, job_of_words
from fivefold.config.torchtitan_job.file import is_text_of_torchtitan, read_text_of_torchtitan
from fivefold.config.torchtitan_job.flavours import FLAVOURS, model_of
from fivefold.config.torchtitan_job.job import job_of
from fivefold.config.torchtitan_job.releases import IN_TOML, defaults_of, known
from fivefold.config.torchtitan_job.saved import job_of_log, job_of_saved
from fivefold.config.torchtitan_job.settings import translate
from fivefold.config.translation import Translation
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.optim.schedule import learning_rate
from fivefold.tell.export.settings import in_steps
from fivefold.tell.export.targets import export
from fivefold.tell.export.torchtitan_models import differences
from tests.config.test_deepspeed_job import laid_out, with_value

COVERED = (
    *(
        "tensor_model_parallel_size",
        "sequence_parallel",
        "context_parallel_size",
        "tp_comm_overlap",
    ),
    *("pipeline_model_parallel_size", "expert_model_parallel_size", "deterministic_mode", "seed"),
    *("data_parallel_sharding_strategy", "global_batch_size", "micro_batch_size", "seq_length"),
    *("train_iters", "precision", "clip_grad", "lr", "adam_beta1", "adam_beta2", "adam_eps"),
    *("weight_decay", "eval_interval", "full_validation", "recompute_granularity", "compile"),
    *("param_cpu_offload", "fp8_format", "fp8_recipe"),
)
"""Settings that a command line can say."""
DENSE: dict[str, Any] = {
    "job": {"description": "a job", "dump_folder": "./out"},
    "model": {"name": "llama3", "flavor": "debugmodel", "converters": ["float8"]},
    "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
    "lr_scheduler": {"warmup_steps": 2, "decay_ratio": 0.8, "decay_type": "cosine"},
    "training": {"local_batch_size": 8, "global_batch_size": 128, "seq_len": 256, "steps": 10},
    "parallelism": {
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "context_parallel_degree": 2,
        "enable_async_tensor_parallel": True,
    },
    "checkpoint": {"enable": True, "interval": 500, "initial_load_path": "a"},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "compile": {"enable": True, "components": ["model", "loss"]},
    "quantize": {"linear": {"float8": {"recipe_name": "rowwise", "filter_fqns": ["output"]}}},
    "validation": {"enable": True, "freq": 5, "steps": 10, "local_batch_size": 8},
    "debug": {"seed": 7},
    "comm": {"init_timeout_seconds": 600},
}
EXPERTS: dict[str, Any] = {
    "model": {"name": "deepseek_v3", "flavor": "debugmodel"},
    "lr_scheduler": {"min_lr_factor": 0.1},
    "training": {"dtype": "bfloat16", "max_norm": 2.0, "enable_cpu_offload": False},
    "parallelism": {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 4,
        "expert_parallel_degree": 4,
        "expert_tensor_parallel_degree": 1,
        "fsdp_reshard_after_forward": "never",
        "expert_parallel_comm_backend": "deepep",
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    "profiling": {"enable_profiling": True},
    "metrics": {"enable_wandb": True},
}
OLD: dict[str, Any] = {
    "model": {"name": "llama3", "flavor": "8B", "tokenizer_path": "a/tokenizer.model"},
    "training": {"compile": True, "seed": 3, "steps": 20, "enable_cpu_offload": True},
    "lr_scheduler": {"lr_min": 0.1, "decay_type": "sqrt"},
    "parallelism": {
        "data_parallel_shard_degree": 8,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_split_points": ["layers.14"],
        "pipeline_parallel_microbatch_size": 2,
    },
    "checkpoint": {"enable_checkpoint": True},
    "float8": {"enable_fsdp_float8_all_gather": True},
    "activation_checkpoint": {"mode": "full"},
}
JOBS = (DENSE, EXPERTS, OLD)
GPT_OSS: dict[str, Any] = {"model": {"name": "gpt_oss", "flavor": "20b"}}


def of(tables: dict[str, Any], ranks: int | None = None) -> Translation:
    return translate(job_of(tables, {}), ranks)


def trained(found: Translation) -> Config:
    config = read_config(**found.values)
    return without_orphans(config, (), deciding=SETTINGS)[0]


def outcome(tables: dict[str, Any]) -> tuple[Any, ...]:
    """What it is here, and what of it was named; nothing of a job that is refused."""
    try:
        found = of(tables)
        read_config(**found.values)
    except ConfigError:
        return ()
    return found.values, found.lost, found.harmless, found.ranks


def command_of(text: str) -> list[str]:
    """The words of an export, of a model that torchtitan has not as one that it has."""
    words = shlex.split(text.replace("\\\n", " "))
    known_there = "--module" in words
    return words if known_there else ["--module", "llama3", "--config", "llama3_debugmodel", *words]


def differing(layout: Layout) -> list[str]:
    """What of a layout does not come back, besides what its export named."""
    found, ours = export(layout, "torchtitan"), in_steps(layout)[0].config
    named, ranks = " ".join(found.missing), layout.grid.world_size
    job, its_model = job_of_words(command_of(found.text), None), "--module" in found.text
    back = translate(job, ranks, model_given=not its_model)
    given = {} if its_model else {"model": "debug-llama"}
    theirs = read_config(**given, **back.values)
    wrong = [
        f"{name} is {ours.value(name)!r}, and was made {theirs.value(name)!r}"
        for name in COVERED
        if not re.search(rf"\b{name}\b", named) and not _otherwise(name, ours, named)
        if ours.value(name) != theirs.value(name)
    ]
    wrong += unlike_rates(ours, theirs, named)
    if its_model:
        wrong += unlike_models(ours.model, theirs.model)
    if its_model and layout.grid.pp > 1 and not wrong and "pipeline_schedule" not in named:
        made = check(without_orphans(theirs, (), deciding=SETTINGS)[0], ranks)
        if (made.split, made.schedule) != (layout.split, layout.schedule):
            wrong.append(f"{layout.split} became {made.split}, {made.schedule}")
    return wrong


def _otherwise(name: str, ours: Config, named: str) -> bool:
    """Whether an export says a setting in other words, which differ from those of the setting."""
    sharding = ours.parallel.data_parallel_sharding_strategy
    return {
        # ZeRO-1 is what it never gathers again, and DDP of one rank is nothing.
        "data_parallel_sharding_strategy": sharding in ("optim", "optim_grads"),
        "recompute_granularity": ours.memory.recompute_granularity == "selective",
        "micro_batch_size": False,
        "eval_interval": not ours.training.evaluates,
        "full_validation": not ours.training.evaluates,
        "fp8_recipe": ours.training.fp8_format is None,
        "tp_comm_overlap": "compile" in named,
    }.get(name, False)


def unlike_rates(ours: Config, theirs: Config, named: str) -> list[str]:
    """Steps with other rates, without a warm-up or an end that its export named."""
    if any(word in named for word in ("lr_decay_style", "lr_wsd_decay_", "lr_decay_iters")):
        return []
    training = ours.training
    first = ours.optimizer.lr_warmup_iters if "lr_warmup_init" in named else 0
    steps = range(min(first, training.train_iters), training.train_iters)
    return [
        f"step {n} has a rate of {one}, and was made {other}"
        for n in steps[:: max(1, len(steps) // 50)]
        if abs(
            (one := learning_rate(n, ours.optimizer, training))
            - (other := learning_rate(n, theirs.optimizer, theirs.training))
        )
        > 1e-9 * ours.optimizer.lr
    ]


def unlike_models(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """What determines the function and differs, but for the balancing that its export names."""
    found = differences(ours, theirs)
    found.pop("moe_router_enable_expert_bias", None)
    return [f"{name} is {one!r}, and was made {other!r}" for name, (one, other) in found.items()]


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 20))]
)
def test_what_was_exported_comes_back(part: int) -> None:
    for name, layout in laid_out(part, 20):
        assert not differing(layout), name


def test_a_value_that_is_lost_on_the_way_shows() -> None:
    _, layout = next(laid_out(0, 20))
    words = command_of(export(layout, "torchtitan").text)
    changed = ["--training.max_norm", "7.0", "--lr_scheduler.decay_ratio", "0.25"]
    back = translate(job_of_words([*words, *changed], None), layout.grid.world_size)
    assert back.values["clip_grad"] == 7.0
    assert unlike_rates(layout.config, read_config(**back.values), "")


def test_a_job_that_is_exported_again_is_the_same() -> None:
    """Warm-ups included, which are a step ahead there."""
    for tables, ranks in ((DENSE, 16), (OLD, 16)):
        config = trained(of(tables, ranks)).with_values(fp8_format=None, fp8_param_gather=False)
        layout = check(without_orphans(config, (), deciding=SETTINGS)[0], ranks)
        assert not differing(layout)
        assert "lr_warmup_init" not in " ".join(export(layout, "torchtitan").missing)


def every_flavour() -> Iterator[tuple[str, str, str, int]]:
    for release, counts in known().parameters.items():
        for name, count in counts.items():
            module, flavour = name.split()
            if flavour in FLAVOURS[module]:
                yield release, module, flavour, count


def test_models_have_as_many_parameters_as_there() -> None:
    """Those that `benchmarks.torchtitan_settings` built of torchtitan's own classes."""
    flavours = list(every_flavour())
    assert len(flavours) > 60
    for release, module, flavour, count in flavours:
        if module == "gpt_oss" and release < "0.2.2":  # a router without a bias, which is named
            assert "before 0.2.2 its router has no bias" in " ".join(of(GPT_OSS, 8).lost)
            continue
        model = model_of(module, flavour, release, 4096)
        assert count_parameters(model, padded=False).total == count, (release, module, flavour)


def test_defaults_of_releases_differ_only_in_what_is_not_read() -> None:
    """So that a job which several releases know is the same in each."""
    read = {path for tables in JOBS for path in read_paths(tables)}
    for release in known().settings:
        if release < IN_TOML:
            old, new = defaults_of(release), defaults_of(IN_TOML)
            differ = {path for path in old if path in new and old[path] != new[path]}
            assert not differ & read - {"job.dump_folder", "model.hf_assets_path"}


def read_paths(tables: dict[str, Any]) -> set[str]:
    job = job_of(tables, {})
    translate(job)
    return job._read


PATHS = sorted({path for tables in JOBS for path in read_paths(tables)})


def test_no_setting_is_read_and_ignored() -> None:
    """Each that is asked for changes what is made of some job, is named, or is refused."""
    assert len(PATHS) > 70
    values = (True, False, 3, 0.25, "never", "alltoall", "full", "other", ["layers.2"], ["other"])
    ignored = [
        path
        for path in PATHS
        if all(
            outcome(with_value(tables, path, value)) == outcome(tables)
            for tables in JOBS
            for value in values
        )
    ]
    assert not ignored


@pytest.mark.parametrize("tables", JOBS)
def test_jobs_of_all_kinds_are_translated(tables: dict[str, Any]) -> None:
    found = of(tables)
    check(trained(found), found.ranks or 0)


extremes = st.sampled_from((float("nan"), float("inf"), 10**400, 1e300, -1, 2000))
numbers = st.integers(-2, 9) | st.floats() | extremes | st.booleans() | st.none()
anything = st.recursive(
    numbers | st.text(max_size=5) | st.sampled_from(("never", "op", "float8", "1F1B")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(data=st.data())
def test_any_job_is_translated_or_refused_by_name(data: st.DataObject) -> None:
    tables: dict[str, Any] = data.draw(st.sampled_from(JOBS))
    paths = st.sampled_from([*PATHS, "training", "model", "training.stepz"])
    for path in data.draw(st.lists(paths, max_size=3)):
        tables = with_value(tables, path, data.draw(anything))
    try:
        found = of(tables, data.draw(st.none() | st.integers(1, 64)))
    except ConfigError as error:
        assert str(error)
    else:
        assert set(found.values) and all(found.lost)


def test_degrees_schedules_and_recomputation_drawn_together_train_here() -> None:
    """What torchtitan would run is never refused by the preview."""
    random = Random(0)
    for _ in range(40):
        replicate, shard, tp, pp, cp = (random.choice((1, 2)) for _ in range(5))
        virtual = random.choice(("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "LoopedBFS"))
        parallelism = {
            "data_parallel_replicate_degree": replicate,
            "data_parallel_shard_degree": shard,
            "tensor_parallel_degree": tp,
            "pipeline_parallel_degree": pp,
            "context_parallel_degree": cp,
            "pipeline_parallel_schedule": virtual,
            "fsdp_reshard_after_forward": random.choice(("default", "always", "never")),
            "enable_async_tensor_parallel": random.random() < 0.5,
        }
        mode, option = random.choice((("none", "2"), ("full", "2"), ("selective", "op")))
        tables = {
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": mode, "selective_ac_option": option},
            "compile": {"enable": random.random() < 0.5},
            "model": {"converters": random.choice(([], ["float8"]))},
            "training": {"seq_len": 256, "local_batch_size": 8, "steps": 20},
        }
        found = of(tables)
        assert found.ranks == replicate * shard * tp * pp * cp
        check(trained(found), found.ranks)


def to_text(tables: dict[str, Any], before: str = "") -> str:
    lines = [f"[{before}]"] if before else []
    lines += [
        f"{name} = {json.dumps(value)}"
        for name, value in tables.items()
        if not isinstance(value, dict)
    ]
    inner = [
        to_text(value, f"{before}.{name}" if before else name)
        for name, value in tables.items()
        if isinstance(value, dict)
    ]
    return "\n".join([*lines, *inner, ""])


def test_a_script_changes_a_file_as_torchtitan_does(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "a.toml").write_text(to_text(DENSE))
    (tmp_path / "scripts").mkdir()
    flags = "--training.steps 7 --compile.no-enable --optimizer.lr=1e-3 --model.converters a,b"
    for script in (
        f"torchrun --nproc_per_node=16 -m torchtitan.train --job.config_file jobs/a.toml {flags}",
        f"CONFIG_FILE=jobs/a.toml NGPU=16 ./run_train.sh {flags}",
        f'C="jobs/a.toml"\nN=16\nsrun torchrun --nproc_per_node $N torchtitan/train.py '
        f'--job.config_file "$C" {flags}\n',
    ):
        assert is_text_of_torchtitan(script, "job.sh")
        job = job_of_script(script, ScriptEnvironment(script=tmp_path / "scripts" / "job.sh"))
        assert job.ranks == 16
        assert job.get("training.steps") == 7 and job.get("optimizer.lr") == 1e-3
        assert job.get("compile.enable") is False and job.get("model.converters") == ["a", "b"]
        assert job.get("training.seq_len") == 256


def test_what_is_saved_and_logged_is_the_same_job() -> None:
    job = job_of(DENSE, {})
    whole = {**defaults_of(IN_TOML), **job.given}
    nested: dict[str, Any] = {}
    for path, value in whole.items():
        nested = with_value(nested, path, value)
    log = "[rank0]:2026 - INFO - Running with configs: " + json.dumps(nested, indent=2)
    log = log.replace("\n", "\n[rank0]:") + "\n[rank0]:step 1"
    for again in (job_of_saved(nested), job_of_log(log)):
        found = translate(again, 16)
        assert found.values == translate(job_of(DENSE, {}), 16).values


def python_job(name: str) -> dict[str, Any]:
    """What a start of a configuration of 0.3.0 saves, as far as it is read."""
    each, found = known().configurations[name], dict(known().settings["0.3.0"])
    found |= each.values
    nested: dict[str, Any] = {}
    groups = {path: value for path, value in found.items() if "param_groups" in path}
    for path, value in found.items():
        if path not in groups and path != "activation_checkpoint.mode":
            nested = with_value(nested, path, value)
    kwargs = {p.rpartition(".")[2]: v for p, v in groups.items() if "optimizer_kwargs" in p}
    group = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": kwargs}
    nested["optimizer"]["param_groups"] = [group]
    model = model_of(each.module, each.flavour, "0.3.0", 1)
    sizes = {"dim": model.hidden_size, "vocab_size": model.vocab_size}
    sizes |= {"layers": [{}] * model.num_layers}
    spec = {"name": each.module, "flavor": each.flavour, "model": sizes}
    if found["activation_checkpoint.mode"] == "full":
        del nested["activation_checkpoint"]["force_recompute_mm_shapes_by_fqns"]
    return nested | {"model_spec": spec}


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "qwen3_30b_a3b", "deepseek_v3_671b"])
def test_what_a_configuration_in_python_saves_is_what_its_name_says(name: str) -> None:
    module = known().configurations[name].module
    by_name = job_of_words(["--module", module, "--config", name], None)
    saved = job_of_saved(python_job(name))
    assert translate(saved, 64).values == translate(by_name, 64).values


def test_a_saved_model_of_ones_own_is_refused() -> None:
    own = python_job("llama3_8b")
    own["model_spec"]["model"]["dim"] = 5120
    with pytest.raises(ConfigError, match=r"hidden_size = 5120, not 4096[\s\S]*--model FOLDER"):
        job_of_saved(own)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"model": {"name": "flux"}}, "a diffusion model"),
        ({"model": {"flavor": "8b"}}, "did you mean '8B'"),
        (
            {"training": {"local_batch_size": 3}, "parallelism": {"pipeline_parallel_degree": 2}},
            "N",
        ),
        (
            {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "zb"}},
            "zb",
        ),
        ({"training": {"steps": "many"}}, "training.steps cannot be 'many'"),
        ({"optimizer": {"name": "Lion"}}, "optimizer.name cannot be 'Lion'"),
        ({"training": {"max_norm": 0.0}}, "makes all gradients 0"),
        ({}, "--nproc N"),
    ],
)
def test_mistakes_say_what_works(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        of(tables)
    assert words in str(raised.value)


def test_unknown_settings_are_named_with_what_is_meant() -> None:
    found = of({"training": {"stepz": 3}, "mine": {"a": 1}}, 8)
    said = " ".join(found.lost)
    assert "training.stepz = 3" in said and "did you mean 'steps'" in said and "mine.a = 1" in said


def test_a_recipe_is_no_job(tmp_path: Path) -> None:
    recipe = to_toml(read_config(model="debug-llama"))
    with pytest.raises(ConfigError, match="recipe of Fivefold's already"):
        read_text_of_torchtitan(recipe, "a.toml", ScriptEnvironment())


def test_rates_are_those_of_its_scheduler() -> None:
    """By torchtitan's own arithmetic, written down once more."""
    random = Random(1)
    for _ in range(60):
        steps, warm_up = random.randint(5, 60), random.randint(0, 20)
        ratio = random.choice((None, 0.0, 0.3, 0.8, 1.0))
        shape, floor = random.choice(("linear", "sqrt", "cosine")), random.choice((0.0, 0.1))
        tables = {
            "training": {"steps": steps},
            "lr_scheduler": {"warmup_steps": warm_up, "decay_type": shape, "min_lr_factor": floor},
        }
        if ratio is not None:
            tables["lr_scheduler"]["decay_ratio"] = ratio
        config = trained(of(tables, 8))
        its = [its_factor(n, steps, min(warm_up, steps), ratio, shape, floor) for n in range(steps)]
        ours = [learning_rate(n, config.optimizer, config.training) / 8e-4 for n in range(steps)]
        assert ours == pytest.approx(its, abs=1e-12), tables


def its_factor(
    step: int, total: int, warm_up: int, ratio: float | None, shape: str, floor: float
) -> float:
    length = total - warm_up if ratio is None else min(round(total * ratio), total - warm_up)
    if step < warm_up:
        return (step + 1) / warm_up
    if step <= total - length:
        return 1.0
    done = (step - (total - length)) / length
    falls = {"linear": 1 - done, "sqrt": 1 - done**0.5}
    left = falls[shape] if shape in falls else 0.5 * (1 + cos(pi * done))
    return floor + (1 - floor) * left
