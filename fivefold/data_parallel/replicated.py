"""no_shard: every rank holds all parameters; gradients are all-reduced in buckets."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.data_parallel.policy import Policy
from fivefold.data_parallel.stage_gradients import StageGradients
from fivefold.mesh.buckets import buckets_of
from fivefold.mesh.collectives import Pending, start_all_reduce
from fivefold.mesh.slices import is_same_memory, laid_out_like, local_tensor
from fivefold.model.leaves import held_gradient, keep_gradients_in, when_accumulated
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import Sum, Work, run_works


class ReplicatedStage(StageGradients):
    """A stage whose gradients are all-reduced, each bucket as soon as it is complete.

    Args:
        stage: stage with tensor and expert parallelism installed.
        group_of: name of a trained parameter -> the ranks that hold the same part of it
            and see other tokens; None: one rank.
        policy: data-parallel settings.
        reduces_in_hooks: whether to start buckets during the last backward; otherwise all start in
            `reduce`.
        adds: whether products add weight gradients to those of earlier microbatches.

    Attributes:
        buckets: gradients that are sent together.
    """

    def __init__(
        self,
        stage: Stage,
        group_of: Mapping[str, dist.ProcessGroup | None],
        policy: Policy,
        *,
        reduces_in_hooks: bool,
        adds: bool,
    ) -> None:
        wire = policy.wire_dtype if policy.wire_dtype != policy.gradient_dtype else None
        self._in_hooks, self._adds = reduces_in_hooks, adds
        # Gradients arrive from the last layer to the first.
        named = [each for each in stage.named_parameters() if each[0] in group_of][::-1]
        groups = dict.fromkeys(group_of[name] for name, _ in named)
        self.buckets = [
            _GradientBucket(bucket, group, policy.gradient_dtype, wire)
            for group in groups
            if group is not None
            for bucket in _divided([p for n, p in named if group_of[n] is group], policy)
        ]
        self._bucket_of: dict[Tensor, int] = {
            p: index for index, bucket in enumerate(self.buckets) for p in bucket.parameters
        }
        self._own = {parameter for _, parameter in named}
        self._gradient_dtype = policy.gradient_dtype
        self._hooks_count = False
        self._missing: list[int] = []
        self._started: set[int] = set()
        for parameter in self._bucket_of:
            when_accumulated(parameter, partial(self._arrived, parameter))

    def set_gradient_type(self) -> None:
        """Keep gradients in their type, where parameters have another one."""
        for parameter in self._own:
            keep_gradients_in(parameter, self._gradient_dtype)

    def before_backward(self, *, whole: bool, last: bool) -> None:
        """Prepare to count complete gradients if the step's last backward computes them."""
        counts = whole and last and self._in_hooks
        self._hooks_count = counts and bool(self.buckets)
        self._missing = [len(b.parameters) for b in self.buckets] if counts else []

    def run_weights(self, works: list[Work], *, last: bool) -> None:
        """Run deferred weight gradients; the step's last call starts each completed bucket."""
        self._missing, self._hooks_count = [], False
        if last and self._in_hooks:
            summed = [p for work in works for p in work.parameters if p in self._bucket_of]
            awaited = Counter(self._bucket_of[p] for p in summed)
            self._missing = [awaited[index] for index in range(len(self.buckets))]
            for index in range(len(self.buckets)):
                if not awaited[index]:
                    self._start(index)
        for parameter in run_works(works):
            if parameter in self._bucket_of:
                self._arrived(parameter)

    def reduce(self) -> None:
        """Start the all-reduce of every bucket not started yet."""
        for index in range(len(self.buckets)):
            if index not in self._started:
                self._start(index)

    def finish(self) -> None:
        """Wait for all sums; gradients are then those of the global batch."""
        for index in sorted(self._started):
            self.buckets[index].finish()
        self._started = set()

    def waiting_gradients(self) -> Iterator[Tensor]:
        """The messages; parameters' gradients are views of them once they exist."""
        return (b.message for b in self.buckets if b.message is not None)

    def sum_of(self, parameter: Tensor, whole: bool) -> Sum | None:
        """Where a parameter's next gradient belongs; None: it belongs to another stage, or autograd
        adds it.

        The first of a step is made in its message. Where hooks count gradients, autograd gets the
        sum as if it were new, once: of a parameter that a backward uses twice, the other is added
        to it meanwhile.
        """
        if parameter not in self._own:
            return None
        index, held = self._bucket_of.get(parameter), held_gradient(parameter)
        if held is not None:
            if not self._adds:
                return None
            if index is None or not self._hooks_count:
                return Sum(held)
        return self.buckets[index].sum_of(parameter) if index is not None and whole else None

    def before_run(self, *, trains: bool) -> None:
        """Allocate all messages before the first training step, so that it needs as much memory as
        the others."""
        for bucket in self.buckets if trains else ():
            bucket.give_memory()

    def _arrived(self, parameter: Tensor) -> None:
        index = self._bucket_of[parameter]
        self.buckets[index].take(parameter)
        if self._missing:
            self._missing[index] -= 1
            assert self._missing[index] >= 0, "a gradient came twice: its message left too early"
            if self._missing[index] == 0:
                self._start(index)

    def _start(self, index: int) -> None:
        self.buckets[index].start()
        self._started.add(index)


