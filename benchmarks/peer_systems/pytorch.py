"""Plain PyTorch: DDP, ZeroRedundancyOptimizer, FSDP2, DTensor TP, torch.distributed.pipelining.

ZeRO-2 is FSDP2 that keeps the parameters gathered from forward to backward. Tensor-parallel
layouts with data parallelism use PyTorch's own transformation of DTensor modules for DDP.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peer_systems.common import ADAMW, BATCH, MICROBATCH, Job, Model, loss_of, main
from benchmarks.peer_systems.rows import CLIP, Row


def supports(row: Row) -> bool:
    return row.ep is None and (row.zero == 0 or row.tp == row.pp == 1)


def build(row: Row) -> Job:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (row.pp, row.dp, row.tp), mesh_dim_names=("pp", "dp", "tp"))
    stage = mesh.get_local_rank("pp")
    whole = Model(stage, row.pp)
    if row.tp > 1:
        install_tensor_parallel(whole, mesh["tp"], row.sp)
    model = install_data_parallel(whole, mesh["dp"], row) if row.dp > 1 else whole
    if row.zero == 1:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, **ADAMW
        )
    else:
        optimizer = adamw(model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clip = clipping(parameters, filter(sharded, parameters), mesh, "tp" if row.tp > 1 else "dp")
    vocabulary = loss_parallel if row.tp > 1 else nullcontext
    forward_backward = pipelined(model, mesh, row) if row.pp > 1 else direct(model)

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor | None:
        with vocabulary():
            loss = forward_backward(tokens_BS, labels_BS)
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Job(step, mesh.get_local_rank("dp"))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW, which cannot mix plain tensors and DTensors in one group."""
    kinds: dict[type, list[Tensor]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in kinds.values()], **ADAMW)


def sharded(parameter: Tensor) -> bool:
    """Whether a rank holds a part of it, also after `_pre_dp_module_transform`."""
    layout = parameter if isinstance(parameter, DTensor) else getattr(parameter, "_st_info", None)
    return layout is not None and any(place.is_shard() for place in layout.placements)


def held(parameter: Tensor) -> Tensor:
    """What this rank holds of a gradient, which DTensor may have left whole or in parts."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        if grad.placements != parameter.placements:
            grad = parameter.grad = grad.redistribute(placements=parameter.placements)
        return grad.to_local()
    return grad


def clipping(
    parameters: Iterable[Tensor], split: Iterable[Tensor], mesh: DeviceMesh, over: str
) -> Callable[[], None]:
    """What clips all gradients to the norm CLIP, in as few operations and messages as possible.

    Args:
        split: those of the parameters that the ranks of the mesh's dimension `over` hold parts of.
    """
    parts = list(split)  # in the same order on all ranks, which redistribute some gradients
    known = set(map(id, parts))
    whole = [parameter for parameter in parameters if id(parameter) not in known]

    def squares(some: list[Tensor]) -> Tensor:
        if not some:
            return torch.zeros(())
        norms = torch._foreach_norm([held(parameter) for parameter in some])
        return torch.stack(norms).square().sum()

    def clip() -> None:
        total = squares(parts)
        if parts:
            dist.all_reduce(total, group=mesh.get_group(over))
        total = total + squares(whole)
        if mesh["pp"].size() > 1:
            dist.all_reduce(total, group=mesh.get_group("pp"))
        scale = (CLIP / (total.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([held(parameter) for parameter in (*parts, *whole)], scale)

    return clip


def direct(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor | None]:
    def forward_backward(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        loss = loss_of(model(tokens_BS), labels_BS)
        loss.backward()
        return loss.detach()

    return forward_backward


def pipelined(
    model: nn.Module, mesh: DeviceMesh, row: Row
) -> Callable[[Tensor, Tensor], Tensor | None]:
    rank = mesh.get_local_rank("pp")
    stage = PipelineStage(model, rank, row.pp, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, BATCH // row.dp // MICROBATCH, loss_fn=loss_of)

    def forward_backward(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor | None:
        if rank < row.pp - 1:
            schedule.step(*((tokens_BS,) if rank == 0 else ()), return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(target=labels_BS, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach()

    return forward_backward


def install_data_parallel(model: Model, mesh: DeviceMesh, row: Row) -> nn.Module:
    if row.zero >= 2:
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=row.zero == 3)
        return model
    if row.pp > 1:
        replicate(model, mesh=mesh)
        return model
    if row.tp > 1:
        _pre_dp_module_transform(model)
    return DistributedDataParallel(
        model, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )


def install_tensor_parallel(
    model: Model, mesh: DeviceMesh, sequence: bool, *, dense: bool = True
) -> None:
    """Megatron's split of every block, the embedding and the head; Shard(1) is the sequence.

    Without `dense`, what stands in the place of the MLPs is left alone.
    """
    between = Shard(1) if sequence else Replicate()
    gather = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=between)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    block = dict.fromkeys(columns, column) | {"self_attn": gather, "self_attn.o_proj": row}
    if dense:
        block |= {"mlp.gate_proj": column, "mlp.up_proj": column}
        block |= {"mlp": gather, "mlp.down_proj": row}
    whole = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        norm = SequenceParallel(use_local_output=True)
        block |= {"input_layernorm": norm, "post_attention_layernorm": norm}
        whole["norm"] = norm
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)
    parallelize_module(
        model, mesh, {name: style for name, style in whole.items() if getattr(model, name)}
    )


if __name__ == "__main__":
    main(build, supports)
