import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fivefold.mesh.slices import local_slices, local_tensor, piece_of
from tests.mesh.layouts import LAYOUTS, content, parameters, world_size
from tests.pool import run


def test_a_plain_tensor_is_its_own_shard() -> None:
    tensor = torch.nn.Parameter(torch.zeros(4, 3))
    piece = piece_of(tensor)
    assert piece.slices == (slice(0, 4), slice(0, 3))
    assert piece.shape == (4, 3)
    assert piece.local.data_ptr() == tensor.data_ptr()
    assert not piece.local.requires_grad


def _slices_hold_their_content(
    rank: int, world: int, layout: str
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    held = []
    for name, parameter in parameters(layout).items():
        full = content(name, parameter.shape)
        local, slices = local_tensor(parameter), local_slices(parameter)
        assert torch.equal(local, full[slices]), (name, slices)
        if isinstance(parameter, DTensor) and local.numel():
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            assert shape == tuple(local.shape) and offset == tuple(s.start for s in slices)
        held.append((name, tuple(local.shape), tuple(s.start for s in slices)))
    return held


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_of_every_layout_hold_the_true_content(layout: str) -> None:
    by_rank = run(world_size(layout), _slices_hold_their_content, layout)
    shapes = {shape for held in by_rank for _, shape, _ in held}
    if layout == "fsdp4":
        assert (0,) in shapes, "an empty shard"
        assert {(4, 6), (2, 6)} <= shapes, "uneven shards"


def _two_shards_of_one_dim(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = content("x", (7, 2))
    tensor = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
    assert torch.equal(local_tensor(tensor), full[local_slices(tensor)])
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()])
    with pytest.raises(ValueError, match="not done yet"):
        local_slices(pending)


def test_axes_that_cut_the_same_dim_in_mesh_order() -> None:
    run(4, _two_shards_of_one_dim)
