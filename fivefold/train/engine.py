"""Forward, backward, reduce and update on one rank, and evaluate: no input, output or logging."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, isfinite

import torch
from torch import Tensor, nn

from fivefold.context.install import divide
from fivefold.counts.parameters import ParameterRecord
from fivefold.data.packing import Microbatch
from fivefold.layout import Layout
from fivefold.mesh.collectives import all_reduce
from fivefold.mesh.groups import Groups
from fivefold.mesh.slices import Piece, as_piece, local_tensor
from fivefold.model.batch import Batch, on_device
from fivefold.model.lora import LORA
from fivefold.model.prediction import valid_by_depth
from fivefold.optim.adamw import OPTIMIZER, STATES, state_name
from fivefold.optim.build import build_optimizer
from fivefold.optim.grad_norm import NormTerm, clip_, global_grad_norm, zero_if_finite
from fivefold.optim.loss_scale import LossScaler
from fivefold.optim.schedule import rates
from fivefold.parallel_model import ParallelModel
from fivefold.parallelize import parallelize
from fivefold.pipeline.ir import Program
from fivefold.pipeline.validate import validate
from fivefold.train.attention_logits import AttentionLogits
from fivefold.train.batches import as_batch
from fivefold.train.layout_groups import groups_of
from fivefold.train.machine.device_limit import device_limit
from fivefold.train.routers import Routers
from fivefold.train.step_graph import CudaRecorder, StepGraphs
from fivefold.train.step_result import DeviceResult, StepResult


class Engine:
    """This rank's model, optimizer and groups.

    One class because a step, an evaluation and a checkpoint each need all three.

    Args:
        layout: the checked configuration.
        rank: rank of this process.
        device: where its model lives.
        initialises: whether weights get initial values; they have none until a checkpoint is
            loaded if not.
    """

    def __init__(
        self, layout: Layout, rank: int, device: torch.device, *, initialises: bool = True
    ) -> None:
        self.layout, self.device = layout, device
        self.groups: Groups = groups_of(layout, rank, device.type)
        self.model: ParallelModel = parallelize(layout, self.groups, device)
        self.parameters: dict[str, nn.Parameter] = self.model.parameters()
        self.scaler = LossScaler(layout.config, device)
        self.model.executor.loss_scale = self.scaler.factor
        self.optimizer = build_optimizer(self.model, device, self.scaler)
        if initialises:
            weights = self.optimizer.weights()
            self.model.initialise(weights)
            self.optimizer.take(weights)
        self.model.limited = device_limit(
            layout.config.memory, device, self._weights(), self.optimizer
        )
        self.routers = Routers(layout, self.model.stages, self.scaler.factor)
        self.logits = AttentionLogits(layout, self.model.stages, device)
        self._programs: dict[tuple[int, bool], Program] = {}
        replays = layout.config.training.cuda_graph_impl is not None and device.type == "cuda"
        self.graphs = StepGraphs(self.model, device, CudaRecorder(device) if replays else None)

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self.optimizer.steps

    def step(
        self,
        microbatches: Sequence[Microbatch],
        *,
        vote: Callable[[], bool] = lambda: False,
        limit: float = inf,
    ) -> StepResult:
        """Forward, backward and reduce; then clip and update, unless a value is not finite.

        Nothing waits for the device before its last kernel is launched.

        Args:
            microbatches: this data-parallel rank's part of the global batch.
            vote: whether this rank asks all to stop after this step; asked at its end.
            limit: loss above which the step is not taken.
        """
        return self.apply(self.gradients(microbatches, vote=vote), limit)

    def gradients(
        self, microbatches: Sequence[Microbatch], *, vote: Callable[[], bool] = lambda: False
    ) -> DeviceResult:
        """Leave the global batch's complete gradient on the parameters."""
        depths = self.layout.config.model.mtp_num_layers
        self.model.scaling.begin()
        self.logits.begin()
        self.routers.begin(sum(len(m.tokens_BS) for m in microbatches) * self.layout.grid.dp)
        batches = self._batches(microbatches, depths)
        tokens = self._count(batches)
        scale = tokens.clamp_min(1).double().reciprocal()
        local = self.graphs.run(self._program(len(microbatches)), batches, scale)
        self.model.scaling.agree(self.groups.world)
        self.optimizer.host.offload_gradients()
        optimizer, training = self.layout.config.optimizer, self.layout.config.training
        norm = global_grad_norm(
            self._counted_grads(),
            self.groups.world,
            self.device,
            vouches=self._weights() if training.must_be_finite else None,
        )
        loss_scale = self.scaler.scale
        norm = norm if loss_scale is None else norm / loss_scale
        step_rates = rates(self.steps, optimizer, training)
        losses = local.loss.reshape(-1)
        names = [f"mtp_{depth}_loss" for depth in range(1, depths + 1)]
        if training.z_loss_coeff:
            losses = torch.cat([losses, local.z_loss.to(losses).reshape(1)])
            names.append("z_loss")
        if self.layout.config.model.trains_indexer:
            losses = torch.cat([losses.double(), self._mean_noted(local.noted)])
            names.append("indexer_loss")
        (loss, *further), votes = self._sums(losses, vote())
        extra = dict(zip(names, further, strict=True))
        logits = self.logits.agreed(self.groups.world)
        if len(logits):
            extra["max_attention_logit"] = logits.max()
        routing = self.routers.sums(local.routing, self.device)
        if len(routing):
            routing = all_reduce(routing, self.groups.world)
        valid = tokens.flatten()[0]
        host_knows = step_rates, extra, routing, loss_scale, self.routers.layers
        return DeviceResult(loss, norm, valid, votes, *host_knows, logits)

    def apply(self, found: DeviceResult, limit: float = inf) -> StepResult:
        """Clip the gradients by their norm and step the optimizer, on the device and then the host.

        If a value is not finite (and that is checked), or the loss is above `limit`, the device
        leaves weights, moments and gradients unchanged; the host learns of it only afterwards.
        """
        config = self.layout.config
        finite, clip = config.training.must_be_finite, config.optimizer.clip_grad
        found_inf = found.found_inf(limit, finite=finite) if finite or limit < inf else None
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        clip_(grads, found.grad_norm, clip, found_inf, loss_scale=found.loss_scale)
        self.optimizer.device.step(found.rates, found_inf)
        result = found.read()
        if isfinite(result.loss):
            self.scaler.update(overflowed=not result.finite)
        if result.is_refused(limit, finite=finite):
            self.optimizer.steps -= 1
        else:
            self.optimizer.host.step(found.rates, result.grad_norm, found.loss_scale)
            self.routers.update(found.routing)
            self.model.scaling.update()
            if config.optimizer.qk_clip:
                self._clip_logits(found.logits, result)
            self.optimizer.zero_grad()
        return result

    def _clip_logits(self, found: Tensor, result: StepResult) -> None:
        if result.extra["max_attention_logit"] > self.layout.config.optimizer.qk_clip_threshold:
            self.model.reshard()  # the update may have begun to gather weights that now change
            self.logits.clip(found, self.optimizer)

    def evaluate(self, batches: Iterable[Sequence[Microbatch]]) -> tuple[float, int]:
        """Mean loss over the valid tokens of several global batches without dropout, and their
        number."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros_like(total, dtype=torch.int64)
        with self._evaluating():
            for microbatches in batches:
                total += self._sums(self._loss(microbatches))[0][0]
                tokens += self._count(self._batches(microbatches))
        return float(total) / max(int(tokens), 1), int(tokens)

    def local_loss(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """This rank's part of the summed loss without dropout, scalar; 0 without the head."""
        with self._evaluating():
            return self._loss(microbatches)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.train(False)
        yield
        self.model.train(True)
        if not self.layout.config.parallel.overlap_param_gather_with_optimizer_step:
            self.model.reshard()  # else the update has gathered what the next step needs

    def _loss(self, microbatches: Sequence[Microbatch]) -> Tensor:
        program = self._program(len(microbatches), forward_only=True)
        one = torch.ones((), dtype=torch.float64, device=self.device)
        batches = on_device(self._batches(microbatches), self.device)
        return self.model.run(program, batches, one).loss

    def sound(self) -> bool:
        """Whether weights and moments are finite on every rank; collective."""
        parts = (self.optimizer.device.state_tensors(), self.optimizer.host.state_tensors())
        here, away = ([piece.local for piece in part.values()] for part in parts)
        zero = zero_if_finite([*self._weights(), *here], self.device)
        zero += zero_if_finite(away, self.device)
        return bool(all_reduce(zero, self.groups.world) == 0)

    def stored_tensors(self) -> dict[str, Tensor | Piece]:
        """Weights, optimizer state and scales by the names of the whole model, for a checkpoint."""
        kept = self._by_stored_name(record for record in self._records if record.loaded)
        return kept | self.model.buffers(copies=True) | self.model.scaling.stored(copies=True)

    def stored_weights(self) -> dict[str, Tensor | Piece]:
        """`stored_tensors` without the optimizer's state."""
        stored = self.stored_tensors()
        return {name: kept for name, kept in stored.items() if not name.startswith(OPTIMIZER)}

    def weights_to_load(self, new_adapters: bool) -> dict[str, Tensor | Piece]:
        """`stored_weights`, without adapters that are new and so get initial values."""
        if new_adapters:
            adapters = {n: w for n, w in self.optimizer.weights().items() if LORA in n}
            self.model.initialise(adapters)
            self.optimizer.device.take(adapters)
        stored = self.stored_weights()
        return {n: kept for n, kept in stored.items() if not (new_adapters and LORA in n)}

    def written_tensors(self) -> dict[str, Tensor | Piece]:
        """`stored_tensors` without second copies, which another rank writes."""
        kept = self._by_stored_name(record for record in self._records if record.written)
        return kept | self.model.buffers(copies=False) | self.model.scaling.stored(copies=False)

    def _by_stored_name(self, records: Iterable[ParameterRecord]) -> dict[str, Tensor | Piece]:
        names = {record.stored: record.name for record in records}
        weights, moments = self.optimizer.weights(), self.optimizer.state_tensors()
        found: dict[str, Tensor | Piece] = {s: weights[name] for s, name in names.items()}
        return found | {
            state_name(state, stored): moments[state_name(state, name)]
            for stored, name in names.items()
            if self.model.records[name].trained
            for state in STATES
            if state_name(state, name) in moments
        }

    def after_load(self, steps: int, loaded: Mapping[str, Tensor | Piece]) -> None:
        """Finish loading: set the step count, copies of tied weights and everything derived from
        weights.

        Args:
            steps: optimizer steps taken.
            loaded: what was loaded into, of `stored_tensors`.
        """
        self.model.reshard()  # the update may have begun to gather weights that now change
        source = {record.stored: record.name for record in self._records if record.loaded}
        weights = self.optimizer.weights()
        weights |= {name: as_piece(loaded[s]) for s, name in source.items() if s in loaded}
        state = self.optimizer.state_tensors() | weights
        for record in self._records:
            if not record.loaded:
                for kind in ("", *(state_name(each, "") for each in STATES if record.trained)):
                    if kind + record.name in state:
                        found = state[kind + source[record.stored]]
                        state[kind + record.name].local.copy_(found.local)
        self.optimizer.steps = steps
        self.optimizer.take(weights)

    def _program(self, num_microbatches: int, *, forward_only: bool = False) -> Program:
        """The lowered program, made once; the first rank checks that it keeps every rule."""
        key = (num_microbatches, forward_only)
        if key not in self._programs:
            program = self.layout.program(num_microbatches, forward_only=forward_only)
            if self.groups.rank == 0:
                validate(program)
            self._programs[key] = program
        return self._programs[key]

    def _batches(self, microbatches: Sequence[Microbatch], depths: int = 0) -> list[Batch]:
        """The batches, still on the host, cut into the program's sequence slices; `depths`: of
        multi-token prediction."""
        count = self.layout.config.parallel.num_sequence_slices
        return [
            piece
            for microbatch in microbatches
            for piece in self.divided(as_batch(microbatch, self.steps, depths)).cut(count)
        ]

    def divided(self, batch: Batch) -> Batch:
        """This rank's part of the sequences."""
        if self.groups.cp is None:
            return batch
        return divide(batch, self.layout.config.model.widest_window, self.groups.cp)

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        """Number of valid tokens, from batches on the host, over all ranks that see different
        tokens.

        A scalar; or [1 + D], one number per depth, where the batches ask for D further tokens.
        """
        owns = [valid_by_depth(batch) for batch in batches]
        # Filled, not copied from the host, which would wait for the device.
        counts = [
            torch.full((), sum(own), dtype=torch.int64, device=self.device)
            for own in zip(*owns, strict=True)
        ]
        count = counts[0] if len(counts) == 1 else torch.stack(counts)
        return all_reduce(count, self.groups.data)

    def _mean_noted(self, noted: Tensor) -> Tensor:
        """This rank's part of the mean loss of the layers' indexers, [1], as in Megatron-LM."""
        return noted.reshape(1) / self.layout.config.model.num_all_layers

    def _sums(self, local_losses: Tensor, vote: bool = False) -> tuple[list[Tensor], Tensor]:
        """The whole losses (tensor-parallel ranks hold equal parts), and the sum of votes."""
        losses = local_losses.to(torch.float64).reshape(-1) * (self.groups.at["tp"] == 0)
        *sums, votes = all_reduce(
            torch.cat([losses, torch.full_like(losses[:1], vote)]), self.groups.world
        )
        return sums, votes

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that get gradients."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def _records(self) -> Iterable[ParameterRecord]:
        return self.model.records.values()

    def weight(self, name: str) -> Tensor:
        """This rank's part of a weight as the device computes with it, wherever it is stored."""
        away = self.model.offloaded
        if away is not None and name in away:
            return away[name]
        return local_tensor(self.parameters[name])

    def _weights(self) -> list[Tensor]:
        """The part of every parameter that lies on the device."""
        away = self.model.offloaded or ()
        return [local_tensor(p) for name, p in self.parameters.items() if name not in away]

    def _counted_grads(self) -> list[tuple[Tensor | NormTerm, bool]]:
        records = self.model.records
        return [(self.optimizer.measurable(n), records[n].counted) for n in self.trained]
