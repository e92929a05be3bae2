"""AdamW of which a part is in host memory: masters, moments, and gradients as soon as reduced.

As in ZeRO-Offload (Ren et al., USENIX ATC 2021): the device keeps weights in the type in which it
computes, a gradient leaves it as soon as it is reduced, and the host updates and sends back weights
bucket by bucket, while later gradients still arrive and earlier weights are on their way. As in
ZeRO-Infinity (Rajbhandari et al., SC 2021), masters and moments may lie on a disk instead, from
which one bucket is read while another is updated and those before are written back.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from fivefold.config.training import OptimizerConfig
from fivefold.memory.host import HostLink, Mark
from fivefold.memory.mapped import MappedTensors
from fivefold.memory.parameters import OffloadedParameters
from fivefold.mesh.buckets import buckets_of
from fivefold.mesh.slices import Piece, local_tensor, piece_of
from fivefold.optim.adamw import AdamW, Block, moment_rooms, state_piece
from fivefold.optim.grad_norm import Departed, clip_
from fivefold.optim.rounding import NamedElements

BUCKET_BYTES = 32 << 20


class HostAdamW:
    """AdamW on the host for parameters whose weights are on the device.

    Args:
        parameters: parameters by global name, in the order of the forward; plain tensors or
            DTensors on their device.
        counted: for each name, whether this rank counts the gradient in the global norm.
        config: as for `AdamW`.
        dtype: dtype of masters, and of moments that are not rounded.
        gradient_dtype: dtype of gradients.
        link: copies to and from the host, and counts their bytes.
        places: as for `AdamW`.
        folder: where masters and moments lie in files; None: in memory.
        weights: weights that are not on the device; None: all are.

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
    ) -> None:
        self._parameters, self._counted, self.link = parameters, counted, link
        self.weights = weights
        # Gradients arrive from the last layer to the first.
        self._buckets = [
            _Bucket(bucket, config, (dtype, gradient_dtype), link, places, folder)
            for bucket in _in_buckets({n: parameters[n] for n in reversed([*parameters])}, dtype)
        ]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.gradients}
        self._left: dict[str, tuple[Departed, Mark]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def tensors(self) -> Iterator[Tensor]:
        """All that is in host memory: room for gradients, masters and moments if no folder, and
        weights that are not on the device."""
        for bucket in self._buckets:
            if bucket.mapped is None:
                yield from (local_tensor(master) for master in bucket.masters.values())
                yield from (piece.local for piece in bucket.adamw.state_tensors().values())
            yield from bucket.gradients.values()
        if self.weights is not None:
            yield from self.weights.tensors()

    def disk_bytes(self) -> int:
        """Bytes of masters, moments and weights in files."""
        state = sum(bucket.mapped.nbytes for bucket in self._buckets if bucket.mapped)
        return state + (0 if self.weights is None else self.weights.disk_bytes())

    def leave_when_reduced(self, name: str) -> None:
        """Let FSDP2 hand over the gradient of a parameter each time that it has reduced it."""
        parameter = self._parameters[name]
        parameter.register_post_accumulate_grad_hook(lambda _: self.leave(name))

    @torch.no_grad()
    def leave(self, name: str) -> None:
        """Start copying a reduced gradient to the host, added to what has left in this step.

        The host's sum is fetched for that: a device adds faster than hosts.
        """
        parameter, host = self._parameters[name], self._bucket_of[name].gradients[name]
        assert parameter.grad is not None
        grad, link = local_tensor(parameter.grad), self.link
        parameter.grad = None
        if name in self._left:
            earlier = torch.empty_like(grad)
            link.wait(link.back(host, earlier, after=self._left[name][1]))
            grad.add_(earlier)
            del self._left[name]  # what leaves last is last
        departed = Departed.of(grad, counts=self._counted[name])
        self._left[name] = departed, link.out(grad, host)[1]

    def leave_all(self) -> None:
        """Let go of what has not left by a hook; afterwards no gradient is on the device."""
        for name in self._bucket_of:
            if self._parameters[name].grad is not None:
                self.leave(name)

    def departed(self, name: str) -> Departed:
        """What the norm needs of a gradient."""
        return self._left[name][0]

    def gradient(self, name: str) -> Tensor:
        """This rank's part of a gradient that has left, on the host."""
        self.link.arrive(self._left[name][1])
        return self._bucket_of[name].gradients[name]

    def step(self, lr: float, norm: float, max_norm: float) -> None:
        """Clip, update and send back, bucket by bucket; no gradient is left afterwards.

        Args:
            lr: learning rate.
            norm: global norm of all gradients.
            max_norm: norm above which gradients are scaled; 0: never.
        """
        on_the_way: list[Mark] = []
        place = {name: place for place, name in enumerate(self._left)}
        for bucket, following in zip_longest(self._buckets, self._buckets[1:]):
            if following is not None:
                following.fetch()
            self.gradient(max(bucket.gradients, key=place.__getitem__))  # the last to arrive
            if max_norm > 0:
                exact = torch.tensor(norm, dtype=torch.float64)
                clip_([*bucket.gradients.values()], exact, max_norm)
            bucket.update(lr)
            on_the_way += bucket.send(self._parameters, self.link, self.weights)
            bucket.seal()
        for mark in on_the_way:
            self.link.wait(mark)
        self._left = {}

    def publish(self) -> None:
        """Copy the masters to the device, after they were initialised or loaded."""
        for bucket in self._buckets:
            for mark in bucket.send(self._parameters, self.link, self.weights):
                self.link.wait(mark)
            bucket.seal()

    def forget(self) -> None:
        """Drop the gradients that have left."""
        self._left = {}

    def set_steps(self, steps: int) -> None:
        """Set the number of steps taken, after a load."""
        for bucket in self._buckets:
            bucket.adamw.steps = steps

    def masters(self) -> dict[str, Piece]:
        """The weights that are updated, laid out like their parameters."""
        return self._laid_out(
            {name: local_tensor(m) for b in self._buckets for name, m in b.masters.items()}
        )

    def state_tensors(self) -> dict[str, Piece]:
        """The moments, named as by `AdamW.state_tensors`."""
        found = {}
        for bucket in self._buckets:
            for name, piece in bucket.adamw.state_tensors().items():
                _, state, of = name.split(".", 2)  # optim.STATE.NAME
                found[name] = state_piece(state, piece_of(self._parameters[of]), piece.local)
        return found

    def _laid_out(self, tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
        return {n: piece_of(self._parameters[n]).like(tensor) for n, tensor in tensors.items()}


class _Bucket:
    """Parameters that are updated together, in host memory or, but for gradients, in a file.

    Their gradients are in one room, in which weights wait for their way back after the update.

    Attributes:
        masters: weights that are updated, by name.
        gradients: where their gradients arrive.
        adamw: their optimizer, with the moments.
        mapped: the file with masters and moments; None: they are in memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        dtypes: tuple[torch.dtype, torch.dtype],
        link: HostLink,
        places: Mapping[str, NamedElements] | None,
        folder: Path | None,
    ) -> None:
        dtype, gradient_dtype = dtypes
        shapes = {name: local_tensor(p).shape for name, p in parameters.items()}
        self.mapped: MappedTensors | None = None
        rooms: Mapping[str, Tensor] = {}
        if folder is not None:
            likes = {n: torch.empty(s, dtype=dtype, device="meta") for n, s in shapes.items()}
            moments = [moment_rooms(name, like, config) for name, like in likes.items()]
            self.mapped = MappedTensors(dict(ChainMap(likes, *moments)), folder)
            rooms = self.mapped.tensors
        self.masters = {
            name: nn.Parameter(rooms[name] if rooms else torch.empty(shape, dtype=dtype))
            for name, shape in shapes.items()
        }
        self.adamw = AdamW(self.masters, config, places=places, rooms=rooms)
        sizes = [shape.numel() for shape in shapes.values()]
        parts = link.room(sum(sizes), gradient_dtype).split(sizes)
        self._rooms = dict(zip(shapes, parts, strict=True))
        self.gradients = {name: room.view(shapes[name]) for name, room in self._rooms.items()}

    def fetch(self) -> None:
        """Start reading what lies in the file."""
        if self.mapped is not None:
            self.mapped.fetch()

    def seal(self) -> None:
        """Let what lies in the file leave memory; the next update checks that it came back."""
        if self.mapped is not None:
            self.mapped.seal()

    def update(self, lr: float) -> None:
        """Update the masters by the gradients."""
        if self.mapped is not None:
            self.mapped.check()
        for name, master in self.masters.items():
            master.grad = self.gradients[name]
        self.adamw.step(lr)
        self.adamw.zero_grad()

    @torch.no_grad()
    def send(
        self,
        parameters: Mapping[str, nn.Parameter],
        link: HostLink,
        weights: OffloadedParameters | None,
    ) -> Iterator[Mark]:
        """Start copying the masters to the device, in its type; gradients are overwritten.

        Weights that are not on the device are replaced where they are.
        """
        for name, master in self.masters.items():
            if weights is not None and name in weights:
                weights.write(name, master)
                continue
            weight = local_tensor(parameters[name])
            waiting = self._rooms[name].view(weight.dtype)[: weight.numel()].view(weight.shape)
            yield link.back(waiting.copy_(master), weight)


class Optimizer:
    """AdamW, on the device for some parameters and in host memory for the others.

    Args:
        parameters: all parameters of this rank by global name.
        config: betas, epsilon and weight decay.
        host: those whose state is in host memory.
        blocks: as for `AdamW`, of the device's parameters.
        places: as for `AdamW`, of all parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        host: HostAdamW,
        blocks: Sequence[Block] = (),
        places: Mapping[str, NamedElements] | None = None,
    ) -> None:
        self._parameters, self.host = parameters, host
        here = {n: p for n, p in parameters.items() if n not in host}
        self.device = AdamW(here, config, blocks, places)

    @property
    def steps(self) -> int:
        """Steps taken, which the bias correction needs; set it after loading a state."""
        return self.device.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.device.steps = steps
        self.host.set_steps(steps)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self.host.forget()

    def weights(self) -> dict[str, Piece]:
        """The weights that are updated, wherever they are, by name in the given order.

        What is written into them is taken over by `take`.
        """
        masters = self.device.weights() | self.host.masters()
        return {n: masters.get(n) or piece_of(p) for n, p in self._parameters.items()}

    def take(self, weights: Mapping[str, Piece]) -> None:
        """Let the model compute with weights that were initialised or loaded, by name."""
        self.device.take(weights)
        self.host.publish()

    def gradient(self, name: str) -> Tensor:
        """This rank's part of a reduced gradient, wherever it is."""
        if name in self.host:
            return self.host.gradient(name)
        grad = self._parameters[name].grad
        assert grad is not None, f"{name} got no gradient"
        return local_tensor(grad)

    def measurable(self, name: str) -> Tensor | Departed:
        """What the norm needs of a reduced gradient."""
        return self.host.departed(name) if name in self.host else self.gradient(name)

    def state_tensors(self) -> dict[str, Piece]:
        """The moments, wherever they are, named as by `AdamW.state_tensors`."""
        return self.device.state_tensors() | self.host.state_tensors()


def _in_buckets(
    parameters: Mapping[str, nn.Parameter], dtype: torch.dtype
) -> Iterator[dict[str, nn.Parameter]]:
    items = [*parameters.items()]
    sizes = [local_tensor(parameter).numel() * dtype.itemsize for _, parameter in items]
    return (dict(items[part]) for part in buckets_of(sizes, BUCKET_BYTES))
