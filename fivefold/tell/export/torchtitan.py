"""Settings for torchtitan: the command line of `torchtitan.train` (checked with 0.3.0)."""

from collections.abc import Iterator, Mapping
from math import ceil, inf, isclose
from types import MappingProxyType
from typing import Any

from fivefold.config.model import INITIAL
from fivefold.config.sharding import SHARDING
from fivefold.config.torchtitan_job.pipeline import SCHEDULES
from fivefold.config.torchtitan_job.rates import DECAYS
from fivefold.layout import Layout
from fivefold.pipeline.schedules.registry import Shape
from fivefold.pipeline.split.layout import CUTTING
from fivefold.tell.export.settings import (
    Export,
    Settings,
    command_line,
    described,
    flag,
    formats,
    in_steps,
    lost_types,
)
from fivefold.tell.export.stand_in import changes, one_stage_a_rank
from fivefold.tell.export.torchtitan_models import (
    ITS_MODELS,
    WITHOUT_MEANING,
    known,
    why_unknown,
)


def _its_schedules(stages: int, *, in_a_v: bool = False) -> dict[str, str]:
    """Its name of each schedule for so many stages a rank."""
    every = ((name, each) for name, each in SCHEDULES.items() if each.stages == stages)
    return {each.name: name for name, each in every if each.in_a_v is in_a_v}


_OF_ONE_STAGE = MappingProxyType(_its_schedules(1) | {"combined_1f1b": "1F1B"})
_OF_A_LOOP = MappingProxyType(
    {"gpipe": "LoopedBFS"} | _its_schedules(2) | {"combined_1f1b": "Interleaved1F1B"}
)
_OF_A_V = MappingProxyType(_its_schedules(2, in_a_v=True))
ITS_SCHEDULES = (*_OF_ONE_STAGE, *_OF_A_LOOP, *_OF_A_V)
_WSD_DECAYS = MappingProxyType({ours: name for name, ours in DECAYS.items()})


def torchtitan(layout: Layout) -> Export:
    """The flags of a layout; the kind of recomputation comes last, as a subcommand.

    Settings to which torchtitan's configurations give values of their own are always included.
    """
    layout, uncounted = in_steps(layout)
    said = Settings(layout.config)
    name = known(layout.config.model, layout.config.training)
    runs = its_pipeline(layout)
    schedule = _its_schedule(runs) or _OF_ONE_STAGE[runs.schedule]
    lines = [
        *(() if name is None else flag("module", ITS_MODELS[name].module)),
        *(() if name is None else flag("config", name)),
        *_training(said, layout),
        *_parallelism(said, layout),
        *_pipeline(said, runs, schedule),
        *_optimizer(said),
        f"activation-checkpoint:{said['recompute_granularity'] or 'none'}",
    ]
    missing = [
        *uncounted,
        *_lost_of_the_model(said, layout, name),
        *_lost_of_the_rate(said),
        *_lost_of_the_layout(said, layout, runs),
        *_lost(said, layout),
        *said.unread("no flag there"),
    ]
    return Export(command_line(lines), tuple(missing))


def _switch(name: str, on: bool) -> Iterator[str]:
    """A flag that can be turned on and off."""
    section, _, last = name.rpartition(".")
    yield from flag(name if on else f"{section}.no_{last}")


def _training(said: Settings, layout: Layout) -> Iterator[str]:
    grid = layout.grid
    together = layout.num_microbatches if grid.pp > 1 else 1
    yield from flag("training.local_batch_size", said["micro_batch_size"] * together)
    yield from flag("training.global_batch_size", said["global_batch_size"])
    yield from flag("training.seq_len", said["seq_length"])
    yield from flag("training.steps", said["train_iters"])
    yield from flag("training.max_norm", said["clip_grad"] or inf)
    kind = "bfloat16" if said["precision"] == "bf16" else "float32"
    yield from flag("training.mixed_precision_param", kind)
    if grid.pp > 1 or grid.ep > 1:
        yield from flag("training.disable_cuda_graphs")
    if said["param_cpu_offload"]:
        yield from flag("training.enable_cpu_offload")
    yield from flag("debug.seed", said["seed"])
    yield from _switch("debug.deterministic", said["deterministic_mode"])
    if said["manual_gc_interval"]:  # it always collects garbage itself
        yield from flag("training.gc_freq", said["manual_gc_interval"])
    seconds = ceil(60 * said["distributed_timeout_minutes"])
    yield from flag("comm.init_timeout_seconds", seconds)
    yield from flag("comm.train_timeout_seconds", seconds)
    whole = said["full_validation"]
    evaluates = said["eval_interval"] > 0 and (said["eval_iters"] > 0 or whole)
    yield from _switch("validator.enable", evaluates)
    if evaluates:
        yield from flag("validator.freq", said["eval_interval"])
        yield from flag("validator.steps", -1 if whole else said["eval_iters"])
    yield from flag("profiler.no_enable_profiling")
    overlapped = said["tp_comm_overlap"]
    yield from _switch("compile.enable", said["compile"] or overlapped)
    yield from _switch("compile.enable_async_tensor_parallel", overlapped)
    if said["compile"] or overlapped:
        yield from flag("compile.components", "model,loss")
        yield from flag("compile.backend", said["compile_backend"])


