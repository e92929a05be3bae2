"""The ranks, the batch and the memory of a job of torchtitan, in settings."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from fivefold.config.model import ModelConfig
from fivefold.config.torchtitan_job.job import TitanJob
from fivefold.config.torchtitan_job.pipeline import of_pipeline
from fivefold.config.torchtitan_job.releases import IN_PYTHON
from fivefold.config.translation import Named

_P = "parallelism."


class Degrees(NamedTuple):
    """How the ranks of a job are split.

    Attributes:
        replicate: copies of what is sharded.
        shard: ranks of a sharding group; None: all that are left, of a number that is not known.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks.
        pp: pipeline-parallel ranks.
    """

    replicate: int
    shard: int | None
    cp: int
    tp: int
    pp: int

    @property
    def sharded(self) -> bool:
        """Whether it is FSDP, or HSDP; context-parallel ranks share weights, too."""
        return self.shard != 1 or self.cp > 1

    @property
    def ranks(self) -> int | None:
        """All ranks; None: not known."""
        split = self.replicate * self.cp * self.tp * self.pp
        return None if self.shard is None else self.shard * split


def degrees_of(job: TitanJob, ranks: int | None) -> Degrees:
    """The degrees of a job on a number of ranks; None: not known."""
    fixed = {
        name: job.count(f"{_P}{path}_degree") or 1
        for name, path in (
            *(("replicate", "data_parallel_replicate"), ("cp", "context_parallel")),
            *(("tp", "tensor_parallel"), ("pp", "pipeline_parallel")),
        )
    }
    shard: int | None = job.number(f"{_P}data_parallel_shard_degree", -1)
    found = Degrees(shard=1, **fixed)
    split = found.ranks or 1
    if shard is not None and shard < 1:
        if shard != -1:
            job.mistakes.add(f"{_P}data_parallel_shard_degree cannot be {shard}: -1, or 1 or more")
        shard = None if ranks is None else max(ranks // split, 1)
    found = found._replace(shard=shard)
    if None not in (ranks, found.ranks) and found.ranks != ranks:
        job.mistakes.add(
            f"{ranks} ranks are not dp_replicate {found.replicate} x dp_shard {found.shard} x "
            f"cp {found.cp} x tp {found.tp} x pp {found.pp} = {found.ranks}",
            works=[f"--nproc {found.ranks}"],
        )
    return found


def of_batch(job: TitanJob, degrees: Degrees, lost: list[str]) -> Named:
    """The batch and its microbatches, which a pipeline has within a rank's batch."""
    local = job.count("training.local_batch_size") or 1
    micro = (job.count(f"{_P}pipeline_parallel_microbatch_size") or 1) if degrees.pp > 1 else local
    if local % micro:
        job.mistakes.add(
            f"training.local_batch_size = {local} is not a multiple of "
            f"{_P}pipeline_parallel_microbatch_size = {micro}"
        )
    dp = None if degrees.shard is None else degrees.shard * degrees.replicate
    batch = job.number("training.global_batch_size", -1)
    if batch < 1 and dp is None:
        job.mistakes.add(
            "the job's batch is training.local_batch_size x its data-parallel ranks, and the job "
            "does not say how many ranks it has",
            works=["--nproc N"],
        )
        return
    batch = batch if batch >= 1 else local * (dp or 1)
    if dp is not None and batch % (local * dp):
        job.mistakes.add(
            f"training.global_batch_size = {batch} is not a multiple of training.local_batch_size "
            f"= {local} x {dp} data-parallel ranks = {local * dp}"
        )
    runs = batch // (local * (dp or 1))
    if degrees.pp > 1 and dp is not None and runs > 1:
        lost.append(
            f"its pipeline runs {runs} times a step, with {local // micro} microbatches each: here "
            f"it runs once, with {runs * (local // micro)}"
        )
    yield "micro_batch_size", micro
    yield "global_batch_size", batch
    yield "seq_length", job.count("training.seq_len")


def of_parallel(
    job: TitanJob, degrees: Degrees, model: ModelConfig | None, lost: list[str]
) -> Named:
    """Degrees, sharding, stages, and how context and experts are exchanged."""
    sharded = degrees.sharded
    yield "num_distributed_optimizer_instances", degrees.replicate if sharded else 1
    yield "data_parallel_shard_size", degrees.shard if sharded else degrees.replicate
    yield "data_parallel_sharding_strategy", _strategy(job, degrees, lost)
    yield "tensor_model_parallel_size", degrees.tp
    sequence = degrees.tp > 1 and job.flag(f"{_P}enable_sequence_parallel", True)
    yield "sequence_parallel", sequence
    if job.flag(f"{_P}disable_loss_parallel") and degrees.tp > 1:
        lost.append(f"{_P}disable_loss_parallel: the loss is of logits that stay split here")
    if job.flag(f"{_P}enable_async_tensor_parallel") and degrees.tp > 1:
        compiled = "model" in compiled_parts(job)
        yield "tp_comm_overlap", compiled and sequence
        if not (compiled and sequence):
            lost.append(f"{_P}enable_async_tensor_parallel wants a compiled model there")
    yield from _context(job, degrees.cp, lost)
    yield "pipeline_model_parallel_size", degrees.pp
    if degrees.pp > 1:
        yield from of_pipeline(job, degrees.pp, None if model is None else model.num_layers, lost)
    if model is None or model.num_experts is not None:
        yield from _experts(job, degrees, lost)


