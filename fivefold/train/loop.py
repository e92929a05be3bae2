"""The training loop of one rank: data in, steps, evaluations, checkpoints, metrics out."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.audit.measure import measured
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.local import LocalCheckpoints
from fivefold.data.loader import Loader
from fivefold.data.packing import Microbatch
from fivefold.data.validation import ValidationSet
from fivefold.errors import CheckpointError, Mistake, TrainingError
from fivefold.files import as_kind
from fivefold.model.eight_bit.rules import SCALES
from fivefold.optim.adamw import OPTIMIZER
from fivefold.train.console import Console
from fivefold.train.engine import Engine
from fivefold.train.evaluation import evaluations
from fivefold.train.folder.new_adapters import measure_rows
from fivefold.train.folder.save_interval import SaveInterval
from fivefold.train.folder.saved_state import SavedState, read_state, same_model, without_adapters
from fivefold.train.health.activity import Activity
from fivefold.train.health.bad_steps import BadSteps
from fivefold.train.health.learning import LearningChecks
from fivefold.train.health.not_finite import fill_finite, locate, locate_in_state
from fivefold.train.health.silent_errors import SilentErrors
from fivefold.train.health.stragglers import Stragglers
from fivefold.train.machine.garbage import collecting
from fivefold.train.meters import step_metrics
from fivefold.train.metrics import EvalMetrics, Sink, StepMetrics
from fivefold.train.profile import profiled
from fivefold.train.ranks.signals import StopRequest
from fivefold.train.ranks.stopped import stopped
from fivefold.train.step_result import StepResult
from fivefold.units import human_seconds


@dataclass
class Trainer:
    """The training loop of one rank.

    One class because steps, evaluations, saves and the reports of failures all read and advance
    the same state: the step number, the last saved step and the place in the data.

    Attributes:
        engine: runs steps and evaluations on this rank.
        loader: training batches of this data-parallel rank.
        validation: what each evaluation reads; empty if the run never evaluates.
        checkpointer: checkpointer of the run's own folder.
        console: console output; None on all ranks but the first.
        sinks: further destinations of the metrics; empty on all ranks but the first.
        audit: folder for the bytes, memory and FLOPs measured in one step; None: no audit.
        profile: folder for the recorded timelines of steps; None: no profile.
        step: number of steps done, with those that were skipped on request.
        check_folder: raises if the run folder is gone; None on all ranks but the first.
        activity: what this rank is doing, for whoever asks.
        stragglers: comparison of replicas; None: none is asked for.
        local: states in the memory of hosts; None: none are kept.
        skipped: steps that were skipped on request, by the number of steps before each.
    """

    engine: Engine
    loader: Loader
    validation: Sequence[ValidationSet]
    checkpointer: Checkpointer
    console: Console | None
    sinks: Sequence[Sink]
    audit: Path | None
    profile: Path | None
    step: int = 0
    check_folder: Callable[[], None] | None = None
    activity: Activity = field(default_factory=Activity)
    stragglers: Stragglers | None = None
    local: LocalCheckpoints | None = None
    skipped: tuple[int, ...] = field(default=(), init=False)
    _saved: int | None = field(default=None, init=False)
    _steps_here: int = field(default=0, init=False)
    _learning: LearningChecks = field(init=False)
    _silent: SilentErrors = field(init=False)
    _bad: BadSteps = field(init=False)

    def __post_init__(self) -> None:
        config = self.engine.layout.config
        self._learning = LearningChecks(config.model.vocab_size, config.optimizer.lr)
        self._silent = SilentErrors(self.engine, self.loader)
        self._bad = BadSteps(config.training, config.optimizer.loss_scales[1])

    def restore(self, source: Checkpointer, step: int | None, *, weights_only: bool) -> None:
        """Load weights, and unless `weights_only` also optimizer, step and position in the data.

        Raises:
            CheckpointError: no such checkpoint, damaged, or of other tensors.
            DataError: the data is not what it was.
        """
        state = read_state(source, step)
        self.engine.model.scaling.reset()  # a checkpoint of another recipe has none
        if weights_only:
            starts = without_adapters(state, self.engine.layout.config.model)
            weights = self.engine.weights_to_load(starts)
            source.load(state.step, weights, skip=(OPTIMIZER,))
            measure_rows(self.engine, source, source.filling(state.step), new=starts)
            self.engine.after_load(0, weights)
            return
        self.loader.load_state_dict(state.loader)
        tensors = self.engine.stored_tensors()
        source.load(state.step, tensors)
        self._continue(state, tensors)
        self._saved = self.step if source.folder == self.checkpointer.folder else None

    def restore_local(self, after: int) -> bool:
        """Load the latest whole state in hosts' memory, if there is one after a step; collective.

        Raises:
            CheckpointError: it is of another model.
            DataError: the data is not what it was.
        """
        if self.local is None:
            return False
        tensors = self.engine.stored_tensors()
        step = self.local.find(tensors)
        self._warn(self.local.damage)
        if step is None or step <= after:
            return False
        what = f"the state of step {step} in memory"
        state = as_kind(self.local.load(tensors), SavedState, what, CheckpointError)
        same_model(state.model, self.engine.layout.config.model, what, by_flags=True)
        self.loader.load_state_dict(state.loader)
        self._continue(state, tensors)
        return True

    def _continue(self, state: SavedState, tensors: Mapping[str, Any]) -> None:
        self.engine.after_load(state.step - len(state.skipped), tensors)
        self.step, self.skipped = state.step, state.skipped
        self._bad.remember(state.losses)
        self.engine.scaler.take(state.loss_scale)

    def load_folder(self, folder: Path, adapter: Path | None, state: SavedState | None) -> None:
        """Load weights, and adapters if named, from another format, each rank its own part; of a
        Megatron-LM job that is resumed also masters and moments.

        Raises:
            CheckpointError: on every rank, if tensors are missing, not finite or cannot be read.
        """
        engine, model = self.engine, self.engine.layout.config.model
        tensors = engine.stored_tensors() if state else engine.weights_to_load(not adapter)
        tensors = {name: t for name, t in tensors.items() if not name.startswith(SCALES)}
        fill = partial(fill_finite, folder, model, adapter=adapter, trained=state is not None)
        self.checkpointer.load_by(f"loading {folder}", tensors, fill)
        if state is not None:
            self.loader.seek(state.loader["consumed_samples"])
            return self._continue(state, tensors)
        measure_rows(engine, self.checkpointer, fill, new=adapter is None)
        engine.after_load(0, tensors)

    def run(self) -> None:
        """Train until all steps are done or a signal asks to stop, then save.

        Raises:
            TrainingError: a loss or gradient is not finite, and nothing was updated; or all
                gradients have become zero; or the run folder is gone.
            CheckpointError: a save failed, perhaps an asynchronous one that began earlier.
        """
        config = self.engine.layout.config
        every, agree = config.checkpoint.save_interval, self.checkpointer.agree
        interval = SaveInterval(every, self.step, self.engine.layout.grid.world_size, agree)
        with (
            StopRequest(
                config.training.exit_duration_in_mins, config.training.exit_interval
            ) as request,
            collecting(config.training) as collect_garbage,
        ):
            stopping = False
            while self.step < config.training.num_steps and not stopping:
                began = time.perf_counter()
                self.activity.begin(self.step + 1)
                if self.step in config.training.iterations_to_skip:
                    self._skip()
                    continue
                batch = self.loader.next_batch()
                with self._measuring(), self._profiling():
                    result = self.engine.step(
                        batch,
                        vote=lambda: request.made or self.checkpointer.failed,
                        limit=self._bad.limit,
                    )
                stopping = result.votes > 0
                if self._bad.is_trial(result):
                    self._pass_over(result)
                    continue
                if bad := self._bad.look(self.step + 1, result):
                    self._leave_out(bad, result, batch)
                    continue
                self.step += 1
                self._steps_here += 1
                self._see_folder()
                collect_garbage(self.step)
                self._record(result, time.perf_counter() - began)
                self._see_that_it_learns(result)
                self._see_replicas(saving=False)
                if self.validation and self.step % config.training.eval_interval == 0:
                    self._evaluate()
                self._save_local()
                if interval.due(self.step) and not self._dying:
                    self._say(interval.plan(self.step))
                    interval.held = self._save()
                stopping |= request.ends_after(self.step)
            if self._saved != self.step:
                self._save()
            self.checkpointer.wait()
            if self.local is not None:
                self.local.remove()
            if stopping and self.step < config.training.num_steps:
                self._say(f"asked to stop ({request.reason}): saved step {self.step}")
            self._see_folder()

    def _see_folder(self) -> None:
        if self.check_folder is not None:
            self.check_folder()

    def _measuring(self) -> AbstractContextManager[None]:
        """Audits the second step since this start, or the first if there is no second."""
        training = self.engine.layout.config.training
        later = range(self.step + 1, training.num_steps)
        is_only = all(step in training.iterations_to_skip for step in later)
        wanted = self._steps_here == 1 or (self._steps_here == 0 and is_only)
        if self.audit is None or not wanted:
            return nullcontext()
        return measured(self.engine, self.step + 1, self.audit)

    def _profiling(self) -> AbstractContextManager[None]:
        """Records the steps from `profile_step_start` up to, not including, `profile_step_end`."""
        logging = self.engine.layout.config.logging
        steps = range(logging.profile_step_start, logging.profile_step_end)
        if self.profile is None or self.step + 1 not in steps:
            return nullcontext()
        return profiled(self.engine, self.profile)

    def _say(self, note: str) -> None:
        if note and self.console is not None:
            self.console.note(note)

    def _warn(self, text: str) -> None:
        if text and self.console is not None:
            self.console.warning(text)

    def _save(self) -> float:
        """Save, and return the seconds for which this delayed the run."""
        self._see_folder()  # a save would create a deleted folder again
        self._see_state()
        began = time.perf_counter()
        self.checkpointer.save(self.step, self.engine.written_tensors(), self._state)
        self._saved = self.step
        seconds = time.perf_counter() - began
        writes_on = self.engine.layout.config.checkpoint.async_save
        how = "being written, held the step up" if writes_on else "saved in"
        self._say(f"checkpoint of step {self.step} {how} {human_seconds(seconds)}")
        return seconds

    def _save_local(self) -> None:
        """Keep the state in the memory of hosts, if that is due."""
        every = self.engine.layout.config.checkpoint.non_persistent_save_interval
        if self.local is not None and self.step % every == 0 and not self._dying:
            self._see_state()
            self.local.save(self.step, self.engine.stored_tensors(), self._state)

    def _see_state(self) -> None:
        """Check that the state about to be saved is sound.

        Raises:
            TrainingError: something is not finite, or replicas differ, on every rank.
        """
        if self._checks and not self.engine.sound():
            what = f"step {self.step} is not saved: it left weights or moments that are not finite"
            raise self._stopped(what, locate_in_state(self.engine))
        self._see_replicas(saving=True)

    @property
    def _state(self) -> dict[str, Any]:
        config = self.engine.layout.config
        state = SavedState(
            step=self.step,
            loader=self.loader.state_dict(),
            model=asdict(config.model),
            seq_length=config.training.seq_length,
            losses=self._bad.losses,
            loss_scale=self.engine.scaler.state,
            skipped=self.skipped,
        )
        return asdict(state)

    def _evaluate(self) -> None:
        for metrics in evaluations(self.engine, self.validation, self.step):
            if self._checks and not math.isfinite(metrics.loss):
                of = f"validation loss of {metrics.name}" if metrics.name else "validation loss"
                what = f"the {of} after step {self.step} is not finite: {metrics.loss:.6g}"
                raise self._stopped(what, locate_in_state(self.engine))
            self._tell(metrics)

    def _record(self, result: StepResult, seconds: float) -> None:
        extra = dict(result.extra)
        if self.stragglers is not None:
            found = self.stragglers.look(self.step, self.activity.compute_seconds)
            extra |= found.numbers
            self._say(found.text)
        result = replace(result, extra=extra)
        self._tell(step_metrics(self.engine, self.loader, self.step, result, seconds))

    def _tell(self, metrics: StepMetrics | EvalMetrics) -> None:
        if self.console is not None:
            for sink in (self.console, *self.sinks):
                sink.record(metrics)

    def _skip(self) -> None:
        """Consume the data of a step that `iterations_to_skip` names, as Megatron-LM does: its
        learning-rate schedule does not advance."""
        self.loader.next_batch()
        self.skipped += (self.step,)
        self.step += 1
        self._say(f"step {self.step} only consumes its data (iterations_to_skip {self.step - 1})")

    def _pass_over(self, result: StepResult) -> None:
        """Go on with the next data after gradients overflowed, as Megatron-LM does."""
        self.engine.optimizer.zero_grad()
        overflow = f"step {self.step + 1}: gradients overflow in fp16, so its data is skipped"
        self._say(f"{overflow}; {self.engine.scaler.changed(result.loss_scale)}")

    def _leave_out(self, bad: str, result: StepResult, batch: Sequence[Microbatch]) -> None:
        """Go on after a step that was not taken, as the settings say.

        Raises:
            TrainingError: they say to stop, or leaving steps out does not help, on every rank.
        """
        action = self.engine.layout.config.training.bad_step_action
        if action == "stop" or self._bad.too_many:
            where, passing = (list[str](), False) if result.finite else locate(self.engine, batch)
            raise self._stopped(bad, where, "the step was not taken; ", passing=passing)
        self.engine.optimizer.zero_grad()
        position = self.loader.consumed_samples
        then = "its data is skipped"
        if action == "rewind":
            self.checkpointer.wait()
            disk = self.checkpointer.agree(self.checkpointer.latest) or 0
            if self.local is not None:
                self.local.wait()
            if not self.restore_local(disk):
                if not disk:
                    raise self._stopped(bad, ["there is no state of the run to go back to"])
                self.restore(self.checkpointer, disk, weights_only=False)
            self.loader.seek(position)
            then = f"back to the state of step {self.step}, with the data that follows"
        self._warn(f"{bad}: {then}")

    def _see_that_it_learns(self, result: StepResult) -> None:
        """Warn if the run no longer learns; stop it before its checkpoints replace good ones.

        Raises:
            TrainingError: all gradients have been zero for several steps.
        """
        problem = self._learning.look(result)
        if problem is None:
            return
        what = f"step {self.step}: {problem.what}"
        if problem.fatal and self._checks:
            raise self._stopped(what, problem.why)
        if not problem.fatal:
            kept = ("no checkpoint is written meanwhile",) if self._dying else ()
            self._warn(str(Mistake(what, problem.why + kept, attempt=self._learning.attempt)))

    def _see_replicas(self, *, saving: bool) -> None:
        """Compare replicas, if that is due.

        Raises:
            TrainingError: they differ, on every rank.
        """
        if lines := self._silent.look(self.step, saving=saving):
            what = f"step {self.step}: replicas differ, so that one of them has made a silent error"
            raise self._stopped(what, lines, passing=True)

    def _stopped(
        self, what: str, why: Sequence[str], then: str = "", *, passing: bool = False
    ) -> TrainingError:
        attempt = None if passing else self._learning.attempt
        return stopped(self.checkpointer, what, why, then, attempt)

    @property
    def _dying(self) -> bool:
        """Whether gradients have vanished, so that a checkpoint now would replace a better one."""
        return self._checks and self._learning.dead > 0

    @property
    def _checks(self) -> bool:
        return self.engine.layout.config.training.check_for_nan_in_loss_and_grad
