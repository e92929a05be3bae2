"""Settings that mean something only where another one gives them something to act on."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.config.config import SETTINGS, Config
from fivefold.errors import Mistakes


@dataclass(frozen=True)
class Dependents:
    """Settings that have no effect unless another one says so.

    Attributes:
        names: names of the settings.
        on: the setting that decides.
        alive: whether the settings have an effect.
        why: what they are for, to follow "it".
        add: flags that give them an effect.
        searched: whether `fivefold plan` chooses `on` by itself.
        refused: whether to refuse them here. Others are refused by rules of their rooms, or have
            an effect all the same, and are left out only where a flag takes away what a recipe
            chose them for.
    """

    names: tuple[str, ...]
    on: str
    alive: Callable[[Config], bool]
    why: str
    add: tuple[str, ...] = ()
    searched: bool = False
    refused: bool = True


@dataclass(frozen=True)
class Orphan:
    """A setting that was changed from its default and has no effect."""

    name: str
    of: Dependents
    config: Config

    @property
    def default(self) -> object:
        """The value that it may have without a mistake."""
        return SETTINGS[self.name].default

    @property
    def off(self) -> str:
        """The flag that takes it back."""
        return SETTINGS[self.name].typed(self.default)

    @property
    def shown(self) -> str:
        """Its name and value, for people."""
        return _shown(self.config, self.name)

    @property
    def why(self) -> str:
        """What it is for, and what is missing."""
        return f"it {self.of.why}, and {_shown(self.config, self.of.on, ' is ')}"


def orphans(config: Config) -> Iterator[Orphan]:
    """Every setting that differs from its default and has no effect; a degree of -1 is unknown."""
    for of in DEPENDENTS:
        yield from _orphans(of, config)


def check_dependents(config: Config, mistakes: Mistakes, *, planned: bool = False) -> None:
    """Refuse settings that have no effect.

    Args:
        config: configuration with every degree filled in that can be inferred.
        mistakes: collection to which every mistake is added.
        planned: the layout is still to be chosen.
    """
    for orphan in orphans(config):
        if orphan.of.refused and not (planned and orphan.of.searched):
            mistakes.add(
                f"{orphan.shown} has no effect: {orphan.why}",
                works=[*orphan.of.add, orphan.off],
            )


def leaves_idle(config: Config, decides: str, **settings: Any) -> bool:
    """Whether values of a setting, and of others, leave some that depend on it without effect.

    Args:
        config: what was given.
        decides: the setting; a key of `settings`.
        settings: settings by field name.
    """
    found = orphans(config.with_values(**settings))
    return any(orphan.of.refused and orphan.of.on == decides for orphan in found)


def without_orphans(config: Config, by_flag: Collection[str]) -> tuple[Config, list[Orphan]]:
    """A recipe without those of its settings that a flag leaves without effect.

    Settings that a flag gives stay, as do those that the recipe itself left without effect.

    Args:
        config: configuration of a recipe and flags.
        by_flag: names of the settings that flags gave.

    Returns:
        The rest, and what is left out.
    """
    left_out = []
    for of in DEPENDENTS:  # one after the other, as some hang on settings that others leave out
        if of.on in by_flag:
            found = [orphan for orphan in _orphans(of, config) if orphan.name not in by_flag]
            config = config.with_values(**{orphan.name: orphan.default for orphan in found})
            left_out += found
    return config, left_out


def _orphans(of: Dependents, config: Config) -> Iterator[Orphan]:
    if not of.alive(config):
        for name in of.names:
            if config.value(name) != SETTINGS[name].default:
                yield Orphan(name, of, config)


def _shown(config: Config, name: str, equals: str = " = ") -> str:
    return f"{name}{equals}{SETTINGS[name].words(config.value(name))}"


def _pipelined(config: Config) -> bool:
    return config.parallel.pipeline_model_parallel_size != 1


def _lays_stages(config: Config) -> bool:
    """Whether several stages can be of use: a schedule that is asked for runs them on one rank."""
    return _pipelined(config) or config.parallel.pipeline_schedule != "auto"


DEPENDENTS = (
    Dependents(
        ("sequence_parallel", "tp_comm_overlap"),
        "tensor_model_parallel_size",
        lambda c: c.parallel.tensor_model_parallel_size != 1,
        "is for tensor-parallel ranks",
        refused=False,
    ),
    Dependents(
        (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_schedule",
            "pipeline_in_flight_limit",
            "num_sequence_slices",
            "microbatch_group_size_per_virtual_pipeline_stage",
        ),
        "pipeline_model_parallel_size",
        _pipelined,
        "was chosen for pipeline ranks",
        refused=False,
    ),
    Dependents(
        (
            "num_layers_per_virtual_pipeline_stage",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        "pipeline_model_parallel_size",
        _lays_stages,
        "lays stages over pipeline ranks",
        ("--pipeline-model-parallel-size 2",),
        searched=True,
    ),
    Dependents(
        ("num_virtual_stages_per_pipeline_rank",),
        "pipeline_model_parallel_size",
        lambda c: _lays_stages(c) or c.parallel.num_virtual_stages_per_pipeline_rank == 1,
        "lays stages over pipeline ranks",
        ("--pipeline-model-parallel-size 2",),
        searched=True,
    ),
    Dependents(
        ("cp_comm_type", "hierarchical_context_parallel_sizes"),
        "context_parallel_size",
        lambda c: c.parallel.context_parallel_size != 1,
        "is for context-parallel ranks",
        ("--context-parallel-size 2",),
        searched=True,
    ),
    Dependents(
        ("overlap_moe_expert_parallel_comm",),
        "expert_model_parallel_size",
        lambda c: c.parallel.expert_model_parallel_size != 1,
        "hides messages between expert-parallel ranks",
        refused=False,
    ),
    Dependents(
        ("pipeline_max_unsharded_stages",),
        "data_parallel_sharding_strategy",
        lambda c: c.parallel.data_parallel_sharding_strategy == "optim_grads_params",
        "keeps sharded parameters gathered",
        refused=False,
    ),
    Dependents(
        ("recompute_method", "recompute_num_layers"),
        "recompute_granularity",
        lambda c: c.memory.recompute_granularity == "full",
        "chooses layers of full recomputation",
        ("--recompute-granularity full",),
    ),
    Dependents(
        ("recompute_modules",),
        "recompute_granularity",
        lambda c: c.memory.recompute_granularity == "selective",
        "chooses modules of selective recomputation",
        ("--recompute-granularity selective",),
    ),
    Dependents(
        ("offload_modules",),
        "fine_grained_activation_offloading",
        lambda c: c.memory.fine_grained_activation_offloading,
        "chooses activations to move",
        refused=False,
    ),
    Dependents(
        ("min_offloaded_tensor_size",),
        "fine_grained_activation_offloading",
        lambda c: c.memory.fine_grained_activation_offloading,
        "chooses activations to move",
        ("--fine-grained-activation-offloading",),
    ),
    Dependents(
        ("cross_entropy_fusion_impl",),
        "cross_entropy_loss_fusion",
        lambda c: c.memory.cross_entropy_loss_fusion,
        "is how a loss is fused",
        ("--cross-entropy-loss-fusion",),
    ),
    Dependents(
        ("optimizer_offload_fraction",),
        "optimizer_cpu_offload",
        lambda c: c.memory.optimizer_cpu_offload,
        "is a share of offloaded optimizer state",
        ("--optimizer-cpu-offload",),
    ),
    Dependents(
        ("fp8_recipe",),
        "fp8_format",
        lambda c: c.training.fp8_format is not None,
        "scales 8-bit tensors",
        ("--fp8-format hybrid",),
    ),
    Dependents(
        ("compile_backend",),
        "compile",
        lambda c: c.training.compile,
        "is for compiled layers",
        ("--compile",),
    ),
    Dependents(
        ("eval_iters",),
        "eval_interval",
        lambda c: c.training.evaluates or c.training.eval_iters == 0,
        "is the length of evaluations",
        ("--eval-interval 10",),
    ),
    Dependents(
        ("rotary_base",),
        "position_embedding_type",
        lambda c: c.model.position_embedding_type == "rope",
        "is for rotary positions",
        ("--position-embedding-type rope",),
    ),
    Dependents(
        (
            "rope_scaling_factor",
            "rope_low_freq_factor",
            "rope_high_freq_factor",
            "rope_original_max_position_embeddings",
        ),
        "use_rope_scaling",
        lambda c: c.model.use_rope_scaling,
        "is for scaled rotary positions",
        ("--use-rope-scaling",),
    ),
    Dependents(
        ("mtp_loss_scaling_factor",),
        "mtp_num_layers",
        lambda c: c.model.mtp_num_layers > 0,
        "weighs the loss of further predictions",
        ("--mtp-num-layers 1",),
    ),
    Dependents(
        ("tokenizer_vocab_size",),
        "tokenizer_model",
        lambda c: c.data.tokenizer_model is None,
        "is of a tokenizer to train",
        ("--tokenizer-model none",),
    ),
    Dependents(
        ("min_lr", "lr_decay_iters"),
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style != "constant",
        "is for a learning rate that decays",
        ("--lr-decay-style cosine",),
    ),
    Dependents(
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "is for the final decay of WSD",
        ("--lr-decay-style WSD",),
    ),
    Dependents(
        ("lr_warmup_init",),
        "lr_warmup_iters",
        lambda c: c.optimizer.lr_warmup_iters > 0,
        "starts a warm-up",
        ("--lr-warmup-iters 1",),
    ),
    Dependents(
        ("profile_step_start", "profile_step_end", "profile_ranks"),
        "profile",
        lambda c: c.logging.profile,
        "chooses what is profiled",
        ("--profile",),
    ),
)
