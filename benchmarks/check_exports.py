"""Read exported settings with the parsers of the trainers that they are for.

    pip install --no-deps torchtitan deepspeed   # and what they import
    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    PYTHONPATH=Megatron-LM python -m benchmarks.check_exports --record

Each trainer that is there reads the settings of many layouts, which together use every setting that
can be exported, a change of each single one, and `--random` combinations. Then everything that it
has under one of our names has our value, or the export has named the setting; its learning rates
are ours; and what it builds is our model. `--record` notes the accepted names, with the release,
for tests/tell/test_export.py.
"""

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from benchmarks.export_cases import CHANGES, changed, layouts
from benchmarks.export_combinations import combinations
from benchmarks.translations import command_of, differing
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.settings import settings_of
from fivefold.config.training import ELEMENT_BYTES, OF_MUON
from fivefold.files import write_atomic
from fivefold.layout import Layout
from fivefold.optim.schedule import StepRates
from fivefold.optim.schedule import rates as rates_of
from fivefold.tell.export.settings import OWN, Export
from fivefold.tell.export.targets import export
from fivefold.tell.export.torchtitan_models import ITS_MODELS

RECORD = Path(__file__).parents[1] / "tests" / "tell" / "exported_names.json"


def names(target: str, text: str) -> set[str]:
    """The settings that an export uses: flags without dashes, keys joined by dots."""
    if target == "deepspeed":
        return set(_keys(json.loads(text)))
    words = _words(text)
    return {word.removeprefix("--") for word in words if word[:2] == "--" or ":" in word}


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "))


ITS_NAMES = {
    "norm_epsilon": "layernorm_epsilon",
    "gated_linear_unit": "swiglu",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "muon_nesterov": "muon_use_nesterov",
}
"""Under which Megatron-LM keeps what its flags of our names say."""
ITS_OWN = {
    "use_precision_aware_optimizer": "optimizer_cpu_offload",
    "bias_swiglu_fusion": "glu_linear_offset",
    "train_iters": "train_samples",
}
"""What it sets itself where something else is set: the same numbers by other code, or steps by
the samples that they take."""
NOT_COMPARED = (
    *("pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank"),
    *("num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "microbatch_group_size_per_virtual_pipeline_stage"),
    *("activation_func", "bias_gelu_fusion"),  # which also says there which GELU it is
)
"""Settings whose meaning is compared: as stages, and as an activation."""
MEANINGLESS = {
    "num_experts": (
        *("moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_group_topk"),
        *("moe_shared_expert_intermediate_size", "moe_token_dispatcher_type"),
        *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("moe_router_dtype", "moe_input_jitter_eps", "moe_token_drop_policy"),
        "expert_tensor_parallel_size",
    ),
    "multi_latent_attention": (
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    ),
    "use_rope_scaling": ("rope_scaling_factor",),
    "rope_type": (
        *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "yarn_correction_range_round_to_int"),
        *("longrope_short_factor", "longrope_long_factor", "longrope_attention_factor"),
    ),
    "cross_entropy_loss_fusion": ("cross_entropy_fusion_impl",),
    "fine_grained_activation_offloading": ("offload_modules", "min_offloaded_tensor_size"),
    "fp8_format": ("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"),
    "eval_interval": ("eval_interval", "eval_iters"),
    "data_parallel_sharding_strategy": ("overlap_param_gather",),
    "optimizer": OF_MUON,
}
"""Setting -> those that mean nothing without it."""


_FULL = ("recompute_method", "recompute_num_layers")


