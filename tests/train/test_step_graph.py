"""Steps that are replayed are those that are launched: the same losses, norms and weights.

Without a GPU a recorded step is one that can be run again: what it made is worthless until it is
replayed, and a replay runs it once more on the memory that it read.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.audit.measure import measured
from fivefold.audit.record import read_records
from fivefold.check import check
from fivefold.cli.main import program
from fivefold.config.config import Config
from fivefold.mesh.slices import as_piece, local_tensor
from fivefold.model.batch import Batch, FixedBatches, form, on_device
from fivefold.pipeline.costs.measured import FILE, read_measured
from fivefold.train.batches import as_batch
from fivefold.train.engine import Engine
from fivefold.train.profile import profiled
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.train.step_graph import WARMUP, Replay, StepGraphs, _Recorded
from fivefold.verify.batches import EVALUATION, global_batch, microbatches, rows_of
from tests.engines import own_batch
from tests.pool import run
from tests.programs import Program
from tests.verify.cases import GPT, LATENT, LLAMA, SPARSE, chosen, config, named, shared_groups

T = TypeVar("T")


class Again:
    """Records work by keeping it, and replays it by running it."""

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def record(self, work: Callable[[], Sequence[Tensor]], streams: Sequence[Any]) -> Replay:
        first = work()
        with torch.no_grad():
            for tensor in first:
                local_tensor(tensor).fill_(float("nan"))

        @torch.no_grad()
        def again() -> None:
            with torch.enable_grad():
                second = work()
            for old, new in zip(first, second, strict=True):
                if new is not old:
                    local_tensor(old).copy_(local_tensor(new))
                    local_tensor(new).fill_(float("nan"))

        return again


WHOLE: dict[str, Any] = {
    "reset_attention_mask": False,
    "lr": 1e-2,
    "adam_eps": 1e-2,
    "lr_decay_style": "constant",
}
TWO = replace(LLAMA, num_layers=2)
PLAIN = replace(GPT, hidden_dropout=0.0, attention_dropout=0.0)
BF16 = {"precision": "bf16"}
FP8 = {**BF16, "fp8_format": "hybrid"}
RECOMPUTED = {"recompute_granularity": "full"}
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "one rank": (TWO, 1, {}),
    "tied, biases": (PLAIN, 1, {}),
    "bf16": (TWO, 1, BF16),
    "latents, MTP": (replace(LATENT, mtp_num_layers=2), 1, {}),
    "recomputed, no logits": (
        LLAMA,
        1,
        RECOMPUTED | {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
    ),
    "adapters": (replace(LLAMA, lora_rank=4), 1, BF16),
    "scales of earlier steps": (LLAMA, 1, {**FP8, "fp8_recipe": "delayed"}),
    "several ranks": (LLAMA, 2, {}),
    "bf16 of several ranks": (PLAIN, 2, BF16),
    "gradients sharded": (LLAMA, 2, named(strategy="optim_grads")),
    "parameters sharded": (
        TWO,
        2,
        {**BF16, **named(strategy="optim_grads_params")},
    ),
    "gathered in 8 bits": (
        LLAMA,
        2,
        {
            **FP8,
            "fp8_recipe": "tensorwise",
            "fp8_param_gather": True,
            **named(strategy="optim_grads_params"),
        },
    ),
    "gathered within nodes": (
        LLAMA,
        4,
        {"zero_hpz_partition_size": 2, **named(strategy="optim_grads_params")},
    ),
    "tensor parallel": (LLAMA, 2, named(tp=2)),
    "chosen tokens": (SPARSE, 2, named(tp=2)),
    "chosen tokens of ranks": (
        replace(SPARSE, dsa_indexer_use_sparse_loss=True),
        2,
        {**named(cp=2), "cp_comm_type": ("all_gather",)},
    ),
    "ring": (LLAMA, 2, named(cp=2)),
    "gathered keys": (LLAMA, 2, named(cp=2) | {"cp_comm_type": ("all_gather",)}),
    "tp, cp, sharded": (LLAMA, 8, named(tp=2, cp=2, strategy="optim")),
}
SHORT = ("one rank", "parameters sharded")


def _settings(model: Any, world: int, values: dict[str, Any]) -> Config:
    return config(model, world, **WHOLE | values)


def _steps(engine: Engine) -> list[Any]:
    """Steps of two lengths, with evaluations, a refused step and a checkpoint between them."""
    found: list[Any] = []

    def step(index: int, *, short: bool = False, limit: float = float("inf")) -> None:
        batch = own_batch(engine, index)
        result = engine.step(batch[: len(batch) // 2] if short else batch, limit=limit)
        if limit < result.loss:
            engine.optimizer.zero_grad()  # as the training loop does
        found.extend([result.loss, result.grad_norm, result.tokens, *result.extra.values()])

    for index in range(WARMUP + 2):
        step(index)
        if index % 2:
            batches = [own_batch(engine, EVALUATION), own_batch(engine, EVALUATION + 1)]
            found.extend(engine.evaluate(batches))
    step(10, limit=0.0)
    kept = {name: as_piece(held).local.clone() for name, held in engine.stored_tensors().items()}
    step(11)
    step(12, short=True)
    _load(engine, kept)
    for index in range(20, 22 + WARMUP):
        step(index, short=index % 3 > 0)
    with engine.graphs.eagerly():
        step(30)
    step(31)
    step(32, short=True)
    found += [_bits(local_tensor(p)) for p in engine.parameters.values()]
    return found + [_bits(piece.local) for piece in engine.optimizer.state_tensors().values()]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _load(engine: Engine, kept: dict[str, Tensor]) -> None:
    """Go back to a state, as from a checkpoint."""
    there = engine.stored_tensors()
    with torch.no_grad():
        for name, held in there.items():
            as_piece(held).local.copy_(kept[name])
    engine.after_load(WARMUP + 2, there)


def _both(rank: int, world: int, settings: Config) -> tuple[list[Any], list[Any], int]:
    """What an engine that launches every step finds, and one that replays; how many it replayed."""
    with shared_groups():
        layout, cpu = check(settings, world), torch.device("cpu")
        launched = _steps(Engine(layout, rank, cpu))
        engine = Engine(layout, rank, cpu)
        assert launched and engine.graphs.replayed == 0
        engine.graphs = StepGraphs(engine.model, cpu, Again())
        return launched, _steps(engine), engine.graphs.replayed


@pytest.mark.parametrize("case", chosen(CASES, *SHORT))
def test_replayed_steps_are_launched_ones_to_the_bit(case: str) -> None:
    model, world, values = CASES[case]
    for launched, replayed, count in run(world, _both, _settings(model, world, values)):
        assert count >= 8  # of 11, some of them of a second form
        assert len(launched) == len(replayed)
        for old, new in zip(launched, replayed, strict=True):
            same = torch.equal(old, new) if isinstance(old, Tensor) else old == new
            assert same, (old, new)


def _measured(rank: int, world: int, settings: Config, folder: Path) -> None:
    """Measured and profiled steps of an engine that replays are those of one that does not."""
    records, cpu, rows = [], torch.device("cpu"), rows_of(settings, 0, 1)
    batches = [microbatches(settings, global_batch(settings, index), rows) for index in range(5)]
    for recorder in (None, Again()):
        engine = Engine(check(settings, world), rank, cpu)
        engine.graphs = StepGraphs(engine.model, cpu, recorder)
        for batch in batches[:3]:
            engine.step(batch)
        before, place = engine.graphs.replayed, folder / str(recorder is None)
        assert (before == 1) == (recorder is not None)
        place.mkdir()
        with measured(engine, 4, place), profiled(engine, place):
            engine.step(batches[3])
        records.append(read_records(place))
        assert len(read_measured(place / FILE)) == 2 * len(batches[3])
        assert engine.graphs.replayed == before
        engine.step(batches[4])
        assert (engine.graphs.replayed > before) == (recorder is not None)
    assert records[0] == records[1] and records[0][0].multiplications


def test_steps_that_are_measured_are_launched(tmp_path: Path) -> None:
    settings = _settings(TWO, 1, {"profile": True, "train_iters": 20})
    run(1, _measured, settings, tmp_path)


class _Quiet(Again):
    """Sees that nobody is told of the acts of a step that is recorded."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def record(self, work: Callable[[], Sequence[Tensor]], streams: Sequence[Any]) -> Replay:
        before = len(self._told)
        replay = super().record(work, streams)
        assert before and len(self._told) == before
        return replay


