"""The settings that a job of torchtitan is here.

What a job does not say has the defaults of its release. What it has and Fivefold has not is named,
never left out without a word.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from fivefold.config.model import ModelConfig
from fivefold.config.torchtitan_job.flavours import (
    FLAVOURS,
    known_as,
    model_of,
    within_documents,
)
from fivefold.config.torchtitan_job.harmless import is_harmless
from fivefold.config.torchtitan_job.job import TitanJob, unknown_setting
from fivefold.config.torchtitan_job.layout import (
    Degrees,
    compiled_parts,
    degrees_of,
    of_batch,
    of_memory,
    of_parallel,
)
from fivefold.config.torchtitan_job.rates import of_optimizer
from fivefold.config.torchtitan_job.releases import IN_PYTHON, Configuration, known
from fivefold.config.translation import Named, Translation, fitting
from fivefold.errors import did_you_mean, shown

TRAINER = "torchtitan"
_NARROW = {"Float8Linear": "float8", "MXFP8Linear": "mx"}
"""Classes of linear layers in 8 bits, and what TOML files call them."""
_FLOAT8 = ("float8", "quantize.linear.float8", "quantize.dense.float8")
_MX = ("mx", "quantize.linear.mx", "quantize.dense.mx")
_EXPERTS_FLOAT8 = ("quantize.grouped_mm.float8", "quantize.moe.float8")
_EXPERTS_MX = ("quantize.grouped_mm.mx", "quantize.moe.mx")
_QUANTIZE = "quantize."
_LINEAR = "quantize.linear.float8."
_RECIPES = {"tensorwise": ("hybrid", "tensorwise"), "rowwise": ("e4m3", "rowwise")}
_NO_LANGUAGE = {
    "flux": "a diffusion model, not one of language",
    "vlm": "a model of images and text",
    "llama3_siglip2": "a model of images and text",
}
_BY_HUB = ("transformers_modeling_backend", "transformers_backend")
"""Models whose code is that of transformers; another setting says which they are."""
_FOLDERS = "--load FOLDER starts from weights of Hugging Face"


def translate(job: TitanJob, ranks: int | None = None, model_given: bool = False) -> Translation:
    """The settings of a job.

    Args:
        job: what it says.
        ranks: number of its ranks; None: what it says itself.
        model_given: whether its model is known from elsewhere, so that none is translated.

    Raises:
        ConfigError: settings are of the wrong kind or contradict each other, or its model is none
            that Fivefold has.
    """
    lost: list[str] = []
    ranks = ranks or job.ranks
    hub = job.word_as_it_is("hf_transformers.model")
    of_hub = job.get("model.name") in _BY_HUB and job.get("model.flavor") == "full"
    by_hub = of_hub and bool(hub) and not model_given
    model = None if model_given or by_hub else _model(job, lost)
    degrees = degrees_of(job, ranks)
    named = (
        *of_batch(job, degrees, lost),
        *of_parallel(job, degrees, model, lost),
        *of_memory(job, degrees, model, lost),
        *_of_formats(job, degrees, lost),
        *of_optimizer(job, lost),
        *_of_run(job, lost),
        *_of_data(job, lost),
        *_of_evaluation(job, degrees, lost),
    )
    values = fitting(_fitting_together(dict(named), lost).items(), job.mistakes)
    if model is not None:
        values |= {field.name: getattr(model, field.name) for field in fields(model)}
    if by_hub:
        values["model"] = hub
    if model_given and job.configuration is not None and (its := _unread_model(job.configuration)):
        lost.append(f"what its configuration has besides the model: {its}")
    left = job.without_counterpart()
    harmless = [path for path in left if is_harmless(path) or _idles(job, path)]
    lost += [
        f"{path} = {shown(value)}: {_HINTS.get(path, 'no counterpart here')}"
        for path, value in left.items()
        if path not in harmless
    ]
    off = [path for path, value in job.unknown.items() if not value or is_harmless(path)]
    lost += [unknown_setting(*each) for each in job.unknown.items() if each[0] not in off]
    lost += job.notes
    job.mistakes.raise_if_any()
    harmless += off
    return Translation(TRAINER, values, tuple(lost), tuple(harmless), ranks or degrees.ranks)


def _fitting_together(values: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """Settings without those that do not go with others here, each of which is reported."""
    by_tensor = values.get("fp8_format") and values.get("fp8_recipe") == "tensorwise"
    if values.get("tp_comm_overlap") and by_tensor:
        values["tp_comm_overlap"] = False
        lost.append(
            "parallelism.enable_async_tensor_parallel: with one scale for a whole tensor nothing "
            "is multiplied before all of it has come"
        )
    if values["compile"] and values.get("recompute_granularity") == "selective":
        values["recompute_granularity"], values["recompute_modules"] = None, None
        lost.append(
            "what compiled layers make again is torch.compile's to choose here; "
            "--recompute-granularity full recomputes them as a whole"
        )
    if values["compile"] and values.get("fp8_param_gather"):
        values["fp8_param_gather"] = False
        lost.append(f"{_LINEAR}enable_fsdp_float8_all_gather: compiled layers gather in bf16 here")
    if values.get("optimizer_cpu_offload") and values.pop("main_params_dtype", None):
        lost.append("training.dtype = bfloat16: masters in host memory are fp32 here")
    return values


_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "checkpoint.create_seed_checkpoint": "initial weights do not depend on the layout here",
        "checkpoint.enable_first_step_checkpoint": "--save-interval saves at its multiples",
        "experimental.custom_import": "code, which is not read",
        "job.custom_config_module": "code, which is not read; settings of its own have no effect",
        "profiling.enable_memory_snapshot": "--record-memory-history",
    }
)
"""Setting of torchtitan -> what to use here in its place."""


def _model(job: TitanJob, lost: list[str]) -> ModelConfig | None:
    """The model of its flavour; a mistake if there is none."""
    if job.configuration is not None:
        module, flavour = job.configuration.module, job.configuration.flavour
    else:
        module = str(job.get("model.name")).removesuffix("_ft")
        flavour = str(job.get("model.flavor"))
    other = ["--model FOLDER, with its config.json"]
    if module not in FLAVOURS:
        why = _NO_LANGUAGE.get(module, "none of the models of releases 0.1 to 0.3")
        what = f"model.name = {module}: {why}{did_you_mean(module, FLAVOURS)}"
        job.mistakes.add(what, works=[*FLAVOURS, *(other if module not in _NO_LANGUAGE else [])])
        return None
    name = known_as(module, flavour)
    if name is None:
        near = {each.lower(): each for each in FLAVOURS[module]}.get(flavour.lower(), flavour)
        what = f"model.flavor = {flavour}: none of {module}'s"
        what += did_you_mean(near, FLAVOURS[module])
        job.mistakes.add(what, works=[*FLAVOURS[module], *other])
        return None
    if module == "gpt_oss" and job.releases[0] < "0.2.2":
        lost.append("before 0.2.2 its router has no bias, and here it has one")
    if job.configuration is not None and (refused := _unread_model(job.configuration)):
        readable = [
            name
            for name, each in known().configurations.items()
            if (each.module, each.flavour) == (module, flavour) and not _unread_model(each)
        ]
        what = f"what its configuration has cannot be translated: {refused}"
        job.mistakes.add(what, works=[f"--config {name}" for name in readable])
    lost.append("initial weights are drawn as its models say, each layer's by its depth")
    length = job.count("training.seq_len") or 1
    model, *earlier = (
        model_of(module, name, release, length) for release in reversed(job.releases)
    )
    for release, before in zip(reversed(job.releases[:-1]), earlier, strict=True):
        differ = [
            f.name for f in fields(model) if getattr(model, f.name) != getattr(before, f.name)
        ]
        if differ:
            its = ", ".join(f"{each} = {getattr(before, each)}" for each in differ)
            lost.append(f"in release {release}, which it may be of, its model has {its}")
            break
    return model


def _unread_model(its: Configuration) -> str:
    """What of a configuration's model no settings here can be; empty: nothing."""
    readable = ("Linear", *_NARROW, "RowParallelLinear", "ScaledBiasRowwiseLinear")
    several = any(path.startswith("optimizer.param_groups.1.") for path in its.values)
    found = [name for name in its.linear if name not in readable]
    found += ["several groups of parameters"] * several
    return ", ".join([*found, *["multi-token prediction"] * bool(its.predictions)])