def read_by_megatron(found: Export, layout: Layout) -> None:
    """Its parser and its validation; then its values, stages, activation and learning rates."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.training import arguments

    sharded = layout.config.parallel.data_parallel_sharding_strategy in ("no_shard", "optim")
    os.environ |= {
        "NCCL_ALGO": "^NVLS",  # for deterministic_mode
        "RANK": "0",
        "WORLD_SIZE": str(layout.grid.world_size),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if sharded else "8",
    }
    # It asks whether the device is of Hopper's kind, and how new Transformer Engine is.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    arguments.get_device_arch_version = lambda: 9
    for module in (arguments, transformer_config):
        module.is_te_min_version = lambda least, **_: Version(least) <= Version("2.9.0")
    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb or object()
    sys.argv = ["pretrain_gpt.py", *_words(found.text)]
    told = StringIO()
    try:
        with redirect_stderr(told), redirect_stdout(told):
            args = arguments.validate_args(arguments.parse_args())
            core = arguments.core_transformer_config_from_args(args)
    except SystemExit:
        raise ValueError(told.getvalue().strip().splitlines()[-1]) from None
    named = "\n".join(found.missing)
    for name, value in _values(layout):
        theirs = getattr(args, ITS_NAMES.get(name, name), value)
        if name == "ddp_bucket_size" and value == ParallelConfig.ddp_bucket_size:
            continue  # each trainer's default suits its own messages
        if (cause := ITS_OWN.get(name)) and getattr(args, cause):
            continue
        if name == "optimizer":
            theirs = theirs.removeprefix("dist_")  # whose state is shared
        if not _same(value, theirs) and name not in named:
            raise ValueError(f"{name} is {value!r} here, {theirs!r} there, and is not named")
    if "pipeline_schedule" not in named and "Megatron-LM" not in named:
        _compare_stages(core, layout)
    _compare_activation(core, layout, named)
    _compare_rates(_rates_of_megatron(args), layout)
    told = StringIO()
    with redirect_stdout(told):
        arguments.is_rank0 = lambda: True
        arguments._print_args("arguments", args)
    for job in (told.getvalue(), command_of(found.text, layout)):
        if wrong := differing(job, found, layout):
            raise ValueError(f"fivefold translate makes another layout of it: {wrong}")


def _values(layout: Layout) -> Iterator[tuple[str, Any]]:
    """The settings of a layout that mean something, with their defaults filled in."""
    model = layout.config.model
    values = {
        setting.name: getattr(section, setting.name)
        for _, section in layout.config.sections()
        for setting in settings_of(type(section))
    }
    values |= {"ffn_hidden_size": model.ffn_size, "kv_channels": model.head_dim}
    values["max_position_embeddings"] = max(
        model.max_position_embeddings, layout.config.training.seq_length
    )
    if model.position_embedding_type == "rope":
        values["rotary_base"] = model.rotary_base
    else:
        del values["rotary_base"]
    if model.activation_func == "quick_gelu":
        del values["gated_linear_unit"]  # its switch says both
    if model.num_experts:
        values["moe_ffn_hidden_size"] = model.expert_ffn_size
        losses, factors = values["moe_router_load_balancing_type"], values["moe_aux_loss_coeff"]
        values["moe_aux_loss_coeff"] = factors * (len(losses) // len(factors))
    if model.position_embedding_type != "rope":
        del values["rope_type"]
    if model.rope_type in ("longrope", "dynamic"):
        del values["rotary_scaling_factor"]  # YaRN's, of which the rest has no flags there
    width = ELEMENT_BYTES[values["precision"]]
    values["min_offloaded_tensor_size"] = -(-values["min_offloaded_tensor_size"] // width)
    values["add_qkv_bias"] = model.qkv_bias
    values["attention_out_bias"], values["mlp_bias"] = model.output_bias, model.inner_bias
    values["qk_layernorm"] = model.qk_layernorm or model.multi_latent_attention
    values["num_query_groups"] = model.num_query_groups
    values["mtp_num_layers"] = model.mtp_num_layers or None
    if model.multi_latent_attention:
        del values["kv_channels"]
    for name, others in MEANINGLESS.items():
        if values.get(name) in (None, False, 0, "no_shard", "rope", "learned_absolute", "adam"):
            values |= dict.fromkeys(others)
    for name in (*NOT_COMPARED, *OWN, *(n for n, v in values.items() if v in (None, ()))):
        values.pop(name, None)
    granularity = layout.config.memory.recompute_granularity
    unused = {"full": ("recompute_modules",)}.get(granularity or "", _FULL)
    of_ranks = ("data_parallel_shard_size", "data_parallel_sharding_strategy")
    for name in (*unused, *(() if granularity else ("recompute_modules",)), *of_ranks):
        values.pop(name)
    return iter(values.items())


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, tuple) and len(ours) == 1 and not isinstance(theirs, list | tuple):
        return _same(ours[0], theirs)
    if isinstance(theirs, list | tuple) and isinstance(ours, int):
        return tuple(theirs) == (ours, 0)  # a window, and how far it looks ahead
    if isinstance(theirs, list) and isinstance(ours, tuple) and isinstance(ours[0], float):
        return list(ours) == theirs
    if isinstance(theirs, list):
        moved = ["moe" if module == "routed_experts" else module for module in ours]
        return isinstance(ours, str) or list(dict.fromkeys(moved)) == theirs
    if theirs is None and ours == 0:
        return True  # never
    if isinstance(theirs, torch.dtype):
        theirs = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(theirs, theirs)
    if isinstance(ours, bool) or ours is None or isinstance(ours, str):
        return ours == theirs or str(ours) == str(theirs)
    return bool(ours == theirs)


def _compare_stages(core: Any, layout: Layout) -> None:
    """How many layers it builds on each rank."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    written, split = core.pipeline_model_parallel_layout, layout.split
    for rank in range(layout.grid.pp):
        for virtual, stage in enumerate(split.stages_of(rank)):
            if written is None:
                chunk = virtual if split.num_virtual > 1 else None
                built = get_num_layers_to_build(core, chunk, rank)
            else:
                built = [kind.name for kind in written.layout[rank][virtual]].count("decoder")
            if built != len(split.stages[stage].layers):
                raise ValueError(f"rank {rank} has {built} layers in stage {stage}")


