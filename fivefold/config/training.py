"""Settings of training and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

from fivefold.config.batch_sizes import BatchSizes
from fivefold.config.settings import Allowed, Count, NonNegative, Positive, Share, Whole, option

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8})
"""Bytes of an element, by precision."""
Precision = Literal["bf16", "fp16", "fp32", "fp64"]
MomentType = Literal["fp32", "bf16", "fp8"]
MasterType = Literal["fp32", "bf16"]
GradientType = Literal["fp32", "bf16"]
LARGEST_LOSS_SCALE = 2.0**64
"""Outside of this factor and its inverse, a scaled gradient may leave the range of fp32."""
LossScale = Annotated[
    float, Allowed(lambda v: 1 / LARGEST_LOSS_SCALE <= v <= LARGEST_LOSS_SCALE, "in 2^-64 .. 2^64")
]
OF_MUON = (
    *("muon_momentum", "muon_nesterov", "muon_num_ns_steps"),
    *("muon_scale_mode", "muon_extra_scale_factor"),
)
"""Settings that only Muon has."""
DYNAMIC_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Settings of a loss scale that is not constant."""
BLOCK = 32
"""Elements of a row that share a scale in a moment of 8 bits; the scale takes a byte."""
NumaBinding = Literal["node", "socket", "exclusive"]
BadStepAction = Literal["stop", "skip", "rewind"]


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length, precision and evaluation.

    One class because these are the settings of one section.
    """

    micro_batch_size: Count = option(1, "sequences per microbatch and data-parallel rank")
    global_batch_size: Count = option(8, "sequences per optimizer step over all ranks")
    seq_length: Count = option(1024, "tokens per sequence")
    rampup_batch_size: tuple[int, ...] = option(
        (),
        "three numbers: sequences of the first step, how many are added at a time until "
        "global_batch_size is reached, and the samples over which this happens",
    )
    train_iters: Count = option(100, "optimizer steps")
    train_samples: Count | None = option(
        None,
        "sequences of the run, instead of train_iters; the learning rate then counts samples",
    )
    seed: Annotated[int, Allowed(lambda v: 0 <= v < 1 << 63, "in 0 .. 2^63 - 1")] = option(
        1234, "seed of initial weights, data order and dropout, whatever the layout"
    )
    precision: Precision = option(
        "bf16", "compute type; bf16 and fp16 keep fp32 master weights and reduce in fp32"
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = option(
        None, "8-bit format of matrix multiplications on top of bf16; hybrid: e5m2 for gradients"
    )
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"] = option(
        "delayed",
        "how 8-bit tensors are scaled; delayed: by the largest elements of earlier steps",
    )
    fp8_margin: int = option(
        0, "with delayed scales: divide the scale by 2 to this power, as headroom"
    )
    fp8_amax_history_len: Count = option(
        1, "with delayed scales: steps whose largest elements are remembered"
    )
    fp8_amax_compute_algo: Literal["most_recent", "max"] = option(
        "most_recent",
        "with delayed scales: use the latest remembered largest element, or the maximum",
    )
    fp8_param_gather: bool = option(
        False, "with fp8_format and sharded weights: gather weights of linear layers in 8 bits"
    )
    disable_parameter_transpose_cache: bool = option(
        False,
        "with fp8_format: quantise weights for each product, not once a step (saves 2 bytes each)",
    )
    fp4_format: Literal["e2m1"] | None = option(
        None, "4-bit format of matrix multiplications on top of bf16"
    )
    compile: bool = option(False, "compile each transformer layer (torch.compile)")
    compile_backend: Literal["inductor", "aot_eager"] = option(
        "inductor", "backend of torch.compile; aot_eager leaves the operations unchanged"
    )
    cuda_graph_impl: Literal["local"] | None = option(
        None,
        "record a step's forwards and backwards as a CUDA graph, which the host launches at once; "
        "needs rows of one document each (--no-reset-attention-mask)",
    )
    cuda_graph_scope: Literal["full_iteration"] = option(
        "full_iteration", "what cuda_graph_impl records: the forwards and backwards of whole steps"
    )
    bias_swiglu_fusion: bool = option(
        True,
        "on GPUs: SwiGLU, quick GeGLU or a squared ReLU in one kernel forward, one backward",
    )
    bias_gelu_fusion: bool = option(
        True, "on GPUs: GeGLU, or GELU with row weights, in one kernel forward, one backward"
    )
    rope_fusion: bool = option(True, "on GPUs: rotate queries and keys in one kernel")
    bias_dropout_fusion: bool = option(
        True,
        "on GPUs: dropout and residual sum in one kernel; attention dropout in attention's",
    )
    fused_residual_rmsnorm: bool = option(
        False,
        "on GPUs: the residual sum after attention and the next norm in one kernel",
    )
    gradient_accumulation_fusion: bool = option(
        True,
        "let products add weight gradients to those of earlier microbatches",
    )
    label_smoothing: Share = option(0.0, "probability spread evenly over the true vocabulary")
    z_loss_coeff: NonNegative = option(
        0.0,
        "factor of the squared log-sum-exp of logits, added to a token's training loss",
    )
    mtp_loss_scaling_factor: NonNegative = option(
        0.1, "weight of the mean loss of multi-token prediction"
    )
    eval_interval: Whole = option(0, "steps between evaluations on the validation sets; 0: never")
    eval_iters: Whole = option(4, "global batches per evaluation of a set; 0: no evaluations")
    full_validation: bool = option(
        False, "evaluate each sample of the validation sets once, instead of eval_iters batches"
    )
    check_for_nan_in_loss_and_grad: bool = option(
        True, "stop before the optimizer step when the loss or gradient norm is not finite"
    )
    check_for_spiky_loss: bool = option(
        False, "treat a step whose loss spikes like one that is not finite"
    )
    spiky_loss_factor: Annotated[float, Allowed(lambda v: v > 1, "above 1")] = option(
        2.0, "a spike is a loss above this many times the median of the last 100 steps"
    )
    bad_step_action: BadStepAction = option(
        "stop",
        "after a step that is not finite or spikes: stop; skip to the next data; or rewind to the "
        "latest saved state and continue with the next data",
    )
    check_weight_hash_across_dp_replicas_interval: Whole = option(
        0,
        "steps between comparisons of replicas' weights (also before saves); 0: never",
    )
    check_loss_across_dp_replicas_interval: Whole = option(
        0,
        "steps between comparisons of replicas' losses and gradients of one batch; 0: never",
    )
    distributed_timeout_minutes: Positive = option(
        10.0, "minutes after which a waiting collective fails"
    )
    watchdog_timeout_seconds: NonNegative = option(
        60.0,
        "seconds without progress after which the hanging rank is named; 0: never",
    )
    numa_binding: NumaBinding | None = option(
        None,
        "bind ranks to CPUs near their GPU or memory: their NUMA node's, socket's, or exclusive "
        "ones",
    )
    exit_duration_in_mins: Positive | None = option(
        None, "minutes after which the run saves its current step and exits, as after SIGTERM"
    )
    exit_interval: Count | None = option(
        None, "save and exit after a step that is a multiple of this; none: at the end only"
    )
    iterations_to_skip: tuple[Whole, ...] = option(
        (),
        "steps whose data is consumed without training, each given as the number of steps before "
        "it (5: the sixth); the learning rate stays, nothing is evaluated, saved or logged",
    )
    manual_gc: bool = option(
        False,
        "collect Python's garbage on all ranks at the same steps, instead of at different times",
    )
    manual_gc_interval: Whole = option(
        0, "steps between collections with manual_gc; 0: only before the first step"
    )
    deterministic_mode: bool = option(
        False, "use only kernels whose results are bit-identical in every run; some are slower"
    )

    @property
    def batch_sizes(self) -> BatchSizes:
        """Number of sequences in each step of the run."""
        return BatchSizes(self.global_batch_size, *self.rampup_batch_size)

    @property
    def counted_in(self) -> str:
        """The unit of durations, as setting names end: iters or samples."""
        return "iters" if self.train_samples is None else "samples"

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run: `train_iters`, or as many as `train_samples` fill."""
        if self.train_samples is None:
            return self.train_iters
        return self.batch_sizes.steps(self.train_samples)

    @property
    def samples(self) -> int:
        """Sequences of all steps of the run."""
        return self.batch_sizes.samples(self.num_steps)

    def lasting(self, steps: int) -> str:
        """The flag that gives a run this many steps."""
        count = steps if self.train_samples is None else self.batch_sizes.samples(steps)
        return f"--train-{self.counted_in} {count}"

    @property
    def step_tokens(self) -> int:
        """Tokens of a training step of the whole batch, on all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def in_16_bits(self) -> bool:
        """Whether the model computes in 16 bits while the optimizer updates masters in fp32."""
        return ELEMENT_BYTES[self.precision] == 2

    @property
    def muon_precision(self) -> Precision:
        """The type in which Muon's iterations multiply: that of the model, except that fp16 lacks
        the range."""
        return "bf16" if self.in_16_bits else self.precision

    @property
    def must_be_finite(self) -> bool:
        """Whether a step that is not finite is left out: always in fp16, for its dynamic
        loss scale."""
        return self.check_for_nan_in_loss_and_grad or self.precision == "fp16"

    @property
    def delays_scales(self) -> bool:
        """Whether 8-bit tensors are scaled by the largest elements of earlier steps."""
        return self.fp8_format is not None and self.fp8_recipe == "delayed"

    @property
    def evaluates(self) -> bool:
        """Whether validation sets are ever read."""
        return self.eval_interval > 0 and (self.eval_iters > 0 or self.full_validation)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, the learning-rate schedule and clipping."""

    optimizer: Literal["adam", "muon"] = option(
        "adam", "AdamW for all weights, or Muon for the matrices of the layers and AdamW for others"
    )
    lr: Positive = option(3e-4, "peak learning rate")
    min_lr: NonNegative = option(0.0, "learning rate at which the decay ends")
    decoupled_lr: Positive | None = option(
        None, "peak learning rate of the embedding and of the output layer (default: lr)"
    )
    decoupled_min_lr: NonNegative | None = option(
        None, "learning rate at which that decay ends (default: min_lr)"
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "cosine", "shape of the decay after the warm-up"
    )
    lr_decay_iters: Count | None = option(
        None, "step at which the decay ends (default: train_iters)"
    )
    lr_decay_samples: Count | None = option(
        None, "with train_samples: sample at which the decay ends (default: train_samples)"
    )
    lr_warmup_iters: Whole = option(0, "steps of linear warm-up")
    lr_warmup_samples: Whole = option(0, "with train_samples: samples of linear warm-up")
    lr_warmup_init: NonNegative = option(0.0, "learning rate that the warm-up starts from")
    lr_wsd_decay_iters: Count | None = option(None, "length of WSD's final decay, in steps")
    lr_wsd_decay_samples: Count | None = option(
        None, "with train_samples: length of WSD's final decay, in samples"
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = option(
        "exponential", "shape of WSD's final decay"
    )
    weight_decay: NonNegative = option(0.1, "decoupled weight decay; biases and norms have none")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "how the weight decay grows over the run"
    )
    start_weight_decay: NonNegative | None = option(None, "initial weight decay, if it grows")
    end_weight_decay: NonNegative | None = option(None, "final weight decay, if it grows")
    adam_beta1: Share = option(0.9, "decay of the first moment")
    adam_beta2: Share = option(0.95, "decay of the second moment")
    adam_eps: Positive = option(1e-8, "added to the root of the second moment")
    muon_momentum: Share = option(0.95, "decay of Muon's mean of gradients")
    muon_nesterov: bool = option(
        False,
        "add the current gradient to the mean once more before orthogonalising it",
    )
    muon_num_ns_steps: Count = option(5, "Newton-Schulz iterations that orthogonalise a matrix")
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = option(
        "spectral",
        "factor of Muon's updates of [out, in]: sqrt(max(out, in)), sqrt(max(1, out/in)), or "
        "sqrt(out/in)",
    )
    muon_extra_scale_factor: Positive = option(
        1.0,
        "further factor of Muon's updates; 0.2 with spectral makes them about as large as AdamW's",
    )
    clip_grad: NonNegative = option(1.0, "largest global gradient norm; 0: no clipping")
    qk_clip: bool = option(
        False,
        "after a step, shrink query and key weights of heads with logits above qk_clip_threshold",
    )
    qk_clip_alpha: Annotated[float, Allowed(lambda v: 0 < v < 1, "in (0, 1)")] = option(
        0.5, "query weights are multiplied by (threshold / logit)^alpha, key weights by the rest"
    )
    qk_clip_threshold: Positive = option(
        100.0, "largest attention logit (q times k, scaled) that is not clipped"
    )
    log_max_attention_logit: bool = option(
        False, "log the largest attention logit of each step; qk_clip always does"
    )
    use_precision_aware_optimizer: bool = option(
        False, "allow other types of gradients, masters and moments, by the settings for each"
    )
    main_params_dtype: MasterType = option(
        "fp32", "type of master weights; bf16: no master, weights are rounded stochastically"
    )
    store_param_remainders: bool = option(
        False, "store masters as the bf16 weight and fp32's other 16 bits (no_shard only)"
    )
    main_grads_dtype: GradientType = option(
        "fp32", "type in which bf16 gradients are kept and summed over microbatches and ranks"
    )
    exp_avg_dtype: MomentType = option(
        "fp32", "type of the first moment between steps; fewer bits are rounded stochastically"
    )
    exp_avg_sq_dtype: MomentType = option(
        "fp32", "type of the second moment between steps; fewer bits are rounded stochastically"
    )
    loss_scale: LossScale | None = option(
        None,
        "constant factor of the fp16 loss, against vanishing gradients; none: dynamic",
    )
    initial_loss_scale: LossScale = option(2.0**32, "initial dynamic loss scale")
    min_loss_scale: LossScale = option(1.0, "smallest dynamic loss scale")
    loss_scale_window: Count = option(
        1000, "steps without overflow after which the loss scale is doubled"
    )
    hysteresis: Count = option(2, "overflows before the loss scale is halved")

    @property
    def of_ends(self) -> "OptimizerConfig":
        """The same settings, with the learning rates of the embedding and the output layer."""
        if self.decoupled_lr is None:
            return self
        floor = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, lr=self.decoupled_lr, min_lr=floor)

    def durations(self, training: TrainingConfig) -> tuple[int, int, int | None]:
        """The end of warm-up, the end of decay and the length of WSD's final decay, in the run's
        unit (`TrainingConfig.counted_in`)."""
        if training.train_samples is None:
            end = self.lr_decay_iters or training.train_iters
            return self.lr_warmup_iters, end, self.lr_wsd_decay_iters
        end = self.lr_decay_samples or training.train_samples
        return self.lr_warmup_samples, end, self.lr_wsd_decay_samples

    @property
    def notes_logits(self) -> bool:
        """Whether the largest attention logits of each step are wanted."""
        return self.qk_clip or self.log_max_attention_logit

    @property
    def loss_scales(self) -> tuple[float, float]:
        """The first loss scale in fp16, and the lowest one that is tried."""
        return self.loss_scale or self.initial_loss_scale, self.loss_scale or self.min_loss_scale

    @property
    def narrow_parameters(self) -> bool:
        """Whether the optimizer updates parameters stored in bf16, with or without remainders."""
        return self.main_params_dtype == "bf16" or self.store_param_remainders

    @property
    def narrow_gradients(self) -> bool:
        """Whether gradients are accumulated and kept in bf16, not in the masters' type."""
        return self.main_grads_dtype == "bf16"

    @property
    def needs_rounding(self) -> bool:
        """Whether weights, gradients or moments have fewer bits than the update computes with."""
        narrow = self.narrow_gradients or self.narrow_parameters
        return narrow or self.moment_types != ("fp32", "fp32")

    @property
    def moment_types(self) -> tuple[MomentType, MomentType]:
        """The types of the first and the second moment; fp32 stands for that of the masters."""
        return self.exp_avg_dtype, self.exp_avg_sq_dtype
