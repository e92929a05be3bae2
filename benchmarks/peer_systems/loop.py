"""Plain PyTorch with a loop over experts: what one writes first, in as few lines as it takes.

Rows are sorted by the ranks of their experts and sent by `all_to_all_single`; there each expert
looks for its rows, and adds their results where they came from. Everything else is the model of
`pytorch.py` with its tensor parallelism and pipeline; the gradients of all that is not an expert
are summed in one message after the backward.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.peer_systems.common import (
    EXPERT_FFN,
    EXPERTS,
    HIDDEN,
    MLP,
    TOPK,
    Job,
    Model,
    loss_of,
    main,
)
from benchmarks.peer_systems.pytorch import (
    adamw,
    clipping,
    held,
    install_tensor_parallel,
    pipelined,
    sharded,
)
from benchmarks.peer_systems.rows import Row


class MoE(nn.Module):
    """Experts of this rank by their global numbers; the others are on the ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.here = EXPERTS // self.ranks
        self.first = group.rank() * self.here
        mine = range(self.first, self.first + self.here)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(number): MLP(EXPERT_FFN) for number in mine})

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.flatten(0, 1)
        scores_TK, experts_TK = self.router(x_TH).topk(TOPK)
        weights_TK = scores_TK.softmax(-1)
        experts, order = experts_TK.flatten().sort()
        tokens = order // TOPK
        if self.ranks > 1:
            rows, experts, back = self.exchange(x_TH[tokens], experts)
        else:
            rows, back = x_TH[tokens], lambda y: y
        y = torch.zeros_like(rows)
        for number, expert in self.experts.items():
            (places,) = (experts == int(number)).nonzero(as_tuple=True)
            y = y.index_add(0, places, expert(rows[places]))
        weighted = back(y) * weights_TK.flatten()[order][:, None]
        return torch.zeros_like(x_TH).index_add(0, tokens, weighted).view_as(x_BSH)

    def exchange(
        self, rows: Tensor, experts: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Rows and their experts' numbers to the ranks of these, and the way of results back."""
        counts = torch.bincount(experts // self.here, minlength=self.ranks)
        got = torch.empty_like(counts)
        dist.all_to_all_single(got, counts, group=self.group)
        sent, taken = counts.tolist(), got.tolist()
        there = rows.new_empty(sum(taken), HIDDEN)
        there = all_to_all_single(there, rows, taken, sent, group=self.group)
        numbers = experts.new_empty(sum(taken))
        dist.all_to_all_single(numbers, experts, taken, sent, group=self.group)

        def back(y: Tensor) -> Tensor:
            home = torch.empty_like(rows)
            return all_to_all_single(home, y, sent, taken, group=self.group)

        return there, numbers, back


def supports(row: Row) -> bool:
    return row.ep is not None


def build(row: Row) -> Job:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (row.pp, row.dp, row.tp), mesh_dim_names=("pp", "dp", "tp"))
    group = mesh.get_group("tp" if row.tp > 1 else "dp")
    assert group.size() == row.ep, "experts are split over all ranks that share a stage"
    stage = mesh.get_local_rank("pp")
    model = Model(stage, row.pp, mlp=partial(MoE, group))
    if row.tp > 1:
        install_tensor_parallel(model, mesh["tp"], row.sp, dense=False)
    optimizer = adamw(model)
    complete = partial(sum_gradients, model, mesh, row)
    split = [p for name, p in model.named_parameters() if ".experts." in name or sharded(p)]
    clip = clipping(model.parameters(), split, mesh, "tp" if row.tp > 1 else "dp")
    schedule = pipelined(model, mesh, row) if row.pp > 1 else None

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor | None:
        if schedule is not None:
            loss = schedule(tokens_BS, labels_BS)
        elif row.tp > 1:
            with loss_parallel():
                loss = loss_of(model(tokens_BS), labels_BS)
                loss.backward()
        else:
            loss = loss_of(model(tokens_BS), labels_BS)
            loss.backward()
        complete()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return None if loss is None else loss.detach()

    return Job(step, mesh.get_local_rank("dp"))


def sum_gradients(model: nn.Module, mesh: DeviceMesh, row: Row) -> None:
    """Means over the ranks with other sequences; experts have had the rows of all of them."""
    named = list(model.named_parameters())
    if row.dp > 1:
        for name, parameter in named:
            if ".experts." in name:
                held(parameter).div_(row.dp)
        group, kept = mesh.get_group("dp"), [p for name, p in named if ".experts." not in name]
    else:  # tensor-parallel ranks have routed other parts of the same sequences
        group, kept = mesh.get_group("tp"), [p for name, p in named if ".router." in name]
    if group.size() == 1:
        return
    gradients = [held(parameter) for parameter in kept]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat.div_(row.dp)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main(build, supports)
