"""Memory in files gives back what was written, or says what it did not."""

import os
from itertools import cycle
from pathlib import Path

import pytest
import torch

from fivefold.errors import FivefoldError
from fivefold.memory.mapped import MappedTensors

SHAPES = {
    "narrow": torch.Size([3]),
    "empty": torch.Size([0, 5]),
    "wide": torch.Size([1027, 33]),
    "last": torch.Size([]),
}


def likes(*dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    """A tensor of each shape, of the given dtypes in turn."""
    each = zip(SHAPES.items(), cycle(dtypes))
    return {n: torch.empty(shape, dtype=dtype, device="meta") for (n, shape), dtype in each}


def whole(kept: MappedTensors) -> list[tuple[str, slice]]:
    """All tensors, each as one part."""
    return [(name, slice(0, tensor.numel())) for name, tensor in kept.tensors.items()]


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,), (torch.float64,), (torch.bfloat16, torch.float32, torch.bfloat16)],
    ids=str,
)
def test_what_is_written_comes_back_and_the_folder_stays_empty(
    tmp_path: Path, dtypes: tuple[torch.dtype, ...]
) -> None:
    folder = tmp_path / "made" / "here"
    wanted = likes(*dtypes)
    kept = MappedTensors(wanted, folder)
    assert [*kept.tensors] == [*SHAPES]
    for name, like in wanted.items():
        tensor = kept.tensors[name]
        assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
        assert tensor.data_ptr() % tensor.itemsize == 0
    assert kept.nbytes == sum(tensor.nbytes for tensor in kept.tensors.values())
    for turn in range(3):
        written = {n: torch.randn(like.shape).to(like.dtype) for n, like in wanted.items()}
        for name, tensor in kept.tensors.items():
            tensor.copy_(written[name])
        kept.seal(whole(kept))
        assert all(torch.equal(kept.tensors[n], tensor) for n, tensor in written.items()), turn
        for part in whole(kept):  # what was mapped is read, and what is written is mapped
            name, room = part[0], torch.empty_like(kept.tensors[part[0]])
            kept.read(part, room, name)
            assert torch.equal(room, written[name])
            kept.write(part, room.neg_())
            assert torch.equal(kept.tensors[name], room)
            kept.read(part, torch.empty_like(room), name)
    assert not os.listdir(folder)


def test_parts_of_a_tensor_are_read_and_written_by_themselves(tmp_path: Path) -> None:
    kept, whole_ = MappedTensors(likes(torch.float32), tmp_path), torch.randn(1027 * 33)
    parts = [("wide", slice(0, 100)), ("wide", slice(100, 101)), ("wide", slice(101, 1027 * 33))]
    for part in reversed(parts):
        kept.write(part, whole_[part[1]])
    assert torch.equal(kept.tensors["wide"].view(-1), whole_)
    found = torch.empty_like(whole_)
    for part in parts:
        kept.read(part, found[part[1]], "wide")
    assert torch.equal(found, whole_)


@pytest.mark.parametrize("name", ["narrow", "wide", "last"])
def test_a_bit_that_changed_is_told_with_its_parameter(tmp_path: Path, name: str) -> None:
    kept = MappedTensors(likes(torch.float32), tmp_path)
    kept.seal(whole(kept))
    bits = kept.tensors[name].view(-1).view(torch.uint8)
    bits[-1] ^= 1
    for part in whole(kept):
        room = torch.empty_like(kept.tensors[part[0]])
        if part[0] != name:
            kept.read(part, room, part[0])
            continue
        with pytest.raises(FivefoldError, match=f"^it came back from a file in {tmp_path}"):
            kept.read(part, room, "it")


def test_nothing_to_keep_and_no_room(tmp_path: Path) -> None:
    nothing = MappedTensors({"empty": torch.empty(0)}, tmp_path)
    nothing.seal(whole(nothing))
    too_much = {"much": torch.empty(1 << 54, device="meta")}
    with pytest.raises(FivefoldError, match=r"64\.0 PiB more of optimizer state"):
        MappedTensors(too_much, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FivefoldError, match="cannot hold"):
        MappedTensors(likes(torch.float32), tmp_path / "file" / "below")
