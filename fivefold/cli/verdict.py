"""Prints the report of a comparison, and turns its verdict into an exit status."""

import json
import sys
from typing import Any, Protocol

from fivefold.cli.style import paint


class Report(Protocol):
    """The report of a comparison."""

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""

    def text(self) -> str:
        """The report as text; the last line is the verdict."""

    def as_json(self) -> dict[str, Any]:
        """The report as a value for JSON."""


def tell(report: Report, *, as_json: bool) -> int:
    """Print a report, and return the exit status: 0 only if it passed."""
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        *lines, verdict = report.text().splitlines()
        print("\n".join(lines))
        print(paint(verdict, "green" if report.passed else "red", sys.stdout))
    return 0 if report.passed else 1