def _compare_activation(core: Any, layout: Layout, named: str) -> None:
    name = core.activation_func.__name__
    if name == "gelu" and core.bias_activation_fusion:
        name = "gelu_tanh"
    model = layout.config.model
    wanted = (model.activation_func, model.gated_linear_unit)
    if (name, core.gated_linear_unit) != wanted and "activation_func" not in named:
        raise ValueError(f"its activation is {name}, gated {core.gated_linear_unit}")


def _rates_of_megatron(args: Any) -> Iterator[float | StepRates]:
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group: dict[str, Any] = {"params": []}
    ends = {"max_lr": args.decoupled_lr, "min_lr": args.decoupled_min_lr}
    of_ends = {name: rate for name, rate in ends.items() if rate is not None}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_samples or args.lr_warmup_iters,
        lr_decay_steps=_durations(args, "lr_decay") or _durations(args, "train"),
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=_durations(args, "train"),
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        wsd_decay_steps=_durations(args, "lr_wsd_decay"),
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
    sizes = calculator._build_num_microbatches_calculator(
        *(1, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size),
        *(args.data_parallel_size, False),
    )
    while True:
        sizes.update(scheduler.num_steps, True)
        lr, of_both = scheduler.get_lr(group), scheduler.get_lr(of_ends)
        yield StepRates(lr, of_both, scheduler.get_wd())
        scheduler.num_steps += sizes.current_running_global_batch_size if args.train_samples else 1


def _durations(args: Any, what: str) -> int | None:
    """In steps, or with --train-samples in samples."""
    found: int | None = getattr(args, f"{what}_{'samples' if args.train_samples else 'iters'}")
    return found


def _compare_rates(theirs: Iterator[float | StepRates], layout: Layout, *, first: int = 0) -> None:
    """Of each step from `first` on: the learning rate, or all rates."""
    optimizer, training = layout.config.optimizer, layout.config.training
    for step, found in zip(range(training.num_steps), theirs, strict=False):
        ours = rates_of(step, optimizer, training)
        there = found if isinstance(found, StepRates) else StepRates(found, *ours[1:])
        wrong = max(abs(a - b) for a, b in zip(ours, there, strict=True))
        if step >= first and wrong > 1e-9 * optimizer.lr:
            raise ValueError(f"the rates of step {step} are {ours} here and {there} there")


_NO_SAMPLES = "it counts no samples"  # so that its rates are those of whole steps


