"""What passes between stages on one rank: to the stage beside it here, or over the group."""

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.pipeline.ir import Direction, Message

SENDS_IN_FLIGHT = 4
"""Sends of a rank that may be under way: gloo's say that they have ended only when waited for, and
until then what they send is held. No wait is circular: it is for a message that the program issues
earlier, and what the receiver does before it takes that one needs earlier messages only."""

Address = tuple[Direction, int, int, int]
"""Direction, receiving stage, microbatch, slice."""


class Mail:
    """The tensors of one step that are on their way, to this rank or from it.

    Args:
        group: the pipeline group; None for one rank.
        hidden_shape: shape of one hidden state of every token, [T, H].
        dtype: type of hidden states.
        device: where stages live.
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
        """Give a tensor to a stage on this rank."""
        self._incoming[address] = (None, tensor)

    def post(self, address: Address, tensor: Tensor) -> None:
        """Keep a tensor until the SEND that follows."""
        self._outgoing[address] = tensor

    def wait(self, address: Address) -> None:
        """Return once the tensor is there."""
        work, tensor = self._incoming[address]
        if work is not None:
            work.wait()
            self._incoming[address] = (None, tensor)

    def take(self, address: Address) -> Tensor:
        """A tensor that has been waited for."""
        return self._incoming.pop(address)[1]

    def send(self, message: Message) -> None:
        """Start sending what was posted; its storage is free once that has ended."""
        tensor = self._outgoing.pop(address_of(message)).contiguous()
        self._sending = [(w, kept) for w, kept in self._sending if not w.is_completed()]
        if len(self._sending) >= SENDS_IN_FLIGHT:
            self._sending.pop(0)[0].wait()
        work = dist.isend(tensor, group=self._group, group_dst=message.dst_rank, tag=message.id)
        assert work is not None
        self._sending.append((work, tensor))

    def receive(self, message: Message, states: int = 1) -> None:
        """Start receiving into a new buffer, [states * T, H]."""
        tokens, features = self._shape
        buffer = torch.empty(states * tokens, features, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, group=self._group, group_src=message.src_rank, tag=message.id)
        self._incoming[address_of(message)] = (work, buffer)

    def finish(self) -> None:
        """Wait for the sends that are still under way."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []


def address_of(message: Message) -> Address:
    """Where a message goes."""
    return message.direction, message.dst_stage, message.mb, message.slice
