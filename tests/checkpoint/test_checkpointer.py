import errno
import json
import os
import pickle
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fivefold.checkpoint import integrity
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.errors import CheckpointError
from tests.checkpoint.forge import folder_with, names, tensors
from tests.pool import run


def fails(root: Path, step: int | None = None, held: dict[str, Tensor] | None = None) -> str:
    """The message of a load that fails, which has changed nothing."""
    held = held if held is not None else tensors(-1.0)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(root).load(step, held)
    assert all((tensor == -1.0).all() for tensor in held.values())
    return str(caught.value)


def test_what_lies_on_the_disk(tmp_path: Path) -> None:
    folder_with(tmp_path / "run", 100)
    assert names(tmp_path / "run") == ["latest", "step-00000100"]
    step = tmp_path / "run" / "step-00000100"
    assert names(step) == [".metadata", "__0_0.distcp", "manifest.json", "meta.json"]
    manifest = json.loads((step / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [".metadata", "__0_0.distcp", "meta.json"]
    assert (tmp_path / "run" / "latest").read_text() == "100\n"


def test_load_takes_the_latest_or_the_step_asked_for(tmp_path: Path) -> None:
    checkpointer = Checkpointer(folder_with(tmp_path, 1, 2))
    held = tensors()
    assert checkpointer.load(None, held) == {"step": 2}
    assert held["a.weight"].unique().tolist() == [2.0]
    assert checkpointer.load(1, held) == {"step": 1}
    assert held["b.weight"].unique().tolist() == [1.0]
    assert checkpointer.read_meta() == {"step": 2}
    assert (checkpointer.steps(), checkpointer.latest()) == ([1, 2], 2)


def test_types_are_converted(tmp_path: Path) -> None:
    held = {name: tensor.double() for name, tensor in tensors().items()}
    Checkpointer(folder_with(tmp_path, 3)).load(None, held)
    assert held["a.weight"].dtype == torch.float64 and (held["a.weight"] == 3).all()


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpointer = Checkpointer(folder_with(tmp_path, 1))
    checkpointer.save(1, tensors(9.0), {"again": True})
    held = tensors()
    assert checkpointer.load(1, held) == {"again": True}
    assert (held["a.weight"] == 9).all()
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_the_k_written_last_are_kept(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_latest=2)
    for step in (1, 2, 30):
        checkpointer.save(step, tensors(), {})
    assert checkpointer.steps() == [2, 30]
    checkpointer.save(10, tensors(), {})  # went back to 2, and on from there
    assert (checkpointer.steps(), checkpointer.latest()) == ([10, 30], 10)
    checkpointer.save(20, tensors(), {})
    assert (checkpointer.steps(), checkpointer.latest()) == ([10, 20], 20)


def test_multiples_stay_beside_the_k_written_last(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_latest=2, retain=3)
    for step in (1, 3, 4, 5, 6, 7, 2):
        checkpointer.save(step, tensors(), {})
    assert checkpointer.steps() == [2, 3, 6, 7]


def test_a_checkpoint_that_is_read_over_nfs_fails_no_save(tmp_path: Path, monkeypatch) -> None:
    """There a removed file has another name until the last reader of this machine closes it."""
    read, unlink = {"__0_0.distcp"}, os.unlink

    def unlink_over_nfs(path, *, dir_fd=None):
        if str(path) in read:
            os.rename(path, ".nfs0001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        elif read and str(path) == ".nfs0001":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        else:
            unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_over_nfs)
    checkpointer = Checkpointer(tmp_path, keep_latest=1)
    for step in (1, 2, 1, 3):
        checkpointer.save(step, tensors(float(step)), {"step": step})
        held = tensors()
        assert checkpointer.load(None, held) == {"step": step}
        assert (held["a.weight"] == step).all()
        assert checkpointer.steps() == [step]
    read.clear()
    checkpointer.save(4, tensors(), {})
    assert names(tmp_path) == ["latest", "step-00000004"]


@pytest.mark.parametrize("kept", [1, None])
def test_links_and_files_in_the_way_of_checkpoints_fail_no_save(
    tmp_path: Path, kept: int | None
) -> None:
    """Checkpoints that were moved to another disk, which may be gone by now, and what is none."""
    folder, moved = folder_with(tmp_path / "run", 1, 2), tmp_path / "moved"
    (folder / "step-00000001").rename(moved)
    (folder / "step-00000001").symlink_to(moved)
    for step in (2, 3, 4):
        (folder / f"step-0000000{step}.tmp").write_text("")
        (folder / f"step-0000000{step}.old").symlink_to(tmp_path / "gone")
    (folder / "step-00000003").symlink_to(tmp_path / "gone")
    (folder / "step-00000004").write_text("")
    checkpointer = Checkpointer(folder, keep_latest=kept)
    assert checkpointer.steps() == [1, 2]
    for step in (1, 2, 3, 4):
        checkpointer.save(step, tensors(10.0 + step), {"step": step})
        held = tensors()
        assert checkpointer.load(None, held) == {"step": step}
        assert (held["a.weight"] == 10 + step).all()
    assert names(moved) == names(folder / "step-00000004"), "what a link leads to is kept"
    assert checkpointer.steps() == ([4] if kept else [1, 2, 3, 4])
    assert len(names(folder)) == len(checkpointer.steps()) + 1


def test_what_a_killed_run_left_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(folder_with(tmp_path, 1))
    for left_over in ("step-00000002.tmp", "step-00000003.old.tmp"):
        (tmp_path / left_over).mkdir()
        (tmp_path / left_over / "__0_0.distcp").write_bytes(b"half")
    assert checkpointer.latest() == 1
    assert checkpointer.load(None, tensors()) == {"step": 1}
    assert (tmp_path / "step-00000002.tmp").exists(), "a reader removes nothing"
    checkpointer.save(4, tensors(), {})
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000004"]


@pytest.mark.parametrize("content", [b"\xff\n", b"", b"two\n", None])
def test_a_damaged_pointer_says_how_to_mend_it(tmp_path: Path, content: bytes | None) -> None:
    folder = folder_with(tmp_path / "my run", 1, 2)
    pointer = folder / "latest"
    pointer.unlink()
    pointer.mkdir() if content is None else pointer.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged(?s:.*)try: ") as caught:
        Checkpointer(folder).latest()
    subprocess.run(str(caught.value).split("try: ")[-1], shell=True, check=True)
    assert Checkpointer(folder).latest() == 2


def test_latest_survives_a_lost_pointer(tmp_path: Path) -> None:
    checkpointer = Checkpointer(folder_with(tmp_path, 1, 2))
    (tmp_path / "latest").write_text("77")
    assert checkpointer.latest() == 2
    (tmp_path / "latest").unlink()
    assert checkpointer.latest() == 2


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.json"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, "expected CRC-32"),
        (cut, "bytes, found"),
        (Path.unlink, "found no such file"),
    ],
)
def test_damage_is_named_and_the_best_older_checkpoint_recommended(
    tmp_path: Path, name: str, damage: object, said: str
) -> None:
    folder_with(tmp_path, 1, 2, 3)
    for step in (2, 3):
        damage(tmp_path / f"step-{step:08d}" / name)  # type: ignore[operator]
    message = fails(tmp_path)
    assert f"{tmp_path}/step-00000003 is damaged" in message
    assert f"{name}: expected" in message and said in message
    assert f"load it with --load {tmp_path} --ckpt-step 1" in message