def read_by_torchtitan(found: Export, layout: Layout) -> None:
    """Its parser; then its stages, its learning rates and its model.

    A model that it does not have becomes its smallest.
    """
    from torchtitan.config import ConfigManager

    words = _words(found.text)
    its_own = "--module" in words
    if not its_own:
        words = ["--module", "llama3", "--config", "llama3_debugmodel", *words]
    told = StringIO()
    try:
        with redirect_stderr(told), redirect_stdout(told):
            config = ConfigManager().parse_args(words)
    except SystemExit:
        raise ValueError(told.getvalue()) from None
    named = "\n".join(found.missing)
    parallel = config.parallelism
    assert parallel.pipeline_parallel_degree == layout.grid.pp
    if "pipeline_schedule" not in named:
        assert len(parallel.module_fqns_per_model_part or "-") == len(layout.split.stages)
    assert config.debug.seed == layout.config.training.seed
    assert (parallel.enable_sequence_parallel, layout.grid.tp > 1) != (
        not layout.config.parallel.sequence_parallel,
        True,
    )
    if its_own:
        its = ITS_MODELS[words[words.index("--config") + 1]]
        _compare_model(config.model_spec.model, layout.config.model, its.narrow)
    optimizer = layout.config.optimizer
    scheduler = config.lr_scheduler.build(
        optimizers=[torch.optim.SGD([torch.zeros(1)], lr=optimizer.lr)],
        training_steps=config.training.steps,
    ).schedulers[0]
    if not any(word in named for word in ("lr_wsd_decay_", "lr_decay_iters", _NO_SAMPLES)):
        rates = (optimizer.lr * scheduler.lr_lambdas[0](n) for n in range(config.training.steps))
        warmed_up = optimizer.lr_warmup_iters if "lr_warmup_init" in named else 0
        _compare_rates(rates, layout, first=warmed_up)


def check_its_models() -> None:
    """Our table of torchtitan's models against its own."""
    from torchtitan.components.quantization import float8

    float8.has_cuda_capability = lambda *_: True  # else no Float8 model is built
    for name, its in ITS_MODELS.items():
        registry = import_module(f"torchtitan.models.{its.module}.config_registry")
        _compare_model(getattr(registry, name)().model_spec.model, its.model, its.narrow)


def _compare_model(theirs: Any, model: ModelConfig, formats: tuple[str | None, ...]) -> None:
    """The dimensions of its model, and what else decides the function."""
    last = theirs.layers[-1]
    attention, rope = last.attention, last.attention.rope
    found = {
        "num_layers": len(theirs.layers),
        "hidden_size": theirs.dim,
        "vocab_size": theirs.vocab_size,
        "num_attention_heads": attention.n_heads,
        "norm_epsilon": theirs.norm.eps,
        "rotary_base": rope.theta,
        "use_rope_scaling": rope.scaling == "llama",
        "untie_embeddings_and_output_weights": not getattr(theirs, "enable_weight_tying", False),
        "num_experts": last.moe.router.num_experts if last.moe else None,
    }
    if rope.scaling == "llama":
        found |= {
            "rope_scaling_factor": rope.scaling_factor,
            "rope_low_freq_factor": rope.low_freq_factor,
            "rope_high_freq_factor": rope.high_freq_factor,
            "rope_original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    assert (rope.scaling == "yarn") is (model.rope_type == "yarn")
    if model.multi_latent_attention:
        found |= {
            "q_lora_rank": attention.q_lora_rank or None,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.qk_nope_head_dim,
            "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
            "v_head_dim": attention.v_head_dim,
        }
    else:
        size = attention.head_dim or theirs.dim // attention.n_heads
        found |= {"num_kv_heads": attention.n_kv_heads or attention.n_heads, "head_dim": size}
        found["qk_layernorm"] = getattr(attention, "qk_norm", None) is not None
    if last.moe:
        router, experts = last.moe.router, last.moe.routed_experts.inner_experts
        shared = getattr(last.moe, "shared_experts", None)
        found |= {
            "moe_router_topk": router.top_k,
            "moe_router_num_groups": router.num_expert_groups,
            "moe_router_group_topk": router.num_limited_groups,
            "expert_ffn_size": experts.hidden_dim,
            "shared_ffn_size": shared.w1.out_features if shared else 0,
        }
        dense = [layer.moe is None for layer in theirs.layers]
        assert dense == [not model.is_moe(layer) for layer in range(model.num_layers)]
    if not (last.moe and not any(layer.moe is None for layer in theirs.layers)):
        found["ffn_size"] = theirs.layers[0].feed_forward.w1.out_features
    for name, value in found.items():
        if getattr(model, name) != value:
            raise ValueError(f"{name} is {getattr(model, name)} here and {value} there")
    narrow = any(type(part).__qualname__.startswith("Float8") for _, part, *_ in _linears(theirs))
    assert narrow is (formats[0] is not None)


def _linears(theirs: Any) -> Iterator[Any]:
    from torchtitan.models.common.linear import Linear

    return theirs.traverse(Linear.Config)


def read_by_deepspeed(found: Export, layout: Layout) -> None:
    """Its configuration, as a rank among so many data-parallel ones; then its learning rates."""
    from deepspeed.runtime import config as runtime
    from deepspeed.runtime import lr_schedules

    runtime.dist.get_rank = lambda: 0
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: layout.grid.dp)
    settings = json.loads(found.text)
    config = runtime.DeepSpeedConfig(settings, mpu=ranks)
    weights: Any = torch.zeros(1, 1, requires_grad=True)
    if config.optimizer_name == "muon":
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        weights.use_muon = True
        groups = DeepSpeedEngine._muon_param_groups([weights], config.optimizer_params)
        optimizer: torch.optim.Optimizer = MuonWithAuxAdam(groups)
    else:
        optimizer = torch.optim.AdamW([weights], **config.optimizer_params)
    rates = None
    if config.scheduler_name:
        kind = getattr(lr_schedules, config.scheduler_name)
        rates = kind(optimizer, **config.scheduler_params)

    def told() -> Iterator[float]:
        while True:
            yield optimizer.param_groups[0]["lr"]
            if rates is not None:
                rates.step()

    named = "\n".join(found.missing)
    if not any(words in named for words in ("WSD", "cosine begins later", _NO_SAMPLES)):
        inexact = "lr_warmup_i" in named
        _compare_rates(
            told(), layout, first=layout.config.optimizer.lr_warmup_iters + 1 if inexact else 0
        )


