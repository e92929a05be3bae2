"""The training loop of one rank: data in, steps, evaluations, checkpoints, metrics out."""

import json
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.audit.measure import measured
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.model import ModelConfig
from fivefold.data.loader import Loader
from fivefold.errors import CheckpointError, Mistake, TrainingError
from fivefold.hardware import peak_flops
from fivefold.model.shape import training_flops
from fivefold.train.console import Console
from fivefold.train.engine import Engine, StepResult
from fivefold.train.metrics import EvalMetrics, Sink, StepMetrics
from fivefold.train.profile import profiled
from fivefold.train.signals import StopRequest
from fivefold.units import human_seconds

# What may differ between a checkpoint's model and ours without making it another model.
_FREE_MODEL_FIELDS = ("hidden_dropout", "attention_dropout", "init_method_std")


@dataclass
class Trainer:
    """Everything one rank needs to train.

    Attributes:
        engine: steps and evaluates.
        loader: training batches of this data-parallel rank.
        validation: validation batches, None if never evaluated.
        checkpointer: of the run's own folder.
        console: None on all ranks but the first, as are the sinks empty.
        sinks: where metrics go besides.
        audit: folder for what one step sends, holds and computes; None: it is not measured.
        profile: folder for the timeline of a step; None: it is not recorded.
        step: optimizer steps done.
    """

    engine: Engine
    loader: Loader
    validation: Loader | None
    checkpointer: Checkpointer
    console: Console | None
    sinks: Sequence[Sink]
    audit: Path | None = None
    profile: Path | None = None
    step: int = 0
    _saved: int | None = field(default=None, init=False)
    _steps_here: int = field(default=0, init=False)

    def restore(self, source: Checkpointer, step: int | None, *, weights_only: bool) -> None:
        """Load weights, and unless `weights_only` optimizer, step and place in the data.

        Raises:
            CheckpointError: no such checkpoint, damaged, or of another model.
            DataError: the data is not what it was.
        """
        meta = source.read_meta(step)
        _same_model(meta["model"], self.engine.layout.config.model, source.folder)
        tensors: dict[str, Any] = self.engine.stored_tensors()
        if weights_only:
            weights = {n: t for n, t in tensors.items() if not n.startswith("optim.")}
            source.load(step, weights, skip=("optim.",))
            self.engine.after_load(0)
            return
        self.loader.load_state_dict(meta["loader"])
        source.load(step, tensors)
        self.engine.after_load(meta["step"])
        self.step = meta["step"]
        self._saved = self.step if source.folder == self.checkpointer.folder else None

    def run(self) -> None:
        """Train until `train_iters` steps are done or a signal asks to stop, then save.

        Raises:
            TrainingError: loss or gradient norm is not finite; nothing was updated.
        """
        config = self.engine.layout.config
        interval = config.checkpoint.save_interval
        with StopRequest() as request:
            stopping = False
            while self.step < config.training.train_iters and not stopping:
                began = time.perf_counter()
                batch, vote = self.loader.next_batch(), request.signum is not None
                with self._measuring(), self._profiling():
                    result = self.engine.step(batch, vote=vote)
                if not result.finite and config.training.check_for_nan_in_loss_and_grad:
                    raise self._not_finite(result)
                self.step += 1
                self._steps_here += 1
                stopping = result.votes > 0
                self._record(result, time.perf_counter() - began)
                every = config.training.eval_interval
                if every and self.step % every == 0:
                    self._evaluate()
                if interval and self.step % interval == 0:
                    self._save()
            if self._saved != self.step:
                self._save()
            if stopping and self.console is not None:
                self.console.note(f"asked to stop ({request.reason}): saved step {self.step}")
        self.checkpointer.wait()

    def _measuring(self) -> AbstractContextManager[None]:
        """Measures the second step of this start, or its first if that is the only one."""
        is_only = self.step == self.engine.layout.config.training.train_iters - 1
        wanted = self._steps_here == 1 or (self._steps_here == 0 and is_only)
        if self.audit is None or not wanted:
            return nullcontext()
        return measured(self.engine, self.step + 1, self.audit)

    def _profiling(self) -> AbstractContextManager[None]:
        """Records the steps from `profile_step_start` to before `profile_step_end`."""
        logging = self.engine.layout.config.logging
        steps = range(logging.profile_step_start, logging.profile_step_end)
        if self.profile is None or self.step + 1 not in steps:
            return nullcontext()
        return profiled(self.engine, self.profile)

    def _save(self) -> None:
        began = time.perf_counter()
        meta = {
            "step": self.step,
            "loader": self.loader.state_dict(),
            "model": asdict(self.engine.layout.config.model),
            "seq_length": self.engine.layout.config.training.seq_length,
        }
        tensors: dict[str, Any] = self.engine.written_tensors()
        self.checkpointer.save(self.step, tensors, meta)
        self._saved = self.step
        if self.console is not None:
            took = human_seconds(time.perf_counter() - began)
            how = "being written, held the step up" if self._is_async else "saved in"
            self.console.note(f"checkpoint of step {self.step} {how} {took}")

    @property
    def _is_async(self) -> bool:
        return self.engine.layout.config.checkpoint.async_save

    def _evaluate(self) -> None:
        if self.validation is None:
            return
        began = time.perf_counter()
        self.validation.seek(0)
        count = self.engine.layout.config.training.eval_iters
        loss, tokens = self.engine.evaluate([self.validation.next_batch() for _ in range(count)])
        self._tell(EvalMetrics(self.step, loss, tokens, time.perf_counter() - began))

    def _record(self, result: StepResult, seconds: float) -> None:
        training = self.engine.layout.config.training
        tokens = training.global_batch_size * training.seq_length
        per_token = training_flops(self.engine.layout.config.model, training.seq_length).total
        self._tell(
            StepMetrics(
                step=self.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens=tokens,
                tokens_total=self.loader.consumed_samples * training.seq_length,
                seconds=seconds,
                world_size=self.engine.layout.grid.world_size,
                flops=float(per_token) * tokens,
                peak_flops=device_peak(self.engine.device, training.precision),
                memory_bytes=peak_memory(self.engine.device),
                data_wait_seconds=self.loader.data_wait_s,
            )
        )

    def _tell(self, metrics: StepMetrics | EvalMetrics) -> None:
        if self.console is not None:
            for sink in (self.console, *self.sinks):
                sink.record(metrics)

    def _not_finite(self, result: StepResult) -> TrainingError:
        """Say where infinities or NaNs are, the same on every rank."""
        rank, world = self.engine.groups.rank, self.engine.layout.grid.world_size
        found: list[Any] = [None] * world
        here = (self.engine.layout.grid.name(rank), self.engine.not_finite())
        if world > 1:
            dist.all_gather_object(found, here)
        else:
            found = [here]
        where = [
            f"rank {r} {name}: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
            for r, (name, names) in enumerate(found)
            if names
        ]
        kept = f"step {self._saved}" if self._saved is not None else "none of this start"
        return TrainingError(
            str(
                Mistake(
                    f"step {self.step + 1} is not finite: loss {result.loss}, "
                    f"gradient norm {result.grad_norm}",
                    (
                        *(f"gradient of {line}" for line in where[:4]),
                        f"the step was not taken; latest checkpoint: {kept}",
                    ),
                    attempt="a lower --lr or a longer --lr-warmup-iters",
                )
            )
        )


def peak_memory(device: torch.device) -> int:
    """Bytes: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def device_peak(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of a known GPU; None on a CPU, whose peak nobody states."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)


def _same_model(saved: dict[str, Any], model: ModelConfig, folder: Path) -> None:
    now = json.loads(json.dumps(asdict(model)))  # as it was saved: tuples are lists
    changed = [
        f"{name}: was {saved.get(name)}, is {now.get(name)}"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name) and name not in _FREE_MODEL_FIELDS
    ]
    if changed:
        raise CheckpointError(str(Mistake(f"{folder} is of another model", tuple(changed))))