def test_what_the_disk_does_not_give_back_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(folder_with(tmp_path, 1, 2))
    whole = integrity.stamp

    def read(path: Path) -> integrity.Stamp:
        if path == tmp_path / "step-00000002" / "__0_0.distcp":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(path)

    monkeypatch.setattr(integrity, "stamp", read)
    message = fails(tmp_path)
    assert "__0_0.distcp: cannot be read: Input/output error" in message
    assert "the checkpoint of step 1 is intact" in message
    assert checkpointer.load(1, tensors()) == {"step": 1}


@pytest.mark.parametrize("text", [b"", b"{}", b'{"files": [1]}', b"\xff\xfe", b'{"files": {"a"'])
def test_a_damaged_manifest(tmp_path: Path, text: bytes) -> None:
    folder_with(tmp_path, 1)
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(text)
    message = fails(tmp_path)
    assert "manifest.json: expected" in message
    assert f"no other checkpoint in {tmp_path} is intact" in message


def test_no_manifest(tmp_path: Path) -> None:
    folder_with(tmp_path, 1)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    assert "manifest.json: missing, so the checkpoint is not complete" in fails(tmp_path)


def test_a_foreign_pickle_is_not_opened(tmp_path: Path) -> None:
    folder_with(tmp_path, 1)
    opened = tmp_path / "opened"

    class Payload:
        def __reduce__(self) -> tuple:
            return (Path.touch, (opened,))

    (tmp_path / "step-00000001" / ".metadata").write_bytes(pickle.dumps(Payload()))
    assert ".metadata: expected" in fails(tmp_path)
    assert not opened.exists()


def test_nothing_to_load(tmp_path: Path) -> None:
    assert f"there is no checkpoint in {tmp_path}/none" in fails(tmp_path / "none")
    (tmp_path / "step-00000005").mkdir()
    assert "step-00000005 is damaged" in fails(tmp_path)


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    message = fails(folder_with(tmp_path, 1, 2), step=7)
    assert "there is no checkpoint of step 7" in message
    assert "--ckpt-step 1 | --ckpt-step 2" in message


