"""AdamW of which a part is in host memory: masters, moments, and gradients as soon as reduced.

As in ZeRO-Offload (Ren et al., USENIX ATC 2021): the device keeps weights in the type in which it
computes, a gradient leaves it as soon as it is reduced, and the host updates and sends back weights
bucket by bucket, while later gradients still arrive and earlier weights are on their way. Or the
device updates: a bucket is copied there while another is updated and the one before goes back. As
in ZeRO-Infinity (Rajbhandari et al., SC 2021), masters and moments may lie on a disk instead, from
which one bucket is read while another is updated and those before are written back.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from fivefold.config.training import OptimizerConfig
from fivefold.memory.host import CopyEvent, HostLink
from fivefold.memory.parameters import OffloadedParameters
from fivefold.mesh.slices import Piece, local_tensor, piece_of
from fivefold.optim.adamw import STATES, AdamW, moments_like, state_name, state_piece
from fivefold.optim.grad_norm import NormTerm, clip_
from fivefold.optim.offload_buckets import GRADIENT, Bucket, BucketPart, Lines
from fivefold.optim.offload_buffers import UpdateBuffers
from fivefold.optim.offload_state import BucketState, OffloadedState
from fivefold.optim.rounding import MASTER, NamedElements
from fivefold.optim.schedule import StepRates

_Arrival = Callable[[Bucket], CopyEvent]
_Update = Callable[[Bucket, Lines], None]


class HostAdamW:
    """AdamW whose state is in host memory, for parameters whose weights are on the device.

    Args:
        parameters: parameters by global name, in the order of the forward; plain tensors or
            DTensors on their device.
        counted: name -> whether this rank counts the gradient in the global norm.
        config: as for `AdamW`.
        dtype: dtype of masters, and of moments that are not rounded.
        gradient_dtype: dtype of gradients.
        link: copies to and from the host, and counts their bytes.
        places: as for `AdamW`.
        folder: where masters and moments lie in a file; None: in memory.
        weights: weights that are not on the device; None: all are.
        on_device: whether buckets come to the device for their updates.

    Attributes:
        state: masters, moments and gradients where they are kept.

    Raises:
        FivefoldError: the folder cannot hold them, or (in `step`) gave back other bytes.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: Mapping[str, bool],
        config: OptimizerConfig,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        link: HostLink,
        places: Mapping[str, NamedElements] | None = None,
        folder: Path | None = None,
        weights: OffloadedParameters | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        self._parameters, self._counted, self._clip = parameters, counted, config.clip_grad
        self.link, self.weights = link, weights
        # Gradients arrive from the last layer to the first.
        shapes = {n: tuple(local_tensor(parameters[n]).shape) for n in reversed([*parameters])}
        likes = partial(_like, config, dtype, gradient_dtype)
        self.state = OffloadedState(shapes, likes, link, folder, copied=on_device)
        self._buffers = UpdateBuffers(self.state, link) if on_device and shapes else None
        here = self.state if self._buffers is None else self._buffers
        self._updates = [
            _BucketUpdate(bucket, here.lines_of(bucket), config, places or {})
            for bucket in self.state.buckets
        ]
        self._weights = _Weights(parameters, self.state, link, weights)
        self._offloaded: dict[str, tuple[NormTerm, CopyEvent]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def tensors(self) -> Iterator[Tensor]:
        """Everything in host memory: buffers for gradients, masters and moments (or buffers for
        those in a file), and weights that are off the device."""
        yield from self.state.tensors()
        if self.weights is not None:
            yield from self.weights.tensors()

    def update_buffers(self) -> Iterator[Tensor]:
        """The buffers on the device in which buckets are updated."""
        if self._buffers is not None:
            yield from self._buffers.tensors()

    def disk_bytes(self) -> int:
        """Bytes of masters, moments and weights in files."""
        return self.state.disk_bytes() + (0 if self.weights is None else self.weights.disk_bytes())

    def offload_when_reduced(self, name: str, *, whole: bool) -> None:
        """Make FSDP2 hand over the gradient of a parameter whenever it has reduced it.

        One that is not `whole` yet stays for further sums, in memory of its own: it is a part of
        the message of a block, which would stay with it.
        """
        hook = (lambda _: self.offload(name)) if whole else _own_memory
        self._parameters[name].register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def offload(self, name: str) -> None:
        """Start copying a reduced gradient to the host, added to earlier ones of this step.

        The host's sum is fetched for that: a device adds faster than hosts.
        """
        parameter, host = self._parameters[name], self.state.gradient(name)
        assert parameter.grad is not None
        grad, link = local_tensor(parameter.grad), self.link
        parameter.grad = None
        if name in self._offloaded:
            earlier = torch.empty_like(grad)
            link.wait(link.to_device(host, earlier, after=self._offloaded[name][1]))
            grad.add_(earlier)
            del self._offloaded[name]  # what leaves last is last
        norm_term = NormTerm.of(grad, counts=self._counted[name])
        self._offloaded[name] = norm_term, link.to_host(grad, host)[1]

    def offload_gradients(self) -> None:
        """Copy the gradients that no hook has copied; afterwards no gradient is on the device."""
        for name in reversed([n for n, p in self._parameters.items() if p.grad is not None]):
            self.offload(name)

    def norm_term(self, name: str) -> NormTerm:
        """A gradient's contribution to the norm."""
        return self._offloaded[name][0]

    def gradient(self, name: str) -> Tensor:
        """This rank's part of a gradient that has been copied to the host."""
        self.link.synchronize(self._offloaded[name][1])
        return self.state.gradient(name)

    def step(self, rates: StepRates, norm: float, loss_scale: float | None) -> None:
        """Clip and update, bucket by bucket, and copy weights back; no gradient is left afterwards.

        Args:
            rates: learning rates and weight decay.
            norm: global norm of all gradients, of a loss without scale.
            loss_scale: as for `clip_`.
        """
        order = {name: place for place, name in enumerate(self._offloaded)}

        def arrived(bucket: Bucket) -> CopyEvent:
            """When the last of its gradients has arrived."""
            last = max((part.name for part in bucket.parts), key=order.__getitem__)
            return self._offloaded[last][1]

        def update(bucket: Bucket, lines: Lines) -> None:
            gradients = [part.of(GRADIENT, lines) for part in bucket.parts]
            # Filled on their device: a copy from the host would wait for it.
            whole = gradients[0].new_full((), norm, dtype=torch.float64)
            clip_(gradients, whole, self._clip, loss_scale=loss_scale)
            self._updates[bucket.number].step(rates)

        if self._buffers is None:
            self._step_on_host(arrived, update)
        else:
            self._step_on_device(self._buffers, arrived, update)
        self._offloaded = {}

    def _step_on_host(self, arrived: _Arrival, update: _Update) -> None:
        on_the_way: list[CopyEvent] = []
        for each in self.state.bucket_states():
            self.link.synchronize(arrived(each.bucket))
            update(each.bucket, each.lines)
            on_the_way += self._weights.send(each.bucket, each.lines)
            each.end(None)
        for event in on_the_way:
            self.link.wait(event)

    def _step_on_device(self, buffers: UpdateBuffers, arrived: _Arrival, update: _Update) -> None:
        before: tuple[BucketState, CopyEvent] | None = None
        on_the_way: list[tuple[BucketPart, Tensor, CopyEvent]] = []
        for each in chain(self.state.bucket_states(), [None]):
            coming = None if each is None else (each, buffers.fetch(each, arrived(each.bucket)))
            if before is not None:
                ready, event = before
                self.link.wait(event)
                lines = buffers.lines_of(ready.bucket)
                update(ready.bucket, lines)
                on_the_way += self._weights.replace(ready.bucket, lines)
                ready.end(buffers.write_back(ready))
            before = coming
        buffers.synchronize()
        for part, weight, event in on_the_way:
            self.link.synchronize(event)
            assert self.weights is not None
            self.weights.write(part.name, part.elements, weight)

    def publish(self, names: Container[str]) -> None:
        """Copy masters to the device, after those of some names were initialised or changed."""
        for bucket in self.state.having(names):
            for event in self._weights.send(bucket, self.state.held(bucket)):
                self.link.wait(event)
            self.state.seal(bucket)

    def forget(self) -> None:
        """Drop the copied gradients."""
        self._offloaded = {}

    def set_steps(self, steps: int) -> None:
        """Set the number of steps taken, after a load."""
        for update in self._updates:
            update.adamw.steps = steps

    def masters(self) -> dict[str, Piece]:
        """The weights that are updated, laid out like their parameters."""
        return {
            name: piece_of(parameter).like(self.state.kept(name)[MASTER])
            for name, parameter in self._parameters.items()
        }

    def state_tensors(self) -> dict[str, Piece]:
        """The moments and their scales, named as by `AdamW.state_tensors`."""
        return {
            state_name(state, name): state_piece(state, piece_of(parameter), kept)
            for name, parameter in self._parameters.items()
            for state, kept in self.state.kept(name).items()
            if state in STATES
        }


def _own_memory(parameter: Tensor) -> None:
    """Copy a gradient that is a part of a larger tensor into memory of its own."""
    grad = parameter.grad
    assert grad is not None
    local = local_tensor(grad)
    if local.untyped_storage().nbytes() > local.nbytes:
        with torch.no_grad():
            grad._local_tensor = local.clone()  # type: ignore[attr-defined]


def _like(
    config: OptimizerConfig, dtype: torch.dtype, gradient_dtype: torch.dtype, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """Tensors on the meta device with the shapes of a parameter's state."""
    master, gradient = (torch.empty(shape, dtype=d, device="meta") for d in (dtype, gradient_dtype))
    return {GRADIENT: gradient, MASTER: master} | moments_like(master, config)


class _Weights:
    """The weights used for computing, which receive the values of updated masters.

    Args:
        parameters: parameters by global name.
        state: has host buffers for all gradients, through which weights pass.
        link: copies to and from the host.
        offloaded: weights that are not on the device; None: all are.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        state: OffloadedState,
        link: HostLink,
        offloaded: OffloadedParameters | None,
    ) -> None:
        self._parameters, self._state, self._link = parameters, state, link
        self._offloaded_weights = offloaded

    @torch.no_grad()
    def send(self, bucket: Bucket, lines: Lines) -> Iterator[CopyEvent]:
        """Start copying masters to the device, in its type; gradients are overwritten.

        Weights that are not on the device are replaced where they are.
        """
        for part in bucket.parts:
            master = part.of(MASTER, lines).view(-1)
            if self._offloaded_weights is not None and part.name in self._offloaded_weights:
                self._offloaded_weights.write(part.name, part.elements, master)
                continue
            weight = self._weight(part)
            waiting = self._waiting(part, weight.dtype)
            yield self._link.to_device(waiting.copy_(master), weight)

    @torch.no_grad()
    def replace(
        self, bucket: Bucket, lines: Lines
    ) -> Iterator[tuple[BucketPart, Tensor, CopyEvent]]:
        """Set weights from masters on the device; overwrites gradients.

        Those that are not there start for the host: they arrive in the buffers of their gradients.
        """
        for part in bucket.parts:
            master, dtype = part.of(MASTER, lines).view(-1), self._parameters[part.name].dtype
            if self._offloaded_weights is None or part.name not in self._offloaded_weights:
                self._weight(part).copy_(master)
                continue
            narrow = _beginning(part.of(GRADIENT, lines), dtype).copy_(master)
            yield part, *self._link.to_host(narrow, self._waiting(part, dtype))

    def _waiting(self, part: BucketPart, dtype: torch.dtype) -> Tensor:
        """Host memory for weights that wait to be copied: that of their gradients."""
        return _beginning(self._state.gradient(part.name).view(-1)[part.elements], dtype)

    def _weight(self, part: BucketPart) -> Tensor:
        """The weight used for computing, flat."""
        return local_tensor(self._parameters[part.name]).view(-1)[part.elements]


def _beginning(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """The same number of elements of a narrower dtype, at the start of contiguous memory."""
    return buffer.view(-1).view(dtype)[: buffer.numel()]


class _BucketUpdate:
    """AdamW for a bucket, on the memory in which it is updated.

    Attributes:
        adamw: the optimizer.
    """

    def __init__(
        self,
        bucket: Bucket,
        lines: Lines,
        config: OptimizerConfig,
        places: Mapping[str, NamedElements],
    ) -> None:
        masters = {p.name: nn.Parameter(p.of(MASTER, lines)) for p in bucket.parts}
        moments = {
            state_name(state, p.name): p.of(state, lines)
            for p in bucket.parts
            for state in p.places
            if state in STATES
        }
        within = {p.name: p.place(places[p.name]) for p in bucket.parts if p.name in places}
        self.adamw = AdamW(masters, config, places=within, storage=moments)
        self._pairs = [(masters[p.name], p.of(GRADIENT, lines)) for p in bucket.parts]

    def step(self, rates: StepRates) -> None:
        """Update the masters by the gradients."""
        for master, gradient in self._pairs:
            master.grad = gradient
        self.adamw.step(rates)
        self.adamw.zero_grad()
