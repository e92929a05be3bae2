"""Settings of what a run stores and reports: checkpoints, metrics, profiles and audits."""

from dataclasses import dataclass

from fivefold.config.settings import Count, Whole, option


@dataclass(frozen=True)
class CheckpointConfig:
    """The run folder and its checkpoints."""

    save: str | None = option(
        None,
        "run folder (default: runs/RECIPE-TIME); if it holds checkpoints, the run continues from "
        "the latest",
    )
    load: str | None = option(
        None,
        "what to start from, in any layout: a run folder or a distributed checkpoint of "
        "Megatron-LM, to continue; or Hugging Face weights (a folder, or ORG/NAME on the hub)",
    )
    load_adapter: str | None = option(
        None,
        "PEFT adapter (a folder, or ORG/NAME on the hub) to continue training, on top of the "
        "weights of --load",
    )
    ckpt_step: Whole | None = option(None, "step of --load to start from (default: its latest)")
    finetune: bool = option(
        False, "load only the weights of --load; step, optimizer and data start anew"
    )
    moe_use_upcycling: bool = option(
        False,
        "start from the weights of a dense model at --load: each expert is a copy of its MLP, or a "
        "part of it",
    )
    moe_upcycling_granularity: Count = option(
        1,
        "parts into which inner features of the dense MLP are cut, of moe_ffn_hidden_size each; "
        "1: experts are whole copies",
    )
    save_interval: Whole | None = option(
        0,
        "steps between checkpoints; 0: only after the last step; auto: the interval that loses "
        "the least time, from the cost of a checkpoint and the failure rate of devices",
        none="auto",
    )
    keep_latest_k: Count | None = option(3, "number of checkpoints to keep; none: all")
    save_retain_interval: Count | None = option(
        None,
        "also keep checkpoints of steps that are multiples of this, which must be a multiple "
        "of save_interval",
    )
    async_save: bool = option(True, "write checkpoints while training continues")
    non_persistent_save_interval: Whole = option(
        0, "steps between copies of each rank's state in the memory of its host; 0: none"
    )
    non_persistent_local_ckpt_dir: str = option(
        "/dev/shm", "folder in the memory of each host for these copies"
    )
    replication_jump: Whole | None = option(
        None,
        "distance in ranks to the one whose host keeps the second copy; none: the nearest on "
        "another host",
    )


@dataclass(frozen=True)
class LoggingConfig:
    """Console, metrics, profiles and audits; metrics.jsonl is always written."""

    log_interval: Count = option(1, "steps between console lines")
    log_straggler: bool = option(
        False, "compare the times of replicas at each console line, and name slow ones"
    )
    tensorboard: bool = option(False, "write TensorBoard events (extra: fivefold[tensorboard])")
    wandb_project: str | None = option(None, "report to this W&B project (extra: fivefold[wandb])")
    profile: bool = option(
        False,
        "record when each pipeline action runs; the run folder keeps the last profiled step",
    )
    profile_step_start: int = option(10, "first step that is profiled")
    profile_step_end: int = option(12, "first step after profile_step_start that is not profiled")
    profile_ranks: tuple[int, ...] = option((0,), "ranks whose pipelines are profiled")
    use_pytorch_profiler: bool = option(
        False, "also record torch's trace of these steps and ranks, with named actions and messages"
    )
    record_memory_history: bool = option(
        False, "also record the GPU allocator's history in these steps, for pytorch.org/memory_viz"
    )
    audit: bool = option(
        False, "record what the second step sends, holds and computes, for `fivefold audit`"
    )
