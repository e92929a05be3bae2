"""Changes to each kind of file of a checkpoint: each is refused, or changes nothing.

There are 200 of each, and 5,000 under `-m exhaustive`.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.folder import CheckpointFolder
from fivefold.checkpoint.index import read_index
from fivefold.checkpoint.integrity import INDEX, MANIFEST, META, read_manifest
from fivefold.checkpoint.reader import fill
from fivefold.config.batch_sizes import BatchSizes
from fivefold.config.sources import read_config
from fivefold.data.loader import Loader
from fivefold.errors import CheckpointError, FivefoldError
from fivefold.mesh.slices import piece_of
from fivefold.train.folder.saved_state import SavedState, read_state, same_model
from tests.checkpoint.forge import forge, tensors
from tests.checkpoint.mutations import mutated_bytes, mutated_json, mutated_pickle

pytestmark = pytest.mark.slow

STEP = 6
MODEL = read_config("debug").model
STATE = SavedState(
    step=STEP,
    loader={"consumed_samples": 48, "fingerprint": {"data": ["a: 10 tokens"], "seq_length": 32}},
    model=asdict(MODEL),
    seq_length=32,
)


@pytest.fixture(params=[200, pytest.param(5_000, marks=pytest.mark.exhaustive)])
def count(request: pytest.FixtureRequest) -> int:
    """How many changes."""
    return int(request.param)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("intact")
    for step in (3, STEP):
        Checkpointer(root).save(step, tensors(float(step)), asdict(STATE))
    return root


@pytest.fixture
def root(intact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(intact, tmp_path / "root")


@pytest.fixture
def checkpoint(root: Path) -> Path:
    return root / f"step-{STEP:08d}"


def loads_alike(root: Path) -> bool:
    """Load the latest step; whether that gave what was saved. Errors are for people."""
    held = tensors(-1.0)
    Checkpointer(root).load(STEP, held)
    return all((tensor == STEP).all() for tensor in held.values())


def resume(root: Path) -> SavedState:
    """What a run does with the state of a checkpoint before it loads tensors."""
    state = read_state(Checkpointer(root), STEP)
    same_model(state.model, MODEL, root)
    dataset: Any = SimpleNamespace(fingerprint=STATE.loader["fingerprint"])
    sizes: Any = {"batch_sizes": BatchSizes(8), "micro_batch_size": 1, "dp_rank": 0, "dp_size": 1}
    Loader(dataset, **sizes).load_state_dict(state.loader)
    return state


def test_an_index_of_a_matching_checksum(checkpoint: Path, count: int) -> None:
    chance = Random(0)
    data, files = (checkpoint / INDEX).read_bytes(), read_manifest(checkpoint)
    true = read_index(checkpoint, files)
    refused = 0
    for number in range(count):
        change = mutated_pickle if number % 2 else mutated_bytes
        (checkpoint / INDEX).write_bytes(change(data, chance))
        try:
            index = read_index(checkpoint, files)
        except CheckpointError:
            refused += 1
            continue
        if index != true:  # the names and shapes of the model, and the tensors themselves, decide
            with pytest.raises(CheckpointError):
                forge(checkpoint, INDEX, (checkpoint / INDEX).read_bytes())
                assert not loads_alike(checkpoint.parent)
    assert refused > count / 3


def test_a_manifest(checkpoint: Path, count: int) -> None:
    chance = Random(1)
    data, true = (checkpoint / MANIFEST).read_bytes(), read_manifest(checkpoint)
    refused = 0
    for number in range(count):
        change = mutated_json if number % 2 else mutated_bytes
        (checkpoint / MANIFEST).write_bytes(change(data, chance))
        try:
            if read_manifest(checkpoint) == true:
                continue
            assert loads_alike(checkpoint.parent)
        except CheckpointError:
            refused += 1
    assert refused > count / 2


def test_a_state(root: Path, checkpoint: Path, count: int) -> None:
    chance = Random(2)
    data = signed = (checkpoint / META).read_bytes()
    refused = 0
    for number in range(count):
        change = mutated_json if number % 4 else mutated_bytes
        changed = change(data, chance)
        (checkpoint / META).write_bytes(changed)
        if number % 10 == 0 and changed != signed:
            with pytest.raises(CheckpointError, match="is damaged"):
                resume(root)
        forge(checkpoint, META, changed)
        signed = changed
        try:
            state = resume(root)
        except FivefoldError:
            refused += 1
            continue
        assert (state.step, state.seq_length) == (STEP, 32)
        assert 0 < state.loader["consumed_samples"] < 2**54
    assert refused > count / 2


def test_the_pointer_to_the_latest(root: Path, count: int) -> None:
    chance = Random(3)
    for _ in range(count):
        text = mutated_bytes(chance.choice((b"6\n", b"3\n", b"", b"1000000\n")), chance)
        (root / "latest").write_bytes(text)
        try:
            step = CheckpointFolder(root).latest()
        except CheckpointError as error:
            assert "latest" in str(error)
            continue
        number = text.strip()
        assert number.isdigit()
        assert step == (3 if int(number) == 3 else STEP)


def test_data_of_a_matching_checksum(checkpoint: Path, count: int) -> None:
    """Other numbers cannot be told from true ones; but nothing else comes of it than numbers."""
    chance = Random(4)
    (path,) = checkpoint.glob("*.distcp")
    data, index = path.read_bytes(), read_index(checkpoint, read_manifest(checkpoint))
    refused = 0
    for _ in range(count):
        path.write_bytes(mutated_bytes(data, chance))
        held = tensors(-1.0)
        pieces = {name: piece_of(tensor) for name, tensor in held.items()}
        try:
            fill(checkpoint, index, pieces)
        except CheckpointError:
            refused += 1
            continue
        assert {n: (t.shape, t.dtype) for n, t in held.items()} == {
            n: (t.shape, torch.float32) for n, t in tensors().items()
        }
    assert refused > count / 4


def test_data_that_its_checksum_gives_away(root: Path, checkpoint: Path, count: int) -> None:
    chance = Random(5)
    (path,) = checkpoint.glob("*.distcp")
    data = path.read_bytes()
    for _ in range(count // 20):
        changed = mutated_bytes(data, chance)
        path.write_bytes(changed)
        if changed != data:
            with pytest.raises(CheckpointError, match="is damaged"):
                loads_alike(root)


@pytest.mark.parametrize("name", [INDEX, META, MANIFEST])
def test_every_beginning_of_a_file(root: Path, checkpoint: Path, name: str, count: int) -> None:
    """With a checksum that agrees, so that the reader itself has to notice."""
    data = (checkpoint / name).read_bytes()
    for length in range(0, len(data) - 1, max(1, 2500 // count)):
        if name == MANIFEST:
            (checkpoint / name).write_bytes(data[:length])
        else:
            forge(checkpoint, name, data[:length])
        with pytest.raises(CheckpointError):
            resume(root) if name == META else read_index(checkpoint, read_manifest(checkpoint))


def test_a_state_of_another_step_is_not_taken(root: Path, checkpoint: Path) -> None:
    held = json.loads((checkpoint / META).read_bytes())
    forge(checkpoint, META, json.dumps({**held, "step": 9999}).encode())
    with pytest.raises(CheckpointError, match=r"contradicts itself\n  it is of step 9999"):
        resume(root)
    shutil.move(checkpoint, root / "step-00000012")
    with pytest.raises(CheckpointError, match="it is of step 9999"):
        read_state(Checkpointer(root), 12)