def _of_formats(job: TitanJob, degrees: Degrees, lost: list[str]) -> Named:
    """In how many bits it computes and keeps weights."""
    mixed = job.choice("training.mixed_precision_param", "bfloat16", "float32")
    wire = job.choice("training.mixed_precision_reduce", "float32", "bfloat16")
    if job.choice("training.dtype", "float32", "bfloat16") == "bfloat16":
        yield "precision", "bf16"
        yield "use_precision_aware_optimizer", True
        names = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        yield from ((name, "bf16") for name in names)
        wire = "float32"  # gradients are sent as they are
        lost.append("training.dtype = bfloat16: updates are rounded stochastically here")
    elif mixed == "float32":
        yield "precision", "fp32"
    elif degrees.sharded or job.release >= IN_PYTHON or degrees.tp == degrees.pp == 1:
        yield "precision", "bf16"
    else:
        yield "precision", "fp32"
        lost.append(
            "training.mixed_precision_param has no effect there with tensor or pipeline "
            "parallelism and no FSDP: it computes in fp32 (--bf16 does not)"
        )
    yield "grad_reduce_in_bf16", wire == "bfloat16"
    parts = compiled_parts(job)
    yield "compile", "model" in parts
    if "model" in parts:
        backend = job.choice("compile.backend", "inductor", "aot_eager")
        yield "compile_backend", backend
    elif parts:
        lost.append(f"compile.components = {' '.join(parts)}: layers alone are compiled here")
    yield from _of_8_bits(job, lost)