def _quiet(rank: int, world: int, settings: Config) -> int:
    engine, told = Engine(check(settings, world), rank, torch.device("cpu")), list[Any]()
    engine.graphs = StepGraphs(engine.model, engine.device, _Quiet(told))
    engine.model.executor.enter = told.append
    for index in range(WARMUP + 1):
        batch = global_batch(settings, index)
        engine.step(microbatches(settings, batch, rows_of(settings, 0, 1)))
    assert engine.model.executor.enter == told.append
    return engine.graphs.replayed


def test_no_act_is_marked_while_a_step_is_recorded() -> None:
    """A mark is an event, and one of a capture cannot be asked for."""
    assert run(1, _quiet, _settings(TWO, 1, {})) == [1]


def test_batches_of_the_same_form_take_the_same_memory() -> None:
    settings = _settings(LLAMA, 1, {})
    first, second = (_batches(settings, index) for index in range(2))
    fixed = FixedBatches(first, torch.device("cpu"))
    places = [batch.tokens.data_ptr() for batch in fixed.batches]
    fixed.fill(second)
    assert [batch.tokens.data_ptr() for batch in fixed.batches] == places
    for here, there in zip(fixed.batches, on_device(second, torch.device("cpu")), strict=True):
        assert here.packing is None and there.packing is None
        for name in ("tokens", "labels", "positions", "token_ids", "loss_weights"):
            assert torch.equal(getattr(here, name), getattr(there, name))
    assert form(first) == form(second) == form(fixed.batches)
    assert form(first) != form(first[:-1])
    shorter = _batches(_settings(LLAMA, 1, {"seq_length": 8}), 0)
    assert form(first) != form(shorter)
    packed = _batches(settings.with_values(reset_attention_mask=True), 0)
    assert form(first) != form(packed)


