"""Read exported settings with the parsers of the trainers that they are for.

    pip install --no-deps megatron-core torchtitan deepspeed   # and what they import
    python -m benchmarks.check_exports --record

Each trainer that is installed reads the settings of layouts that together use every setting that
can be exported. Megatron-LM's argument parser is not released; its core's dataclasses are, whose
fields most flags are, and which check what goes together. `--record` notes the accepted names, with
the release, for tests/plan/test_export.py.
"""

import argparse
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fivefold.check import Layout, check
from fivefold.config.config import Config
from fivefold.config.layer_pattern import expert_layers
from fivefold.config.presets import PRESETS
from fivefold.plan.export.targets import export

RECORD = Path(__file__).parents[1] / "tests" / "plan" / "exported_names.json"
UNEVEN = "Et*4|(t*4|)*12t*3|t*3|t*3mL"
LAYOUTS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "dense": (
        "llama3-70b",
        64,
        {
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "tp_comm_overlap": True,
            "pipeline_model_parallel_size": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
            "microbatch_group_size_per_virtual_pipeline_stage": 4,
            "data_parallel_sharding_strategy": "optim",
            "grad_reduce_in_bf16": True,
        },
    ),
    "sharded": (
        "llama3-8b",
        64,
        {
            "context_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "data_parallel_shard_size": 16,
            "num_distributed_optimizer_instances": 2,
            "recompute_granularity": "full",
            "fp8_format": "hybrid",
        },
    ),
    "experts": (
        "deepseek-v3",
        256,
        {
            "pipeline_model_parallel_size": 8,
            "pipeline_model_parallel_layout": UNEVEN,
            "expert_model_parallel_size": 32,
            "moe_token_dispatcher_type": "flex",
            "overlap_moe_expert_parallel_comm": True,
            "data_parallel_sharding_strategy": "optim",
            "recompute_granularity": "selective",
            "recompute_modules": ("mla_up_proj", "routed_experts"),
            "fp8_format": "hybrid",
            "fp8_recipe": "rowwise",
        },
    ),
    "window": (
        "gpt-oss-20b",
        16,
        {
            "expert_model_parallel_size": 8,
            "data_parallel_sharding_strategy": "optim",
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 2,
            "fp4_format": "e2m1",
        },
    ),
    "biased": (
        "gpt2",
        8,
        {
            "tensor_model_parallel_size": 2,
            "seq_length": 1024,
            "cross_entropy_loss_fusion": True,
            "data_parallel_sharding_strategy": "no_shard",
        },
    ),
    "in a V": (
        "qwen3-14b",
        8,
        {
            "pipeline_model_parallel_size": 4,
            "pipeline_schedule": "dualpipe_v",
            "data_parallel_sharding_strategy": "optim",
        },
    ),
    "uneven": (
        "llama3-8b",
        8,
        {
            "pipeline_model_parallel_size": 4,
            "decoder_first_pipeline_num_layers": 7,
            "decoder_last_pipeline_num_layers": 7,
            "data_parallel_sharding_strategy": "optim",
            "fine_grained_activation_offloading": True,
            "offload_modules": ("core_attn",),
        },
    ),
    "on the host": (
        "llama3-8b",
        16,
        {
            "context_parallel_size": 8,
            "seq_length": 16384,
            "cp_comm_type": ("a2a+p2p",),
            "hierarchical_context_parallel_sizes": (4, 2),
            "data_parallel_sharding_strategy": "optim_grads_params",
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 0.5,
        },
    ),
    "counted": (
        "llama3-8b",
        8,
        {
            "pipeline_model_parallel_size": 2,
            "num_layers": 30,
            "num_layers_per_virtual_pipeline_stage": 8,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
}
"""Preset, ranks, settings: together they use every setting that can be exported."""


def layouts() -> Iterator[tuple[str, Layout]]:
    """The layouts, by name."""
    for name, (preset, world, settings) in LAYOUTS.items():
        values = {"global_batch_size": 8 * world, "seq_length": 4096, **settings}
        yield name, check(Config(PRESETS[preset]).with_values(**values), world, planned=True)


def names(target: str, text: str) -> set[str]:
    """The settings that an export uses: flags without dashes, keys joined by dots."""
    if target == "deepspeed":
        return set(_keys(json.loads(text)))
    words = shlex.split(text.replace("\\\n", " "))
    return {word.removeprefix("--") for word in words if word[:2] == "--" or ":" in word}


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def read_by_torchtitan(text: str, layout: Layout) -> None:
    """Parse the flags; a model that it does not have becomes its smallest."""
    from torchtitan.config import ConfigManager

    words = shlex.split(text.replace("\\\n", " "))
    if "--module" not in words:
        words = ["--module", "llama3", "--config", "llama3_debugmodel", *words]
    told = StringIO()
    try:
        with redirect_stderr(told), redirect_stdout(told):
            config = ConfigManager().parse_args(words)
    except SystemExit:
        raise ValueError(told.getvalue()) from None
    parallel = config.parallelism
    assert parallel.pipeline_parallel_degree == layout.grid.pp
    assert len(parallel.module_fqns_per_model_part or "-") == len(layout.split.stages)


def read_by_deepspeed(text: str, layout: Layout) -> None:
    """Parse the file as a rank among so many data-parallel ones."""
    from deepspeed.runtime import config as runtime

    runtime.dist.get_rank = lambda: 0
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: layout.grid.dp)
    runtime.DeepSpeedConfig(json.loads(text), mpu=ranks)