def _again(job: TitanJob, degrees: Degrees) -> bool:
    """Whether FSDP gathers weights for the backward again."""
    again = job.choice(f"{_P}fsdp_reshard_after_forward", "default", "always", "never")
    return again == "always" or (again == "default" and degrees.pp == 1)


def _strategy(job: TitanJob, degrees: Degrees, lost: list[str]) -> str:
    again = _again(job, degrees)
    if not degrees.sharded:
        return "no_shard"
    if again:
        return "optim_grads_params"
    lost.append(
        "its weights are sharded and stay gathered between forward and backward: here, as in "
        "ZeRO-2, they are gathered once a step"
    )
    return "optim_grads"


def _context(job: TitanJob, cp: int, lost: list[str]) -> Named:
    rotation = job.choice(f"{_P}context_parallel_rotate_method", "allgather", "alltoall")
    balancer = job.get(f"{_P}context_parallel_load_balancer")
    yield "context_parallel_size", cp
    if cp == 1:
        return
    yield "cp_comm_type", ["all_gather" if rotation == "allgather" else "p2p"]
    if balancer not in ("headtail", None) or job.says(f"{_P}context_parallel_load_balancer"):
        lost.append(
            f"{job.said(f'{_P}context_parallel_load_balancer')}: each rank has a chunk of the "
            "beginning and one of the end here"
        )


def _experts(job: TitanJob, degrees: Degrees, lost: list[str]) -> Named:
    """Ranks that split experts; without such ranks tensor parallelism splits each of them."""
    ep = job.count(f"{_P}expert_parallel_degree") or 1
    etp = job.count(f"{_P}expert_tensor_parallel_degree") or 1
    backend = job.choice(f"{_P}expert_parallel_comm_backend", "standard", "deepep")
    yield "expert_model_parallel_size", ep
    yield "expert_tensor_parallel_size", etp if ep > 1 else degrees.tp
    if ep > 1 and etp not in (1, degrees.tp):
        job.mistakes.add(
            f"{_P}expert_tensor_parallel_degree = {etp}: it is 1, or "
            f"{_P}tensor_parallel_degree = {degrees.tp}"
        )
    sends = "" if job.configuration is None else job.configuration.dispatcher
    if ep > 1 and (backend == "deepep" or sends.startswith(("DeepEP", "HybridEP"))):
        yield "moe_token_dispatcher_type", "flex"
    overlaps = job.flag(f"{_P}pipeline_parallel_expert_parallel_overlap", True)
    in_pairs = job.word(f"{_P}pipeline_parallel_schedule") == "dualpipev" and degrees.pp > 1
    if ep > 1 and in_pairs and overlaps and job.release < IN_PYTHON:
        lost.append(
            "it overlaps experts' messages in pairs of a forward and a backward: "
            "--overlap-moe-expert-parallel-comm"
        )
    if job.flag("debug.moe_force_load_balance"):
        yield "moe_router_force_load_balancing", True


def compiled_parts(job: TitanJob) -> list[str]:
    """What torch.compile compiles of a job."""
    parts = job.words("compile.components")
    return parts if job.flag("compile.enable") else []


def of_memory(job: TitanJob, degrees: Degrees, model: ModelConfig | None, lost: list[str]) -> Named:
    """Recomputation and offloading."""
    if job.flag("training.enable_cpu_offload") and degrees.sharded:
        yield "optimizer_cpu_offload", True
        whole = _again(job, degrees)
        yield "param_cpu_offload", whole
        if not whole:
            lost.append(
                "training.enable_cpu_offload: weights that stay gathered stay on the device"
            )
    elif job.flag("training.enable_cpu_offload"):
        lost.append("training.enable_cpu_offload moves nothing there without FSDP")
    path = "activation_checkpoint."
    mode = job.choice(f"{path}mode", "selective", "full", "none", "memory_budget")
    named = job.get(f"{path}selective_ac_option")
    option = "op" if named is None or job.release >= IN_PYTHON else str(named)
    if mode == "memory_budget":
        lost.append(f"{job.said(f'{path}mode', f'{path}memory_budget')}: nothing is recomputed")
    elif mode == "full" or (mode == "selective" and option in ("0", "1")):
        yield "recompute_granularity", "full"
    elif mode == "selective" and option == "op":
        yield "recompute_granularity", "selective"
        dense = model is None or not all(map(model.is_moe, range(model.num_layers)))
        experts = model is not None and model.num_experts is not None
        yield "recompute_modules", ["layernorm", *["mlp"] * dense, *["routed_experts"] * experts]
        lost.append(
            "it recomputes operation by operation, and every second product: here norms, MLPs and "
            "experts (--recompute-modules)"
        )
    elif mode == "selective":
        yield from _every_nth(job, option, degrees.pp, model, lost)


def _every_nth(
    job: TitanJob, option: str, pp: int, model: ModelConfig | None, lost: list[str]
) -> Iterator[tuple[str, Any]]:
    path = "activation_checkpoint.selective_ac_option"
    if not option.isdecimal():
        job.mistakes.add(f"{path} cannot be {option}", works=["op", "2"])
        return
    count = (0 if model is None else model.num_layers) // (pp * int(option))
    if count == 0:
        lost.append(f"{path} = {option}: nothing is recomputed")
        return
    yield "recompute_granularity", "full"
    yield "recompute_method", "block"
    yield "recompute_num_layers", [count]
    where = "each stage" if pp > 1 else "the model"
    lost.append(f"it recomputes every layer in {option}: here the first {count} of {where}")
