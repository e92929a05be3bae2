"""Settings of models, data, learning rates and logs that mean something beside others only."""

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.config.config import Config
from fivefold.config.training import MOCK


@dataclass(frozen=True)
class Dependents:
    """Settings that have an effect only with certain values of another setting.

    Attributes:
        names: names of the dependent settings.
        on: name of the setting that they depend on.
        alive: function that tells whether they have an effect.
        why: their purpose, as the rest of a sentence that begins with "it".
        add: flags with which they have an effect.
        searched: whether `fivefold plan` searches values of `on`.
        refused: whether they are refused here if they have no effect. Others are refused elsewhere,
            or do no harm; they are only left out if a flag removes the setting that a recipe chose
            them for.
    """

    names: tuple[str, ...]
    on: str
    alive: Callable[[Config], bool]
    why: str
    add: tuple[str, ...] = ()
    searched: bool = False
    refused: bool = True


OF_RUNS = (
    Dependents(
        ("document_length",),
        "reset_attention_mask",
        lambda c: c.data.reset_attention_mask,
        "is for tokens that attend to their document alone",
        ("--reset-attention-mask",),
    ),
    Dependents(
        ("rotary_base", "rotary_percent", "no_rope_freq"),
        "position_embedding_type",
        lambda c: c.model.position_embedding_type == "rope",
        "is for rotary positions",
        ("--position-embedding-type rope",),
    ),
    Dependents(
        ("qk_layernorm_type",),
        "qk_layernorm",
        lambda c: c.model.qk_layernorm,
        "is for norms of queries and keys",
        ("--qk-layernorm",),
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
        (
            "rotary_scaling_factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "yarn_correction_range_round_to_int",
        ),
        "rope_type",
        lambda c: c.model.rope_type == "yarn",
        "is for positions that YaRN stretches",
        ("--rope-type yarn",),
    ),
    Dependents(
        ("window_attn_skip_freq",),
        "window_size",
        lambda c: c.model.window_size is not None,
        "chooses the layers that have a window",
        ("--window-size 128",),
    ),
    Dependents(
        ("rotary_base_local",),
        "window_size",
        lambda c: c.model.window_size is not None,
        "is of layers that have a window",
        ("--window-size 128",),
    ),
    Dependents(
        ("mtp_loss_scaling_factor",),
        "mtp_num_layers",
        lambda c: c.model.mtp_num_layers > 0,
        "weighs the loss of further predictions",
        ("--mtp-num-layers 1",),
    ),
    Dependents(
        ("full_validation",),
        "data_path",
        lambda c: c.data.data_path != (MOCK,),
        "reads each sample once, of which mock has no last",
    ),
    Dependents(
        ("valid_data_path", "sft"),
        "data_path",
        lambda c: c.data.data_path != (MOCK,),
        "is for text",
        refused=False,
    ),
    Dependents(
        ("tokenizer_vocab_size",),
        "tokenizer_model",
        lambda c: c.data.tokenizer_model is None,
        "is of a tokenizer to train",
        ("--tokenizer-model none",),
    ),
    Dependents(
        ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"),
        "train_samples",
        lambda c: c.training.train_samples is None,
        "counts the steps of a run that does not count samples",
        ("--train-samples none",),
    ),
    Dependents(
        (
            "rampup_batch_size",
            "lr_decay_samples",
            "lr_warmup_samples",
            "lr_wsd_decay_samples",
        ),
        "train_samples",
        lambda c: c.training.train_samples is not None,
        "is for a run that counts samples",
        ("--train-samples 1000000",),
    ),
    Dependents(
        ("min_lr", "lr_decay_iters", "lr_decay_samples"),
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style != "constant",
        "is for a learning rate that decays",
        ("--lr-decay-style cosine",),
    ),
    Dependents(
        ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "is for the final decay of WSD",
        ("--lr-decay-style WSD",),
    ),
    Dependents(
        ("lr_warmup_init",),
        "lr_warmup_iters",
        lambda c: c.training.train_samples is not None or c.optimizer.lr_warmup_iters > 0,
        "starts a warm-up",
        ("--lr-warmup-iters 1",),
    ),
    Dependents(
        ("lr_warmup_init",),
        "lr_warmup_samples",
        lambda c: c.training.train_samples is None or c.optimizer.lr_warmup_samples > 0,
        "starts a warm-up",
        ("--lr-warmup-samples 1",),
    ),
    Dependents(
        (
            "profile_step_start",
            "profile_step_end",
            "profile_ranks",
            "use_pytorch_profiler",
            "record_memory_history",
        ),
        "profile",
        lambda c: c.logging.profile,
        "chooses what is profiled",
        ("--profile",),
    ),
    Dependents(
        ("non_persistent_local_ckpt_dir", "replication_jump"),
        "non_persistent_save_interval",
        lambda c: c.checkpoint.non_persistent_save_interval > 0,
        "says where states in memory are kept",
        ("--non-persistent-save-interval 20",),
    ),
    Dependents(
        ("spiky_loss_factor",),
        "check_for_spiky_loss",
        lambda c: c.training.check_for_spiky_loss,
        "says what a spike is",
        ("--check-for-spiky-loss",),
    ),
    Dependents(
        ("bad_step_action",),
        "check_for_nan_in_loss_and_grad",
        lambda c: c.training.must_be_finite or c.training.check_for_spiky_loss,
        "says what follows a step that is found to be bad",
        ("--check-for-nan-in-loss-and-grad", "--check-for-spiky-loss"),
    ),
    Dependents(
        ("manual_gc_interval",),
        "manual_gc",
        lambda c: c.training.manual_gc,
        "counts the steps between collections",
        ("--manual-gc",),
    ),
)