def _of_8_bits(job: TitanJob, lost: list[str]) -> Named:
    converters = list(job.words("model.converters"))
    if job.flag("model.enable_float8_linear"):
        converters.append("float8")
    linears = () if job.configuration is None else job.configuration.linear
    converters += [name for kind, name in _NARROW.items() if kind in linears]
    recipe = "rowwise" if job.release >= IN_PYTHON else job.get(f"{_LINEAR}recipe_name")
    linear, experts = (
        set(converters) & {*_FLOAT8, *_MX},
        set(converters)
        & {
            *_EXPERTS_FLOAT8,
            *_EXPERTS_MX,
        },
    )
    if set(converters) & {*_FLOAT8, *_EXPERTS_FLOAT8}:
        by_row = bool(set(converters) & set(_EXPERTS_FLOAT8)) and not linear
        name = "rowwise" if by_row else str(recipe or "tensorwise").removesuffix("_with_gw_hp")
        if name not in _RECIPES:
            job.mistakes.add(f"{_LINEAR}recipe_name cannot be {name}", works=_RECIPES)
            return
        yield from zip(("fp8_format", "fp8_recipe"), _RECIPES[name], strict=True)
        if str(recipe).endswith("_with_gw_hp"):
            lost.append(f"{_LINEAR}recipe_name = {recipe}: gradients of weights in 8 bits, too")
        yield "fp8_param_gather", job.flag(f"{_LINEAR}enable_fsdp_float8_all_gather")
        if job.flag(f"{_LINEAR}emulate"):
            lost.append(f"{_LINEAR}emulate: it multiplies in 8 bits here")
    elif set(converters) & {*_MX, *_EXPERTS_MX}:
        yield "fp8_format", "e4m3"
        yield "fp8_recipe", "mxfp8"
    kept = [
        each
        for kind in ("float8", "mx")
        for each in job.words(f"{_QUANTIZE}linear.{kind}.filter_fqns")
    ]
    kept = [each for each in kept if each not in ("output", "lm_head", "router.gate")]
    if linear and kept:
        lost.append(f"its layers {' '.join(kept)} keep bf16: --first-last-layers-bf16 is near it")
    if linear and not experts:
        lost.append("its experts, if there are any, keep bf16, and multiply in 8 bits here")
    names = {*_FLOAT8, *_MX, *_EXPERTS_FLOAT8, *_EXPERTS_MX}
    lost += [
        f"model.converters: {each} has no counterpart" for each in converters if each not in names
    ]


def _of_run(job: TitanJob, lost: list[str]) -> Named:
    """Checkpoints, logs, seeds and timeouts."""
    if job.flag("checkpoint.enable"):
        yield "save_interval", job.count("checkpoint.interval")
        keep = job.number("checkpoint.keep_latest_k", 10)
        yield "keep_latest_k", keep or None
        yield "async_save", job.get("checkpoint.async_mode") != "disabled"
        lost += _of_start(job)
    yield "log_interval", job.count("metrics.log_freq")
    yield "tensorboard", job.flag("metrics.enable_tensorboard")
    if job.flag("metrics.enable_wandb"):
        yield "wandb_project", "torchtitan"
    if job.flag("profiling.enable_profiling"):
        lost.append("it traces a step now and then: --profile traces the steps that are asked for")
    if job.get("debug.seed") is not None:
        yield "seed", job.number("debug.seed", 0)
    yield "deterministic_mode", job.flag("debug.deterministic")
    yield "manual_gc", True
    yield "manual_gc_interval", job.count("training.gc_freq")
    seconds = [job.number(f"comm.{each}_timeout_seconds", 0) for each in ("init", "train")]
    if any(job.says(f"comm.{each}_timeout_seconds") for each in ("init", "train")):
        yield "distributed_timeout_minutes", max(*seconds, 1) / 60
        if seconds[0] != seconds[1]:
            lost.append(f"timeouts of the first step and of others are one here: {max(seconds)} s")
    if job.says("job.dump_folder"):
        lost.append(f"{job.said('job.dump_folder')}: --save names a run folder of Fivefold's own")
    for switch in ("memory_estimation.enable", "fault_tolerance.enable"):
        if job.flag(switch):
            lost.append(f"{switch}: {_SWITCHES[switch]}")


