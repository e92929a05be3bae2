"""A small model laid out in every way in which parameters come, with known contents."""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

PLACEMENTS = {"embed_tokens": Shard(0), "q": Shard(0), "o": Shard(1), "norm": Replicate()}


class Layer(nn.Module):
    """Sizes that no mesh axis divides, unless FSDP2 or tensor parallelism insists."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 10, bias=False)
        self.o = nn.Linear(8, 6, bias=False)
        self.norm = nn.RMSNorm(3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(14, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(1)


def content(name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The one true global tensor of this name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def _parallel(net: Net, mesh: DeviceMesh) -> None:
    """Tensor parallelism over a 1-D mesh."""
    for name, module in list(net.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = PLACEMENTS[name.rpartition(".")[2]]
            sharded = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(sharded))


def _shard(net: Net, mesh: DeviceMesh) -> None:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _plain(net: Net) -> None:
    pass


def _tp(net: Net) -> None:
    _parallel(net, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))


def _fsdp(net: Net) -> None:
    _shard(net, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))


def _fsdp_tp(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _parallel(net, mesh["tp"])
    _shard(net, mesh["dp"])


def _hsdp(net: Net) -> None:
    _shard(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def _hsdp_tp(net: Net) -> None:
    axes = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=axes)
    _parallel(net, mesh["tp"])
    _shard(net, mesh["dp_replicate", "dp_shard"])


def _pp_fsdp(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    if mesh.get_local_rank("pp") == 0:
        del net.layers[1], net.norm
    else:
        del net.layers[0], net.embed_tokens
        net.layers = nn.ModuleDict({"1": net.layers[0]})
    for layer in net.layers.children():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])


LAYOUTS: dict[str, tuple[int, Callable[[Net], None]]] = {
    "plain": (1, _plain),
    "ddp2": (2, _plain),
    "tp2": (2, _tp),
    "fsdp4": (4, _fsdp),
    "fsdp2 tp2": (4, _fsdp_tp),
    "hsdp 2x2": (4, _hsdp),
    "hsdp 1x2 tp2": (4, _hsdp_tp),
    "pp2 fsdp2": (4, _pp_fsdp),
}


def world_size(layout: str) -> int:
    return LAYOUTS[layout][0]


def parameters(layout: str) -> dict[str, nn.Parameter]:
    """This rank's parameters, laid out, with their true contents."""
    net = Net()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(content(name, parameter.shape))
    LAYOUTS[layout][1](net)
    return dict(net.named_parameters())
