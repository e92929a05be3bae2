"""no_shard: every rank holds all parameters; gradients are all-reduced in buckets."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.data_parallel.policy import Policy
from fivefold.mesh.collectives import Bucket, finish_bucket, start_bucket
from fivefold.mesh.slices import local_tensor
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import Work, run_works

BUCKET_BYTES = 8 << 20


class ReplicatedStage:
    """A stage whose gradients are all-reduced, each bucket as soon as it is complete.

    Args:
        stage: stage with tensor and expert parallelism installed.
        group_of: by parameter name, the group of ranks that hold the same part of it and see other
            tokens; None: one rank.
        policy: data-parallel settings.
        reduces_in_hooks: whether to start buckets during the last backward; otherwise all start in
            `reduce`.
    """

    def __init__(
        self,
        stage: Stage,
        group_of: Mapping[str, dist.ProcessGroup | None],
        policy: Policy,
        *,
        reduces_in_hooks: bool,
    ) -> None:
        self._wire = policy.wire_dtype if policy.wire_dtype != policy.master_dtype else None
        self._in_hooks = reduces_in_hooks
        # Gradients arrive from the last layer to the first.
        named = [*stage.named_parameters()][::-1]
        groups = dict.fromkeys(group_of[name] for name, _ in named)
        self._buckets = [
            (group, bucket)
            for group in groups
            if group is not None
            for bucket in _buckets([p for name, p in named if group_of[name] is group])
        ]
        self._bucket_of: dict[Tensor, int] = {
            p: index for index, (_, bucket) in enumerate(self._buckets) for p in bucket
        }
        self._missing: list[int] = []
        self._started: dict[int, Bucket] = {}
        if reduces_in_hooks:
            for parameter, index in self._bucket_of.items():
                parameter.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._arrived(index)
                )

    def before_backward(self, *, whole: bool, last: bool) -> None:
        """Prepare to count complete gradients if the step's last backward computes them."""
        counts = whole and last
        self._missing = [len(bucket) for _, bucket in self._buckets] if counts else []

    def after_backward(self, *, last: bool) -> None:
        """Hooks have seen every gradient."""

    def run_weights(self, works: Sequence[Work], *, last: bool) -> None:
        """Run deferred weight gradients; the step's last call starts each completed bucket."""
        self._missing = []
        if last and self._in_hooks:
            summed = [p for work in works for p in work.parameters if p in self._bucket_of]
            awaited = Counter(self._bucket_of[p] for p in summed)
            self._missing = [awaited[index] for index in range(len(self._buckets))]
            for index in range(len(self._buckets)):
                if not awaited[index]:
                    self._start(index)
        for parameter in run_works(works):
            if parameter in self._bucket_of:
                self._arrived(self._bucket_of[parameter])

    def reduce(self) -> None:
        """Start the all-reduce of every bucket not started yet."""
        for index in range(len(self._buckets)):
            if index not in self._started:
                self._start(index)

    def finish(self) -> None:
        """Wait for all sums; gradients are then those of the global batch."""
        for bucket in self._started.values():
            finish_bucket(bucket)
        self._started = {}

    def waiting_gradients(self) -> Iterator[Tensor]:
        """None: they are on the parameters."""
        return iter(())

    def unshard(self) -> None:
        """Nothing is ever gathered."""

    def reshard(self) -> None:
        """Nothing is ever gathered."""

    def _arrived(self, index: int) -> None:
        if self._missing:
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._start(index)

    def _start(self, index: int) -> None:
        group, bucket = self._buckets[index]
        grads = [local_grad(parameter) for parameter in bucket]
        self._started[index] = start_bucket(grads, group, self._wire)


def local_grad(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient; a missing gradient becomes zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_tensor(parameter.grad)


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        part = local_tensor(parameter)
        bucket.append(parameter)
        size += part.numel() * part.element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
