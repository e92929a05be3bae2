"""Checkpoints whose maker means harm: their checksums agree with what they hold."""

import functools
import importlib
import io
import json
import operator
import os
import pickle
import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.index import _Chunk, _tile
from fivefold.checkpoint.pickled import read_pickle
from fivefold.errors import CheckpointError
from tests.checkpoint.forge import Call, folder_with, forge, tensors

INDEX, DATA = ".metadata", "__0_0.distcp"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("intact"), 1, 2)


@pytest.fixture
def root(intact: Path, tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2, to be changed."""
    return shutil.copytree(intact, tmp_path / "root")


def touching(marker: Path) -> dict[str, object]:
    """Objects that make the file `marker` when they are unpickled, each in another way."""
    shell, python = f"touch {marker}", f"open({str(marker)!r}, 'w').close()"
    touch = Call(os.system, shell)
    code = Call(compile, python, "payload", "exec")
    return {
        "os.system": touch,
        "subprocess": Call(subprocess.check_call, ["touch", str(marker)]),
        "exec": Call(exec, python),
        "eval": Call(eval, python),
        "chain of getattr": Call(
            Call(getattr, Call(importlib.import_module, "os"), "system"), shell
        ),
        "method": Call(marker.touch),
        "dotted name": Call(Path.touch, marker),
        "partial": Call(Call(functools.partial, os.system, shell)),
        "methodcaller": Call(Call(operator.methodcaller, "touch"), marker),
        "function": Call(
            Call(imported("types", "FunctionType"), code, {"__builtins__": {"open": open}})
        ),
        "map": Call(list, Call(map, os.system, [shell])),
        "torch.save": Call(torch.save, 1, str(marker)),
        "torch.load": Call(
            functools.partial(torch.load, weights_only=False), Call(io.BytesIO, nested(touch))
        ),
        "numpy": Call(np.save, str(marker), 1),
        "memmap": Call(np.memmap, str(marker), "uint8", "w+", 0, (4,)),
        "pickle in a pickle": Call(pickle.loads, pickle.dumps(Call(exec, python))),
        "state": Call(io.StringIO, state=(touch, 0, None)),
        "list": [1, (2, {"three": touch})],
        "ordered dict": OrderedDict(x=touch),
        "planner data": metadata(planner_data=touch),
        "storage": metadata(storage_data={MetadataIndex("a", [0]): touch}),
        "tensor": metadata({"a": touch}),
        "size": metadata({"a": TensorStorageMetadata(TensorProperties(), touch, [])}),  # type: ignore
        "version": metadata(version=touch),
    }


def imported(module: str, name: str) -> Call:
    return Call(getattr, Call(importlib.import_module, module), name)


def nested(payload: object) -> bytes:
    """The payload as torch.save writes it."""
    file = io.BytesIO()
    torch.save(payload, file)
    return file.getvalue()


def metadata(state_dict_metadata: dict | None = None, **fields: Any) -> Metadata:
    return Metadata(state_dict_metadata or {}, **fields)


def ran(marker: Path) -> bool:
    """Whether the marker was made, by numpy with its own ending; it is removed."""
    made = [path for path in (marker, marker.with_suffix(".npy")) if path.exists()]
    for path in made:
        path.unlink()
    return bool(made)


def refused(root: Path) -> str:
    """The message of a load of step 1 that fails, and has changed nothing."""
    held = tensors(-1.0)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(root).load(1, held)
    assert all((tensor == -1.0).all() for tensor in held.values())
    return str(caught.value)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_no_pickle_runs_anything(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    for kind in touching(marker):
        payload = pickle.dumps(touching(marker)[kind], protocol)
        with suppress(Exception):
            pickle.loads(payload)
        assert ran(marker), f"{kind} does no harm, so this test says nothing"
        with pytest.raises(CheckpointError):
            read_pickle(payload)
        assert not ran(marker), kind


def test_no_checkpoint_runs_anything(root: Path, tmp_path: Path) -> None:
    checkpoint, marker = root / "step-00000001", tmp_path / "marker"
    intact = (checkpoint / INDEX).read_bytes()
    for kind, payload in touching(marker).items():
        forge(checkpoint, INDEX, pickle.dumps(payload))
        assert ".metadata" in refused(root), kind
        assert not ran(marker), kind
    forge(checkpoint, INDEX, intact)
    for kind, payload in touching(marker).items():
        forge(checkpoint, DATA, nested(payload).ljust(9_000, b"\0"))
        assert "__0_0.distcp" in refused(root), kind
        assert not ran(marker), kind


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # GLOBAL
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"Pname\n.",  # PERSID
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of 2^63 bytes
        b"\x80\x04]r\xff\xff\xff\xff.",  # LONG_BINPUT: memory for 2^32 objects
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a bytearray of 2^63 bytes
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",  # text of 2^63 bytes
        b"\x80\x04\x8b\xff\xff\xff\x7f.",  # LONG4 of 2^31 bytes
        b"\x80\x04K\x01K\x02\x86\x94" + b"h\x00h\x00\x86\x94" * 9 + b".",  # what PUT would need
        b"\x80\x04)" + b"\x85" * 100_000 + b".",  # 100,000 tuples in each other
        b"\x80\x04" + b"(" * 100_000 + b".",
        b"\x80\x04K\x01\x85\x94" + b"".join(b"h%c2\x86\x94" % n for n in range(30)) + b".",
        b"\x80\x04}\x8c\x01a}sb.",  # BUILD of nothing
        b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)\x81.",  # an object of a function
        b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)R.",  # no argument
        b"\x80\x04\x8c\x05torch\x8c\x08Size.mro\x93)R.",
        b"\x80\x04\x8c\x07pathlib\x8c\x10PosixPath.unlink\x93\x8c\x01x\x85R.",
        b"\x80\x04}}}}}ssss.",  # dicts as keys
        b"",
        b".",
        b"hello",
    ],
)
def test_opcodes_that_no_checkpoint_has(root: Path, opcodes: bytes) -> None:
    forge(root / "step-00000001", INDEX, opcodes)
    assert ".metadata" in refused(root)


def test_a_key_that_takes_for_ever_to_hash_is_not_hashed() -> None:
    """Each of 60 tuples holds the one before twice: 2^60 elements to walk through."""
    doubled = b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(60))
    for end in (b"}h\x3cK\x01s.", b"h\x3ch\x3cR.", b"h\x3c)\x81."):
        with pytest.raises(CheckpointError):
            read_pickle(b"\x80\x04K\x01\x85\x94" + doubled + end)


class ByName(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do, and Debian 12's is 3.11.2."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_what_an_older_python_wrote_is_read(root: Path) -> None:
    written, again = (root / "step-00000001" / INDEX).read_bytes(), io.BytesIO()
    ByName(again, 4).dump(pickle.loads(written))
    assert b"getattr" in again.getvalue()
    assert read_pickle(again.getvalue()) == read_pickle(written)
    forge(root / "step-00000001", INDEX, again.getvalue())
    Checkpointer(root).load(1, tensors())
    for owner in (Path, Call):
        with pytest.raises(CheckpointError):
            read_pickle(pickle.dumps(Call(getattr, owner, "name")))


def change(edit: Callable[[Metadata], None]) -> Callable[[bytes], bytes]:
    def apply(pickled: bytes) -> bytes:
        held = pickle.loads(pickled)
        edit(held)
        return pickle.dumps(held)

    return apply


A = "a.weight"


def place(held: Metadata, name: str = A) -> _StorageInfo:
    return next(info for index, info in held.storage_data.items() if index.fqn == name)


def set_place(**fields: Any) -> Callable[[Metadata], None]:
    def edit(held: Metadata) -> None:
        for field, value in fields.items():
            setattr(place(held), field, value)

    return edit


def set_tensor(**fields: Any) -> Callable[[Metadata], None]:
    def edit(held: Metadata) -> None:
        for field, value in fields.items():
            setattr(held.state_dict_metadata[A], field, value)

    return edit


def chunks(*boxes: tuple[tuple[int, int], tuple[int, int]]) -> Callable[[Metadata], None]:
    def edit(held: Metadata) -> None:
        old = place(held)
        held.state_dict_metadata[A].chunks = [  # type: ignore[union-attr]
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]
        held.storage_data = {i: p for i, p in held.storage_data.items() if i.fqn != A}
        for number, (offsets, _) in enumerate(boxes):
            info = _StorageInfo(old.relative_path, old.offset + number, 1)
            held.storage_data[MetadataIndex(A, offsets)] = info

    return edit


def drop_place(held: Metadata) -> None:
    del held.storage_data[MetadataIndex(A, [0, 0])]


def more_places(held: Metadata) -> None:
    held.storage_data[MetadataIndex(A, [1, 1])] = _StorageInfo(DATA, 0, 0)


def no_tensor(held: Metadata) -> None:
    held.state_dict_metadata[A] = BytesStorageMetadata()


def same_bytes_twice(held: Metadata) -> None:
    other = place(held, "b.weight")
    set_place(offset=other.offset, length=other.length)(held)


WRONG = {
    "path above": set_place(relative_path="../step-00000002/" + DATA),
    "absolute path": set_place(relative_path="/etc/passwd"),
    "device": set_place(relative_path="/dev/zero"),
    "no name": set_place(relative_path=""),
    "folder": set_place(relative_path="."),
    "the index": set_place(relative_path=INDEX, offset=0, length=9),
    "unlisted": set_place(relative_path="__7_0.distcp"),
    "not text": set_place(relative_path=7),
    "before the file": set_place(offset=-1),
    "after the file": set_place(offset=10**6),
    "beyond its end": set_place(length=10**6),
    "far beyond": set_place(length=10**30),
    "no length": set_place(length=None),
    "part of a number": set_place(offset=0.5),
    "compressed": set_place(transform_descriptors=["zstd"]),
    "same bytes twice": same_bytes_twice,
    "no place": drop_place,
    "a place too many": more_places,
    "no tensor": no_tensor,
    "other shape": set_tensor(size=torch.Size([20, 30])),
    "huge shape": set_tensor(size=torch.Size([2**62, 2**62])),
    "negative shape": set_tensor(size=torch.Size([-30, -20])),
    "flat shape": set_tensor(size=torch.Size([600])),
    "shape of text": set_tensor(size="30 x 20"),
    "other type": set_tensor(properties=TensorProperties(dtype=torch.int32)),
    "no type": set_tensor(properties=None),
    "no chunks": set_tensor(chunks=[]),
    "a gap": chunks(((0, 0), (15, 20))),
    "overlap and gap": chunks(((0, 0), (15, 20)), ((10, 0), (15, 20))),
    "twice": chunks(((0, 0), (15, 20)), ((0, 0), (15, 20))),
    "over the edge": chunks(((0, 0), (15, 20)), ((20, 0), (15, 20))),
    "huge chunk": chunks(((0, 0), (2**62, 2**62))),
    "empty chunk": chunks(((0, 0), (30, 20)), ((0, 5), (30, 0))),
    "no tensors at all": lambda held: held.state_dict_metadata.clear(),
    "no places at all": lambda held: setattr(held, "storage_data", None),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_index_that_contradicts_itself_or_the_files(root: Path, kind: str) -> None:
    checkpoint = root / "step-00000001"
    index = (checkpoint / INDEX).read_bytes()
    forge(checkpoint, INDEX, change(WRONG[kind])(index))
    message = refused(root)
    assert ".metadata" in message or DATA in message or "another model" in message
    assert len(message) < 2_000


def test_what_has_no_effect_may_be_anything(root: Path) -> None:
    checkpoint = root / "step-00000001"

    def edit(held: Metadata) -> None:
        held.planner_data, held.version = {"x": [1, None, True]}, None
        held.storage_meta = None

    forge(checkpoint, INDEX, change(edit)((checkpoint / INDEX).read_bytes()))
    held = tensors()
    Checkpointer(root).load(1, held)
    assert (held[A] == 1).all()


def test_tiles_in_any_cut_are_read() -> None:
    """What a checkpoint of many ranks looks like: rows, columns, and both."""
    rows = [_Chunk((r, 0), (3, 8)) for r in range(0, 12, 3)]
    columns = [_Chunk((0, c), (12, 2)) for c in range(0, 8, 2)]
    both = [_Chunk((r, c), (4, 4)) for c in (0, 4) for r in (0, 4, 8)]
    uneven = [_Chunk((0, 0), (5, 8)), _Chunk((5, 0), (7, 1)), _Chunk((5, 1), (7, 7))]
    for cut in (rows, columns, both, uneven):
        assert _tile((12, 8), cut)
        assert not _tile((12, 8), cut[1:])
        assert not _tile((12, 8), [*cut[1:], cut[1]] if cut is not uneven else [cut[0], cut[0]])
    assert _tile((), [_Chunk((), ())]) and not _tile((), [])


MANIFESTS = {
    "name above": lambda files: files.update({"../latest": {"size": 2, "crc32": "00000000"}}),
    "absolute name": lambda files: files.update({"/etc/passwd": {"size": 2, "crc32": "00000000"}}),
    "no name": lambda files: files.update({"": {"size": 2, "crc32": "00000000"}}),
    "a zero byte": lambda files: files.update({"__0\0": {"size": 2, "crc32": "00000000"}}),
    "index left out": lambda files: files.pop(INDEX),
    "meta left out": lambda files: files.pop("meta.json"),
    "data left out": lambda files: files.pop(DATA),
    "negative size": lambda files: files[DATA].update(size=-1),
    "huge size": lambda files: files[DATA].update(size=10**40),
    "size of text": lambda files: files[DATA].update(size="9"),
    "checksum of another length": lambda files: files[DATA].update(crc32="0"),
    "checksum with a sign": lambda files: files[DATA].update(crc32="-0000001"),
    "checksum as a number": lambda files: files[DATA].update(crc32=1),
    "something more": lambda files: files[DATA].update(mode="w"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_of_anything_but_a_checkpoints_files(root: Path, kind: str) -> None:
    path = root / "step-00000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    MANIFESTS[kind](manifest["files"])
    path.write_text(json.dumps(manifest))
    message = refused(root)
    said = ("manifest.json: expected", "bytes, found", "names '__0_0.distcp', which is no file")
    assert any(words in message for words in said)


@pytest.mark.parametrize("name", [INDEX, DATA, "meta.json", "manifest.json"])
def test_what_is_no_file(root: Path, name: str) -> None:
    path = root / "step-00000001" / name
    path.unlink()
    path.mkdir()
    assert name in refused(root)
    path.rmdir()
    if name != "manifest.json":
        os.mkfifo(path)
        assert name in refused(root)


SAVED = {
    "text": "hello",
    "a list": [torch.zeros(30, 20)],
    "other type": torch.zeros(30, 20, dtype=torch.float64),
    "larger": torch.zeros(31, 20),
    "smaller": torch.zeros(30, 19),
    "sparse": torch.zeros(30, 20).to_sparse(),
    "meta": torch.zeros(30, 20, device="meta"),
    "parameter": torch.nn.Parameter(torch.zeros(30, 20)),
}


@pytest.mark.parametrize("kind", SAVED)
def test_bytes_that_are_another_tensor(root: Path, kind: str) -> None:
    checkpoint = root / "step-00000001"
    data = nested(SAVED[kind])
    padded = data + (checkpoint / DATA).read_bytes()
    forge(checkpoint, DATA, padded)

    def edit(held: Metadata) -> None:
        for info in held.storage_data.values():
            info.offset += len(data)
        place(held).offset, place(held).length = 0, len(data)

    forge(checkpoint, INDEX, change(edit)((checkpoint / INDEX).read_bytes()))
    held = tensors(-1.0)
    with pytest.raises(CheckpointError, match=r"of __0_0\.distcp are not the slice"):
        Checkpointer(root).load(1, held)
