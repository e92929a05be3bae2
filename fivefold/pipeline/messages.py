"""Tensors passed between stages: locally on one rank, or as messages over the pipeline group."""

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.pipeline.ir import Direction, Message

SENDS_IN_FLIGHT = 4
"""Maximum number of concurrent sends of a rank.

gloo's sends complete only when waited for, and hold their tensor until then. Waiting here cannot
deadlock: the receiver needs only earlier messages of the program before it takes this one.
"""

Address = tuple[Direction, int, int, int]
"""(direction, receiving stage, microbatch, slice)."""


class Mail:
    """The tensors of one step that are being sent, received or passed on locally.

    Args:
        group: pipeline group; None for one rank.
        hidden_shape: shape of the hidden state of all tokens, [T, H].
        dtype: dtype of hidden states.
        device: device of the stages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        hidden_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group, self._shape, self._dtype, self._device = group, hidden_shape, dtype, device
        self._incoming: dict[Address, tuple[dist.Work | None, Tensor]] = {}
        self._outgoing: dict[Address, Tensor] = {}
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def hand_over(self, address: Address, tensor: Tensor) -> None:
        """Pass a tensor to a stage on this rank."""
        self._incoming[address] = (None, tensor)

    def post(self, address: Address, tensor: Tensor) -> None:
        """Store a tensor until its SEND."""
        self._outgoing[address] = tensor

    def wait(self, address: Address) -> None:
        """Wait until the tensor has arrived."""
        work, tensor = self._incoming[address]
        if work is not None:
            work.wait()
            self._incoming[address] = (None, tensor)

    def take(self, address: Address) -> Tensor:
        """Remove and return a tensor that has been waited for."""
        return self._incoming.pop(address)[1]

    def send(self, message: Message) -> None:
        """Start sending a stored tensor; keeps it alive until the send has ended."""
        tensor = self._outgoing.pop(address_of(message)).contiguous()
        self._sending = [(w, kept) for w, kept in self._sending if not w.is_completed()]
        if len(self._sending) >= SENDS_IN_FLIGHT:
            self._sending.pop(0)[0].wait()
        work = dist.isend(tensor, group=self._group, group_dst=message.dst_rank, tag=message.id)
        assert work is not None
        self._sending.append((work, tensor))

    def receive(self, message: Message, states: int = 1) -> None:
        """Start receiving [states * T, H] into a new buffer."""
        tokens, features = self._shape
        buffer = torch.empty(states * tokens, features, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, group=self._group, group_src=message.src_rank, tag=message.id)
        self._incoming[address_of(message)] = (work, buffer)

    def finish(self) -> None:
        """Wait for all pending sends."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []


def address_of(message: Message) -> Address:
    """The address of the stage that receives a message."""
    return message.direction, message.dst_stage, message.mb, message.slice