def _parallelism(said: Settings, layout: Layout) -> Iterator[str]:
    grid, sharding = layout.grid, SHARDING[said["data_parallel_sharding_strategy"]]
    sharded = sharding.splits_optimizer

    def degree(name: str, size: int) -> Iterator[str]:
        yield from flag(f"parallelism.{name}_degree", size)

    said.mention("num_distributed_optimizer_instances", "data_parallel_shard_size")
    yield from degree("data_parallel_replicate", grid.dp_replicate if sharded else grid.dp)
    yield from degree("data_parallel_shard", grid.dp_shard if sharded else 1)
    gathers = "always" if sharding.splits_parameters else "never"
    yield from flag("parallelism.fsdp_reshard_after_forward", gathers)
    yield from degree("tensor_parallel", said["tensor_model_parallel_size"])
    if grid.tp > 1:
        yield from _switch("parallelism.enable_sequence_parallel", said["sequence_parallel"])
    yield from degree("context_parallel", said["context_parallel_size"])
    yield from degree("expert_parallel", said["expert_model_parallel_size"])
    yield from degree("pipeline_parallel", said["pipeline_model_parallel_size"])


def its_pipeline(layout: Layout) -> Layout:
    """The layout that torchtitan runs: with one stage a rank if it lacks the schedule."""
    if _its_schedule(layout) is not None:
        return layout
    return one_stage_a_rank(layout, "1f1b" if _fills(layout) else "gpipe")