class _GradientBucket:
    """Gradients that are contiguous in one message, as in PyTorch's DDP.

    Products make the gradients of weights in the message; others are copied there once, when they
    are first computed in a step and their memory is still in the cache. Then they are views of the
    message, in which later microbatches and the sum over ranks are added.

    Args:
        parameters: parameters whose gradients are sent together.
        group: group over which gradients are summed.
        dtype: type in which they are kept.
        wire: type in which they are sent and summed; None: their own.

    Attributes:
        message: the gradients; None: it has no memory yet.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        wire: torch.dtype | None,
    ) -> None:
        self.parameters = parameters
        self._group, self._dtype, self._wire = group, dtype, wire
        self.message: Tensor | None = None
        self._grads: dict[Tensor, Tensor] = {}
        self._returning: set[Tensor] = set()
        self._pending: Pending | None = None

    def sum_of(self, parameter: Tensor) -> Sum:
        """The parameter's part of the message, for autograd to return once."""
        if parameter in self._returning:
            return Sum(local_tensor(self._grads[parameter]))
        self._returning.add(parameter)
        empty, parameter.grad = parameter.grad is None, None
        return Sum(local_tensor(self._grads[parameter]), empty, returned=True)

    def take(self, parameter: Tensor) -> None:
        """Make the parameter's gradient a view of the message; a missing one becomes zeros."""
        grad, view = parameter.grad, self._grads[parameter]
        self._returning.discard(parameter)
        if grad is view:
            return
        if grad is None:
            local_tensor(view).zero_()
        elif not is_same_memory(local_tensor(grad), local_tensor(view)):
            local_tensor(view).copy_(local_tensor(grad))
        parameter.grad = view

    def start(self) -> None:
        """Start summing the message."""
        for parameter in self.parameters:
            self.take(parameter)
        assert self.message is not None
        sent = self.message if self._wire is None else self.message.to(self._wire)
        self._pending = start_all_reduce(sent, self._group)

    def finish(self) -> None:
        """Wait for the sum."""
        assert self._pending is not None
        assert self.message is not None
        summed = self._pending.wait()
        self._pending = None
        if summed is not self.message:
            self.message.copy_(summed)

    def give_memory(self) -> None:
        """Allocate the message, once."""
        if self.message is not None:
            return
        parts = [local_tensor(parameter) for parameter in self.parameters]
        sizes = [part.numel() for part in parts]
        self.message = parts[0].new_empty(sum(sizes), dtype=self._dtype)
        self._grads = {
            p: laid_out_like(p, view.view_as(part))
            for p, part, view in zip(self.parameters, parts, self.message.split(sizes), strict=True)
        }


def local_grad(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient; a missing gradient becomes zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return local_tensor(parameter.grad)


def _divided(parameters: list[nn.Parameter], policy: Policy) -> Iterator[list[nn.Parameter]]:
    sizes = (local_tensor(parameter).numel() for parameter in parameters)
    return (parameters[part] for part in buckets_of(sizes, policy.bucket_size))
