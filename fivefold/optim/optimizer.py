"""The optimizer of a rank, wherever its state is."""

from collections.abc import Mapping

from torch import Tensor, nn

from fivefold.mesh.slices import Piece, local_tensor, piece_of
from fivefold.optim.adamw import AdamW
from fivefold.optim.grad_norm import NormTerm
from fivefold.optim.loss_scale import LossScaler
from fivefold.optim.offload import HostAdamW


class Optimizer:
    """The optimizer of some parameters on the device, and of the others on the host.

    Args:
        parameters: all parameters of this rank by global name.
        device: updates those whose state is on the device.
        host: updates the others.
        scaler: scale of the loss that gradients are of.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        device: AdamW,
        host: HostAdamW,
        scaler: LossScaler,
    ) -> None:
        self._parameters, self._scaler = parameters, scaler
        self.device, self.host = device, host

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
        """Make the model compute with weights that were initialised or loaded, by name."""
        self.device.take(weights)
        self.host.publish(weights)

    def gradient(self, name: str) -> Tensor:
        """This rank's part of a reduced gradient of the loss, wherever it is."""
        grad, scale = self._scaled(name), self._scaler.scale
        return grad if scale is None else grad / scale

    def _scaled(self, name: str) -> Tensor:
        """This rank's part of a reduced gradient of the scaled loss."""
        if name in self.host:
            return self.host.gradient(name)
        grad = self._parameters[name].grad
        assert grad is not None, f"{name} got no gradient"
        return local_tensor(grad)

    def measurable(self, name: str) -> Tensor | NormTerm:
        """The contribution to the norm of a reduced gradient of the scaled loss."""
        return self.host.norm_term(name) if name in self.host else self._scaled(name)

    def state_tensors(self) -> dict[str, Piece]:
        """The moments, wherever they are, named as by `AdamW.state_tensors`."""
        return self.device.state_tensors() | self.host.state_tensors()
