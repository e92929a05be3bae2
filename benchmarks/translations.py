"""Whether `fivefold translate` makes a layout again of what was exported of it."""

from dataclasses import replace

from fivefold.check import check
from fivefold.config.config import SETTINGS, Config
from fivefold.config.megatron_job.arguments import read_job
from fivefold.config.megatron_job.settings import translate
from fivefold.config.sources import read_config
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.tell.export.settings import OWN, Export

OTHERWISE = frozenset(
    {
        # Compared by what they make of a layout.
        *("data_parallel_shard_size", "pipeline_model_parallel_layout", "pipeline_schedule"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        *("microbatch_group_size_per_virtual_pipeline_stage", "no_rope_freq"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        # Of which the export is another one.
        *("bias_swiglu_fusion", "bias_gelu_fusion", "use_precision_aware_optimizer"),
        *("data_path", "tokenizer_model", "max_position_embeddings", "min_offloaded_tensor_size"),
    }
)


def command_of(text: str, layout: Layout) -> str:
    """The command line that starts exported flags on the ranks of a layout."""
    kind = "gpt" if layout.config.model.hybrid_override_pattern is None else "mamba"
    return f"torchrun --nproc-per-node {layout.grid.world_size} pretrain_{kind}.py {text}"


def differing(job: str, found: Export, layout: Layout) -> list[str]:
    """What differs between a layout and what is made of a job, besides what its export named."""
    translated = translate(read_job(job), layout.config.model.vocab_size)
    named = " ".join(found.missing)
    ours, theirs = (spelt_out(each) for each in (layout.config, read_config(**translated.values)))
    wrong = [
        f"{name} is {ours.value(name)!r}, and was made {theirs.value(name)!r}"
        for name in SETTINGS
        if name not in OWN | OTHERWISE and name not in named
        if ours.value(name) != theirs.value(name)
    ]
    if not wrong:
        try:
            made = check(theirs, layout.grid.world_size)
        except ConfigError:  # one that is planned, and not trained yet
            return []
        if made.grid != layout.grid and "num_distributed_optimizer_instances" not in named:
            wrong.append(f"{layout.grid} became {made.grid}")
        told = any(word in named for word in ("layout", "schedule", "mtp_num_layers"))
        if made.split != layout.split and not told:
            wrong.append(f"{layout.split} became {made.split}")
    return wrong


def spelt_out(config: Config) -> Config:
    """A configuration with sizes filled in, and without balancing losses that weigh nothing."""
    kinds, factors = (
        config.experts.moe_router_load_balancing_type,
        config.experts.moe_aux_loss_coeff,
    )
    if not any(factors) and kinds != ("sinkhorn",):
        kinds, factors = ("none",), (0.0,)
    experts = replace(
        config.experts,
        moe_router_load_balancing_type=kinds,
        moe_aux_loss_coeff=factors * (len(kinds) // len(factors)),
    )
    model = config.model.spelt_out()
    model = replace(model, qk_layernorm=model.qk_layernorm or model.multi_latent_attention)
    return replace(config, model=model, experts=experts)
