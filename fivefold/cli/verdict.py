"""How a verb that compares ends: a report, and whether it is good."""

import json
import sys
from typing import Any, Protocol

from fivefold.cli.style import paint


class Report(Protocol):
    """What was compared."""

    @property
    def passed(self) -> bool:
        """Whether all is as it must be."""

    def text(self) -> str:
        """For a person; the last line is the verdict."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""


def tell(report: Report, *, as_json: bool) -> int:
    """Print a report, and return the exit status: 0 only if it is good."""
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        *lines, verdict = report.text().splitlines()
        print("\n".join(lines))
        print(paint(verdict, "green" if report.passed else "red", sys.stdout))
    return 0 if report.passed else 1