def _its_schedule(layout: Layout) -> str | None:
    """The name of torchtitan's schedule for the layout's pipeline; None if there is none."""
    pp, split, microbatches = layout.grid.pp, layout.split, layout.num_microbatches
    table: Mapping[str, str] = _OF_A_V
    if split.num_virtual == 1:
        # One rank runs its microbatches one by one.
        table = _OF_ONE_STAGE if pp > 1 else {"1f1b": "1F1B"}
    elif pp > 1 and Shape.LOOP.fits(split.placement):
        table = _OF_A_LOOP
    name = table.get(layout.schedule)
    rounds = max(1, microbatches // pp)
    if (name or "").startswith("Interleaved") and microbatches % rounds:
        return None  # it cuts the microbatches into equal rounds
    return None if name == "1F1B" and not _fills(layout) else name


def _fills(layout: Layout) -> bool:
    """Whether there are enough microbatches for torchtitan's 1F1B."""
    return layout.num_microbatches >= layout.grid.pp


def _pipeline(said: Settings, runs: Layout, schedule: str) -> Iterator[str]:
    said.mention("pipeline_schedule", *CUTTING)
    if runs.grid.pp > 1:
        yield from flag("parallelism.pipeline_parallel_schedule", schedule)
        size = said["micro_batch_size"]
        yield from flag("parallelism.pipeline_parallel_microbatch_size", size)
        yield from flag("parallelism.module_fqns_per_model_part", *_stages(runs))


def _stages(layout: Layout) -> Iterator[str]:
    """torchtitan's names of the modules in each stage."""
    for stage in layout.split.stages:
        first = ["tok_embeddings"] if stage.embedding else []
        last = ["norm", "lm_head"] if stage.head else []
        yield ",".join([*first, *(f"layers.{layer}" for layer in stage.layers), *last])


def _optimizer(said: Settings) -> Iterator[str]:
    group = "optimizer.param_groups.0.optimizer_kwargs"
    yield from flag(f"{group}.lr", said["lr"])
    yield from flag(f"{group}.betas", said["adam_beta1"], said["adam_beta2"])
    yield from flag(f"{group}.eps", said["adam_eps"])
    yield from flag(f"{group}.weight_decay", said["weight_decay"])
    for name, value in _rate(said).items():
        yield from flag(f"lr_scheduler.{name}", value)


_UNKNOWN_DECAY = "inverse-square-root"


def _warm_up(said: Settings) -> int:
    """Steps of its warm-up, whose last one has the whole rate and comes before any decay."""
    iters, first = said["lr_warmup_iters"], said["lr_warmup_init"]
    ends_apart = said["lr_decay_style"] in ("constant", "WSD")
    same = ends_apart and isclose(first * (iters + 1), said["lr"], rel_tol=1e-9)
    return int(iters + 1 if iters and same else iters)


def _rate(said: Settings) -> dict[str, Any]:
    """Flags of the learning rate: a warm-up, a stable phase, a decay over the last steps."""
    style, shape = said["lr_decay_style"], said["lr_wsd_decay_style"]
    warm_up = _warm_up(said)
    # Beyond its last step the rate would go on falling, below zero; a warm-up would be cut short.
    steps = max(said["lr_decay_iters"] or 0, said["train_iters"], warm_up)
    share: float | None = None
    if style in ("constant", _UNKNOWN_DECAY):
        share = 0.0
    elif style == "WSD":
        share = said["lr_wsd_decay_iters"] / steps
    return {
        "warmup_steps": warm_up,
        "total_steps": steps,
        "decay_ratio": share,
        "decay_type": _WSD_DECAYS.get(shape if style == "WSD" else style, "linear"),
        "min_lr_factor": said["min_lr"] / said["lr"],
    }


def _lost_of_the_model(said: Settings, layout: Layout, name: str | None) -> Iterator[str]:
    model, training = layout.config.model, layout.config.training
    said.mention(*vars(model), "fp8_format", "fp4_format", "fp8_recipe")
    if name is None:
        yield f"--module and --config must name a model: {described(layout.config)}"
        yield why_unknown(model)
    narrow = (training.fp8_format, training.fp8_recipe)
    if training.fp4_format or (
        training.fp8_format
        and (name is None or ITS_MODELS[name].narrow != narrow or model.first_last_layers_bf16)
    ):
        yield (
            "multiplications in 8 or 4 bits are converters of the model's configuration there: "
            f"{formats(said)}"
        )
    balances = model.moe_router_enable_expert_bias
    balances |= "balancing by a bias of the router" in model.unmodelled
    if model.num_experts and not balances:
        yield "it balances experts by a bias of the router, which this model does not"
    said.mention(*INITIAL)
    given = {n: std for n in INITIAL if (std := getattr(model, n)) is not None}
    by = ", ".join(f"{name} = {std}" for name, std in given.items())
    yield f"initial weights are drawn as its models say, not by {by}"


def _lost_of_the_rate(said: Settings) -> Iterator[str]:
    style, shape, end = said["lr_decay_style"], said["lr_wsd_decay_style"], said["lr_decay_iters"]
    if style == _UNKNOWN_DECAY:
        yield f"it has no {style} decay (lr_decay_style): after the warm-up the rate stays at lr"
    if style == "WSD" and shape not in _WSD_DECAYS:
        yield f"it has no {shape} decay (lr_wsd_decay_style): a linear one stands in its place"
    length, warm_up = said["lr_wsd_decay_iters"], _warm_up(said)
    if style == "WSD" and length > (end or said["train_iters"]) - warm_up:
        yield (
            f"its decay begins after the warm-up of {warm_up} steps, and falls all the way from "
            f"there: lr_wsd_decay_iters = {length} would begin earlier"
        )
    if style != "constant" and end is not None and end < said["train_iters"]:
        yield f"its decay ends with the last step, not at lr_decay_iters = {end}"
    if 0 < warm_up == said["lr_warmup_iters"]:
        yield (
            "its warm-up begins with a step's share of the rate and runs one step ahead, not from "
            f"lr_warmup_init = {said['lr_warmup_init']}"
        )
    if said["weight_decay"]:
        yield "its weight_decay falls on biases and norms, too"


def _lost_of_the_layout(said: Settings, layout: Layout, runs: Layout) -> Iterator[str]:
    parallel, grid = layout.config.parallel, layout.grid
    if parallel.sharding.splits_optimizer and not parallel.sharding.splits_parameters:
        yield (
            "torchtitan always shards parameters; fsdp_reshard_after_forward never keeps them "
            "gathered between forward and backward, which is nearest to ZeRO-2"
        )
    if grid.cp > 1 and not parallel.sharding.splits_optimizer:
        yield (
            "torchtitan shards weights over context-parallel ranks, whatever "
            "data_parallel_sharding_strategy says"
        )
    if runs is not layout:
        yield (
            f"torchtitan has no {layout.schedule} schedule (pipeline_schedule) for "
            f"{layout.num_microbatches} microbatches and {layout.split.num_virtual} stages a rank "
            f"like these: {_OF_ONE_STAGE[runs.schedule]}, one stage a rank, stands in its place; "
            f"{changes(layout, runs)}; fivefold schedule "
            "--torch-csv writes others for parallelism.pipeline_parallel_schedule_csv"
        )
    if said["expert_tensor_parallel_size"] > 1:
        yield f"expert_tensor_parallel_size = {grid.etp} has no flag there"
    if grid.ep > 1 and said["moe_token_dispatcher_type"] != "alltoall":
        yield (
            "how tokens reach their experts belongs to the model's configuration there: "
            f"moe_token_dispatcher_type = {parallel.moe_token_dispatcher_type}"
        )
    if grid.cp > 1 and said["cp_comm_type"] != ("all_gather",):
        ways = " ".join(parallel.cp_comm_type)
        yield f"its context parallelism gathers keys and values; cp_comm_type = {ways}"
    if said["tp_comm_overlap"] and not said["compile"]:
        yield "its tp_comm_overlap needs torch.compile, which was turned on (compile)"


def _lost(said: Settings, layout: Layout) -> Iterator[str]:
    memory, training = layout.config.memory, layout.config.training
    said.mention(*WITHOUT_MEANING)
    if memory.recompute_granularity == "selective":
        modules = " ".join(said["recompute_modules"])
        yield f"recompute_modules {modules} became its selection operation by operation"
        if memory.recomputes_first_layers:
            layers = " ".join(map(str, said["recompute_num_layers"]))
            said.mention("recompute_method")
            yield f"recompute_method block of {layers} layers a stage became that of all layers"
    if memory.recompute_granularity == "full":
        said.mention("recompute_method", "recompute_num_layers")
        layers = " ".join(map(str, memory.recompute_num_layers))
        if memory.recompute_method == "block":
            yield f"recompute_method block of {layers} layers a stage became that of all layers"
        elif memory.recompute_num_layers != (1,):
            yield f"it recomputes layer by layer, not in groups (recompute_num_layers = {layers})"
    if said["cross_entropy_loss_fusion"]:
        impl = said["cross_entropy_fusion_impl"]
        yield (
            "cross_entropy_loss_fusion belongs to the model's configuration there, whose loss goes "
            f"by 8 chunks of the tokens (cross_entropy_fusion_impl = {impl})"
        )
    if said["param_cpu_offload"]:
        said.mention("optimizer_cpu_offload", "offload_optimizer_states")
        given = said.values_of(
            "optimizer_offload_fraction", "optimizer_offload_path", "param_offload_path"
        )
        yield (
            "parameters and gradients go to host memory together with the optimizer, all of them: "
            f"{given} were left out"
        )
    elif said["optimizer_cpu_offload"] or said["offload_optimizer_states"]:
        share = said["optimizer_offload_fraction"]
        on_host = said["optimizer_cpu_offload"]
        name = "optimizer_cpu_offload" if on_host else "offload_optimizer_states"
        yield (
            f"{name} was left out: training.enable_cpu_offload there moves "
            f"parameters and gradients, too, and all of them (optimizer_offload_fraction = {share})"
        )
    yield from lost_types(said)
    if training.precision in ("fp16", "fp64"):
        yield f"it computes in bf16 or fp32, not in precision = {training.precision}"
    data = said.values_of("data_path", "tokenizer_model")
    yield f"corpus, tokenizer and checkpoints are those of its configuration: {data}"
