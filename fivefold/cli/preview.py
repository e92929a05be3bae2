"""What `fivefold train --dry-run` shows: settings, mesh, stages and derived numbers."""

import sys
from collections.abc import Iterator

from fivefold.cli.style import paint
from fivefold.config.sources import to_toml
from fivefold.counts.derived import describe
from fivefold.layout import Layout
from fivefold.pipeline.draw.text import draw
from fivefold.pipeline.split.stages import stage_table
from fivefold.tell.columns import listed

PICTURE_WIDTH = 160  # characters; wider pictures wrap and become useless
PICTURE_ACTS = 64  # microbatches x stages; more make pictures too wide


def preview(layout: Layout) -> Iterator[str]:
    """The parts of the preview, each of one or more lines."""
    yield _title("settings")
    yield to_toml(layout.config)
    yield _title("mesh: rank order, rightmost fastest")
    yield from layout.grid.describe()
    if layout.grid.pp > 1:
        yield _title("\nstages")
        yield stage_table(layout.split)
        yield from _picture(layout)
    yield _title("\nwhat follows")
    yield from listed(describe(layout), right=(1,))


def _picture(layout: Layout) -> Iterator[str]:
    title = f"\nprogram: {layout.schedule}, F forward, B backward, time to the right"
    if layout.num_microbatches * len(layout.split.stages) <= PICTURE_ACTS:
        picture = draw(layout.program())
        if max(map(len, picture.splitlines())) <= PICTURE_WIDTH:
            yield _title(title)
            yield picture
            return
    yield _title(f"\nprogram: {layout.schedule}, too long to be drawn here")


def _title(text: str) -> str:
    return paint(text, "bold", sys.stdout)