def _batches(settings: Config, index: int) -> list[Batch]:
    parts = microbatches(settings, global_batch(settings, index), rows_of(settings, 0, 1))
    return [as_batch(part, index) for part in parts]


OF_FOUR_STEPS = {
    "train": (
        *("--mock-data", "--train-iters", "4", "--lr-warmup-iters", "0", "--save", "run"),
        "--manual-gc",
    ),
    "verify": ("--steps", "4"),
}


def _end_of_graphs(words: list[str], kept: Path) -> None:
    """A command with steps that are replayed; of each process, how many graphs it made, and how
    many there are when its groups are destroyed, where NCCL waits for their end."""
    made: list[Any] = []

    class Made(Again):
        def record(self, work: Callable[[], Sequence[Tensor]], streams: Sequence[Any]) -> Replay:
            made.append(1)
            return super().record(work, streams)

    def ended() -> None:
        there = sum(isinstance(each, _Recorded) for each in gc.get_objects())
        (kept / f"{os.getpid()}").write_text(f"{len(made)} {there}")
        destroy()

    begin, destroy = StepGraphs.__init__, dist.destroy_process_group
    again = patch.object(
        StepGraphs, "__init__", lambda self, model, device, _: begin(self, model, device, Made())
    )
    with again, patch.object(dist, "destroy_process_group", ended):
        sys.argv = ["fivefold", *words]
        program()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "ranks"),
    [pytest.param("train", 1, marks=pytest.mark.exhaustive), ("train", 2), ("verify", 2)],
)
def test_graphs_end_before_the_groups_that_they_use(
    command: str, ranks: int, tmp_path: Path
) -> None:
    words = [command, "debug", "--nproc", f"{ranks}", "--tp", "1", "--no-sequence-parallel"]
    words += ["--num-layers", "2", "--global-batch-size", "2", "--seq-length", "16"]
    words += ["--no-reset-attention-mask", *OF_FOUR_STEPS[command]]
    (tmp_path / "kept").mkdir()
    done = Program(_end_of_graphs, [*words], tmp_path / "kept", cwd=tmp_path)
    _, said = done.communicate(200)
    assert done.returncode == 0, said
    assert [file.read_text() for file in (tmp_path / "kept").iterdir()] == ["1 0"] * ranks


@pytest.fixture(scope="module")
def gpu() -> Iterator[torch.device]:
    yield init_process_group(RankEnv(), "cuda")
    dist.destroy_process_group()


ON_A_GPU: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (model, values) for name, (model, world, values) in CASES.items() if world == 1},
    "compiled": (LLAMA, {"compile": True}),
    "bf16, compiled": (LLAMA, {**BF16, "compile": True}),
    "windows": (replace(LLAMA, window_size=5), BF16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU)
def test_graphs_compute_what_kernels_do(case: str, gpu: torch.device) -> None:
    """Equal but for the order in which atomics add up; in bf16 that decides some roundings."""
    model, values = ON_A_GPU[case]
    layout = check(_settings(model, 1, values), 1)
    launched = _steps(Engine(layout, 0, gpu))
    graphs = layout.config.with_values(cuda_graph_impl="local")
    engine = Engine(check(graphs, 1), 0, gpu)
    replayed = _steps(engine)
    assert engine.graphs.replayed >= 8
    exact = layout.config.training.precision == "fp64"
    limits = {"rtol": 1e-12, "atol": 1e-12} if exact else {"rtol": 2e-2, "atol": 2e-3}
    for old, new in zip(launched, replayed, strict=True):
        torch.testing.assert_close(torch.as_tensor(old), torch.as_tensor(new), **limits)


@pytest.mark.gpu
def test_a_graph_leaves_the_device_its_memory(gpu: torch.device) -> None:
    """Replays take none beyond what was recorded; without graphs that is given back."""
    settings = _settings(LLAMA, 1, {**BF16, "cuda_graph_impl": "local"})
    engine, rows = Engine(check(settings, 1), 0, gpu), rows_of(settings, 0, 1)
    batches = [microbatches(settings, global_batch(settings, index), rows) for index in range(4)]
    for batch in batches[: WARMUP + 1]:
        engine.step(batch)
    torch.cuda.synchronize()
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for batch in batches * 2:
        engine.step(batch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held
    assert torch.cuda.memory_reserved() <= reserved
    with engine.graphs.eagerly():
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() < held
