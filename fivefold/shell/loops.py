"""Which loops a script is in, and how many it leaves."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Loops:
    """The loops that a script is in.

    Attributes:
        depth: how many.
        left: how many of them are being left, of the last only a turn if it `goes_on`.
    """

    depth: int = 0
    left: int = 0
    goes_on: bool = False

    def leave(self, words: Sequence[str], goes_on: bool) -> bool:
        """Leave the innermost loop, or as many as a word says."""
        levels = int(words[0]) if words and words[0].isdecimal() else 1
        self.left, self.goes_on = min(levels, self.depth), goes_on
        return True

    def ends(self) -> bool:
        """Whether a loop ends whose turn has."""
        if not self.left:
            return False
        self.left -= 1
        return bool(self.left) or not self.goes_on