TRAINERS: Mapping[str, tuple[str, Callable[[Export, Layout], None]]] = {
    "megatron": ("megatron.training.arguments", read_by_megatron),
    "torchtitan": ("torchtitan", read_by_torchtitan),
    "deepspeed": ("deepspeed", read_by_deepspeed),
}
"""Target -> a module of the trainer, and what reads the settings and raises what is wrong."""


def cases() -> Iterator[tuple[str, Layout]]:
    """The layouts to export, each of which a trainer reads."""
    yield from layouts()
    for name in CHANGES:
        before, after = changed(name)
        yield f"{name}, before", before
        yield name, after


def release(target: str) -> str:
    """Of the trainer that is there."""
    if target == "megatron":
        return f"Megatron-LM {import_module('megatron.core.package_info').__version__}"
    return f"{target} {version(target)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--only", choices=TRAINERS, help="this trainer alone")
    parser.add_argument("--random", type=int, default=0, help="so many combinations, too")
    parser.add_argument("--seed", type=int, default=0, help="of the combinations")
    options = parser.parse_args()
    if options.record and options.random:
        parser.error("what is recorded are the names of the layouts that are always read")
    logging.disable(logging.WARNING)
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for target, (module, read) in TRAINERS.items():
        if options.only not in (None, target):
            continue
        try:
            import_module(module)
        except ImportError as error:
            print(f"{target}: {error}")
            continue
        if target == "torchtitan":
            check_its_models()
        used: set[str] = set()
        number = wrong = 0
        for name, layout in chain(cases(), combinations(options.random, options.seed)):
            found = export(layout, target)
            number += 1
            try:
                read(found, layout)
            except Exception as error:  # whatever it raises is its opinion of our settings
                if "it refuses" in "\n".join(found.missing):
                    continue
                wrong += 1
                print(f"{target} does not take {name!r}: {error!r}")
            used |= names(target, found.text)
        told = f"{release(target)} reads {number - wrong} of {number} layouts"
        print(f"{target}: {told}, {len(used)} settings")
        known[target] = {"release": release(target), "names": sorted(used)}
    if options.record:
        write_atomic(RECORD, json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
