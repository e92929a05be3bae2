"""Points of time within a pipeline action; sizes are bytes on one device."""

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.predict.memory.stage_backward import Copies


class ActPoint(NamedTuple):
    """A point of time within a pipeline action, in bytes relative to the action's start.

    Attributes:
        where: description of the point.
        activations: kept activations freed by then (negative).
        loss: memory of the loss freed by then (negative).
        recomputed: recomputed activations.
        working: gradients of activations, and intermediate results of the loss.
        gradients: weight gradients that are not yet accumulated.
        made: accumulated ones of a stage that had none before, or less than none where whole sums
            have become shards.
        narrow: 8-bit copies of weights that the step's first backward has made.
        waiting: memory kept for deferred weight gradients.
        communication: buffers of messages.
        over: layers of the stage whose gradients have been made.
        read: what deferred weight gradients need of those, and of what else is over.
        done: whether all gradients of the stage have been made.
        resharded: copies of weights that are not gathered, or not needed any longer (negative).
    """

    where: str
    activations: float = 0.0
    loss: float = 0.0
    recomputed: float = 0.0
    working: float = 0.0
    gradients: float = 0.0
    made: float = 0.0
    narrow: float = 0.0
    waiting: float = 0.0
    communication: float = 0.0
    over: int = 0
    read: float = 0.0
    done: bool = False
    resharded: float = 0.0

    @property
    def size(self) -> float:
        """The sum of all parts, in bytes."""
        freed = self.activations + self.loss + self.resharded
        needed = self.recomputed + self.working + self.gradients + self.made + self.waiting
        return freed + needed + self.narrow + self.communication


def gathers(copies: Copies, start: ActPoint, *also: str) -> Iterator[ActPoint]:
    """Points right after the ends of a stage and its last layer were gathered, with their messages,
    and where a message is unpacked, which needs more; and while a shard from the host is gathered
    beside the last layer.

    `start`: what there is before; `also`: names of copies that there are beside the layer's.
    """
    ends = start._replace(where="the gather of the ends")
    yield ends._replace(resharded=copies.but("ends", "ends", "visiting"))
    if copies.ends_unpacked:
        yield ends._replace(working=copies.ends_unpacked, resharded=copies.but())
    where, layer = "the gather of the last layer", ("rest", "experts", "message", "rearranged")
    yield start._replace(where=where, resharded=copies.but("ends", *layer, *also, "visiting"))
    if copies.visiting and copies.beside:
        held = copies.but("ends", "rest", "experts", "beside", "visiting")
        yield start._replace(where="the gather beside the last layer", resharded=held)
    if copies.unpacked:
        held = copies.but("ends", *(("rest",) if copies.experts else ()))
        yield start._replace(where=where, working=copies.unpacked, resharded=held)