_SWITCHES = {
    "memory_estimation.enable": "fivefold rehearse says what a step needs",
    "fault_tolerance.enable": "--max-restarts goes on after a failure",
}


def _of_start(job: TitanJob) -> Iterator[str]:
    """What weights a job starts from."""
    path = job.get("checkpoint.initial_load_path")
    alone = job.flag("checkpoint.initial_load_model_only", True)
    if job.flag("checkpoint.initial_load_in_hf") and (path or job.get("model.hf_assets_path")):
        yield f"it starts from {path or job.get('model.hf_assets_path')}: {_FOLDERS}"
    elif path:
        kind = "weights" if alone else "a checkpoint"
        yield f"it starts from {kind} of torchtitan's in {path}: {_FOLDERS}"
    if job.says("checkpoint.load_step"):
        yield f"{job.said('checkpoint.load_step')}: --ckpt-step, of runs of Fivefold's own"


def _of_data(job: TitanJob, lost: list[str]) -> Named:
    """Masks; corpora and tokenizers are named by other means there."""
    if job.configuration is not None:
        masked = "ScaledDotProduct" not in job.configuration.attention
    else:
        masked = within_documents(str(job.get("model.name")), str(job.get("model.flavor")))
    yield "reset_attention_mask", masked
    yield "reset_position_ids", masked
    yield "eod_mask_loss", False
    said = [
        path
        for path in ("training.dataset", "training.dataset_path", "model.hf_assets_path")
        if job.get(path) is not None
    ]
    lost.append(f"{job.said(*said)}: --data-path and --tokenizer-model, of files")
    if job.configuration is not None and job.configuration.data == "ChatDataLoader":
        lost.append("its data are conversations: --sft")


def _of_evaluation(job: TitanJob, degrees: Degrees, lost: list[str]) -> Named:
    if not job.flag("validation.enable"):
        return
    yield "eval_interval", job.count("validation.freq")
    steps = job.number("validation.steps", -1)
    yield "full_validation", steps < 0
    local = job.count("training.local_batch_size") or 1
    own = job.count("validation.local_batch_size") if job.release < IN_PYTHON else local
    batch = job.number("training.global_batch_size", -1)
    dp = (degrees.shard or 1) * degrees.replicate
    if steps > 0:
        whole = batch if batch > 0 else local * dp
        yield "eval_iters", max(round(steps * (own or local) * dp / whole), 1)
    if own != local:
        lost.append(
            f"{job.said('validation.local_batch_size')}: it evaluates in microbatches of "
            "training here"
        )
    if job.release < IN_PYTHON and job.get("validation.seq_len") != job.get("training.seq_len"):
        lost.append(
            f"{job.said('validation.seq_len')}: it evaluates sequences as long as in training here"
        )
    lost.append("it also evaluates after the first step")
    lost.append(f"{job.said('validation.dataset')}: --valid-data-path")


def _idles(job: TitanJob, path: str) -> bool:
    """Whether a setting means nothing in this job."""
    off = {
        "validation.": not job.get("validation.enable"),
        "checkpoint.": not job.get("checkpoint.enable"),
        "quantize.": not (job.get("model.converters") or job.get("model.enable_float8_linear")),
        "compile.": not job.get("compile.enable"),
        "fault_tolerance.": not job.get("fault_tolerance.enable"),
        "memory_estimation.": not job.get("memory_estimation.enable"),
        "profiling.": not job.get("profiling.enable_profiling"),
        "activation_checkpoint.": job.get("activation_checkpoint.mode") in ("none", "full"),
        "parallelism.pipeline_": job.get("parallelism.pipeline_parallel_degree") == 1,
        "parallelism.expert_": job.get("parallelism.expert_parallel_degree") == 1,
        "parallelism.context_": job.get("parallelism.context_parallel_degree") == 1,
        "metrics.save_": True,
    }
    return any(path.startswith(begin) and idle for begin, idle in off.items())