MEGATRON_ARGUMENTS = frozenset(
    {
        "ckpt-format",
        "global-batch-size",
        "grad-reduce-in-bf16",
        "group-query-attention",
        "lr-decay-style",
        "lr-warmup-iters",
        "make-vocab-size-divisible-by",
        "max-position-embeddings",
        "micro-batch-size",
        "position-embedding-type",
        "rope-scaling-factor",
        "rotary-base",
        "seq-length",
        "train-iters",
        "untie-embeddings-and-output-weights",
        "use-rope-scaling",
        "vocab-size",
    }
)
"""Flags of megatron/training/arguments.py (Megatron-LM, commit 000c4ac) that its core knows not."""
MEGATRON_FIELDS = {
    "norm-epsilon": "layernorm_epsilon",
    "num-experts": "num_moe_experts",
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "num-layers-per-virtual-pipeline-stage": "virtual_pipeline_model_parallel_size",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "disable-bias-linear": "add_bias_linear",
    "swiglu": "gated_linear_unit",
}
"""Flags under whose name the core has no field; its parser sets these."""


def read_by_megatron(text: str, layout: Layout) -> None:
    """Set the fields that the flags stand for, and let the core check what goes together."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig as Latent
    from megatron.core.transformer.transformer_config import TransformerConfig as Plain

    latent = layout.config.model.multi_latent_attention
    kinds = (Latent if latent else Plain, DistributedDataParallelConfig, OptimizerConfig)
    values: list[dict[str, Any]] = [{}, {}, {}]
    for name, words in _flags(text).items():
        field = MEGATRON_FIELDS.get(name, name.replace("-", "_"))
        found = [n for n, kind in enumerate(kinds) if field in {f.name for f in fields(kind)}]
        if not found and name not in MEGATRON_ARGUMENTS:
            raise ValueError(f"unknown flag --{name}")
        for number in found:
            values[number][field] = _value(name, words, layout.config.model.num_layers)
    size = layout.split.num_virtual
    values[0]["virtual_pipeline_model_parallel_size"] = size if size > 1 else None
    values[0] |= {"pipeline_dtype": torch.bfloat16, "params_dtype": torch.bfloat16}
    for narrow in ("fp8", "fp8_recipe", "fp4"):  # would ask for Transformer Engine
        values[0].pop(narrow, None)
    values[2].pop("use_precision_aware_optimizer", None)
    values[2].pop("optimizer_cpu_offload", None)
    for kind, chosen in zip(kinds, values, strict=True):
        kind(**chosen)


def _flags(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in shlex.split(text.replace("\\\n", " ")):
        if word.startswith("--"):
            words = found[word[2:]] = []
        else:
            words.append(word)
    return found


def _value(name: str, words: list[str], layers: int) -> Any:
    """As Megatron-LM's parser reads it."""
    numbers = [int(w) if w.lstrip("-").isdigit() else _number(w) for w in words]
    if name in ("recompute-modules", "offload-modules", "hierarchical-context-parallel-sizes"):
        return numbers
    if name == "disable-bias-linear":
        return False
    if name == "moe-layer-freq" and "[" in words[0]:
        return list(map(int, expert_layers(words[0], layers)))
    if name == "window-size":
        return tuple(map(int, words[0].split(",")))
    return numbers[0] if numbers else True


def _number(word: str) -> Any:
    try:
        return float(word)
    except ValueError:
        return word


TRAINERS: Mapping[str, tuple[str, Callable[[str, Layout], None]]] = {
    "megatron": ("megatron-core", read_by_megatron),
    "torchtitan": ("torchtitan", read_by_torchtitan),
    "deepspeed": ("deepspeed", read_by_deepspeed),
}
"""Target -> the package, and what reads the settings and raises what it says against them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    record = parser.parse_args().record
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for target, (package, read) in TRAINERS.items():
        try:
            release = f"{package} {version(package)}"
        except PackageNotFoundError:
            print(f"{target}: {package} is not installed")
            continue
        used: set[str] = set()
        for _, layout in layouts():
            text = export(layout, target).text
            read(text, layout)
            used |= names(target, text)
        print(f"{target}: {release} reads {len(LAYOUTS)} layouts, {len(used)} settings")
        known[target] = {"release": release, "names": sorted(used)}
    if record:
        RECORD.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
