"""Tensors passed between stages: locally on one rank, or as messages over the pipeline group."""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.groups import uses_nccl
from fivefold.pipeline.ir import Direction, Message

SENDS_IN_FLIGHT = 4
"""Maximum number of concurrent sends of a rank, which bounds the tensors they hold.

gloo's sends complete only when waited for. Waiting here cannot deadlock: the receiver needs only
earlier messages of the program before it takes this one.
"""
POLLING = 1e-4
"""Seconds between two looks at a send of NCCL."""

Address = tuple[Direction, int, int, int]
"""(direction, receiving stage, microbatch, slice)."""


class StepMessages:
    """The tensors of one step that are being sent, received or passed on locally.

    Args:
        group: pipeline group; None for one rank.
        lines: groups of two ranks by sender and receiver, used instead where there are any.
        hidden_shape: shape of the hidden state of all tokens, [T, H].
        dtype: dtype of hidden states.
        device: device of the stages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        lines: Mapping[tuple[int, int], dist.ProcessGroup],
        hidden_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group, self._lines = group, lines
        self._shape, self._dtype, self._device = hidden_shape, dtype, device
        self._polls = uses_nccl()
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

    def arrived(self, address: Address) -> Tensor:
        """A tensor that has been waited for, and stays to be taken."""
        return self._incoming[address][1]

    def take(self, address: Address) -> Tensor:
        """Remove and return a tensor that has been waited for."""
        return self._incoming.pop(address)[1]

    def send(self, message: Message) -> None:
        """Start sending a stored tensor; keeps it alive until the send has ended."""
        tensor = self._outgoing.pop(address_of(message)).contiguous()
        group, _, receiver = self._line(message)
        self._let_go(SENDS_IN_FLIGHT - 1)
        work = dist.isend(tensor, group=group, group_dst=receiver, tag=message.id)
        assert work is not None
        self._sending.append((work, tensor))

    def receive(self, message: Message, states: int = 1) -> None:
        """Start receiving [states * T, H] into a new buffer."""
        tokens, features = self._shape
        buffer = torch.empty(states * tokens, features, dtype=self._dtype, device=self._device)
        group, sender, _ = self._line(message)
        work = dist.irecv(buffer, group=group, group_src=sender, tag=message.id)
        self._incoming[address_of(message)] = (work, buffer)

    def finish(self) -> None:
        """End the step: on CPUs, wait for all pending sends.

        On CUDA, torch keeps their tensors alive until the device has sent them.
        """
        if self._device.type != "cuda":
            self._let_go(0)
        self._sending = []

    def _line(self, message: Message) -> tuple[dist.ProcessGroup | None, int, int]:
        """A message's group, and the sender and the receiver in it."""
        source, target = message.src_rank, message.dst_rank
        line = self._lines.get((source, target))
        if line is None:
            return self._group, source, target
        return line, int(source > target), int(target > source)

    def _let_go(self, most: int) -> None:
        """Forget sends that have ended, and wait until at most `most` are left.

        It is the host that waits: NCCL's wait for an unfinished send would hold up the stream that
        computes.
        """
        left = []
        for work, tensor in self._sending:
            if work.is_completed():
                work.wait()  # torch lets go of the tensor, too
            else:
                left.append((work, tensor))
        while len(left) > most:
            work, _ = left.pop(0)
            while self._polls and not work.is_completed():
                time.sleep(POLLING)
            work.wait()
        self._sending = left


def address_of(message: Message) -> Address:
    """The address of the stage that receives a message."""
    return message.direction, message.dst_stage, message.mb, message.slice