def test_the_path_of_one_checkpoint_names_its_folder(tmp_path: Path) -> None:
    message = fails(folder_with(tmp_path, 20) / "step-00000020")
    assert f"--load {tmp_path} --ckpt-step 20" in message


def test_another_model_is_told_in_full(tmp_path: Path) -> None:
    held = {
        "a.weight": torch.full((20, 30), -1.0),
        "b.weigth": torch.full((7,), -1.0),
        "scale": torch.full((), -1.0),
    }
    message = fails(folder_with(tmp_path, 1), held=held)
    assert "a.weight: model 20 x 30 = 600 elements, checkpoint 30 x 20 = 600 elements" in message
    assert "the model has 2 tensors that the checkpoint has not" in message
    assert "b.weigth: 7 = 7 elements, did you mean 'b.weight'?" in message
    assert "the checkpoint has 2 tensors that the model has not" in message
    assert "the model asks for 3 tensors of 608 elements, the checkpoint has 3" in message


def test_long_lists_of_differences_are_cut(tmp_path: Path) -> None:
    held = {**tensors(-1.0), **{f"extra.{i}": torch.full((2,), -1.0) for i in range(20)}}
    message = fails(folder_with(tmp_path, 1), held=held)
    assert "and 12 more" in message and "20 tensors" in message


def test_weights_alone_load_when_the_rest_is_named(tmp_path: Path) -> None:
    folder_with(tmp_path, 1)
    weights = {name: t for name, t in tensors(-1.0).items() if not name.startswith("optim.")}
    assert "optim.exp_avg.b.weight" in fails(tmp_path, held=weights)
    Checkpointer(tmp_path).load(None, weights, skip=("optim.",))
    assert (weights["a.weight"] == 1).all()


def test_an_async_save_keeps_the_values_of_its_moment(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, async_save=True)
    held = tensors(1.0)
    for step in (1, 2, 3):
        checkpointer.save(step, held, {"step": step})
        for tensor in held.values():
            tensor.add_(1.0)
    checkpointer.wait()
    for step in (1, 2, 3):
        assert checkpointer.load(step, held) == {"step": step}
        assert (held["a.weight"] == step).all()


def test_an_async_save_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = Checkpointer._write

    def gated(*args: object) -> None:
        gate.wait(timeout=60)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpointer, "_write", gated)
    checkpointer = Checkpointer(tmp_path, async_save=True)
    checkpointer.save(1, tensors(), {})
    assert checkpointer.latest() is None
    gate.set()
    checkpointer.wait()
    assert checkpointer.latest() == 1


@pytest.mark.parametrize("surface", ["save", "wait", "load"])
def test_an_async_failure_surfaces_once_at_the_next_call(tmp_path: Path, surface: str) -> None:
    root = tmp_path / "run"
    root.write_text("a file where the folder should be")
    checkpointer = Checkpointer(root, async_save=True)
    checkpointer.save(1, tensors(), {})
    with pytest.raises(CheckpointError, match=r"saving step 1 to .* failed\n .*FileExistsError"):
        if surface == "save":
            checkpointer.save(2, tensors(), {})
        elif surface == "load":
            checkpointer.load(None, tensors())
        else:
            checkpointer.wait()
    root.unlink()
    checkpointer.save(3, tensors(), {})
    checkpointer.wait()
    assert checkpointer.steps() == [3]


def test_a_failed_save_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path, 1)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", no_space)
    with pytest.raises(CheckpointError, match="No space left on device"):
        Checkpointer(tmp_path).save(2, tensors(), {})
    monkeypatch.undo()
    assert Checkpointer(tmp_path).latest() == 1
    Checkpointer(tmp_path).load(None, tensors())


def _fail_alike(rank: int, world: int, root: Path) -> list[str]:
    held = {f"{rank}.weight": torch.full((5,), float(rank))}
    checkpointer = Checkpointer(root, async_save=True)
    for step in (1, 2):
        checkpointer.save(step, held, {"from": rank})
    meta = checkpointer.load(1, held)
    if rank == 1:
        flip(root / "step-00000002" / "__1_0.distcp")
    torch.distributed.barrier()
    messages = [str(meta)]
    wrong = {"2.weight": torch.zeros(2)} if rank == 1 else held
    for step, asked in ((2, held), (1, wrong)):
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load(step, asked)
        messages.append(str(caught.value))
    return messages


def test_every_rank_raises_the_same_error(tmp_path: Path) -> None:
    first, second = run(2, _fail_alike, tmp_path)
    assert first == second
    assert first[0] == "{'from': 0}"
    assert "__1_0.distcp: expected CRC-32" in first[1] and "--ckpt-step 1" in first[1]
    assert "2.weight: 2 = 2 elements, did you mean '1.weight'?" in first[2]
