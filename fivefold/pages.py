"""The common design of all HTML pages and pictures: colours, light and dark, small screens."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import NamedTuple


class Tone(NamedTuple):
    """A colour for light backgrounds, and one for dark backgrounds."""

    light: str
    dark: str


PAPER = Tone("#ffffff", "#17191d")
INK = Tone("#222222", "#dddddd")
QUIET = Tone("#5a5a5a", "#a3a3a3")
LINE = Tone("#dddddd", "#3a3d44")
IDLE = Tone("#f1f1f1", "#26292f")
LIMIT = Tone("#b00020", "#ff7b7b")

# What a colour stands for, on every page: fills that can be seen on both backgrounds. Light ones
# are inscribed in dark ink, dark ones in white.
FORWARD, FORWARD_LIGHT = "#3b75af", "#8fb8de"
DX, DX_LIGHT = "#3a8f5c", "#93cca8"
DX_AND_DW, DX_AND_DW_LIGHT = "#2b7f7a", "#8ac4c0"
DW, DW_LIGHT = "#d9822b", "#f2c188"
RECOMPUTED, RECOMPUTED_LIGHT = "#8a8a8a", "#c4c4c4"
HELD = "#a48fc4"
EXPERT = "#7a8b2f"
RUN = INK
OTHER_RUN = Tone("#c2185b", "#ff7ab2")

MEMORY: Mapping[str, str] = MappingProxyType(
    {
        "weights": FORWARD,
        "gathered weights": FORWARD_LIGHT,
        "gradients": DX,
        "arriving gradients": DX_LIGHT,
        "optimizer": "#c9a227",
        "8-bit scales": EXPERT,
        "activations": HELD,
        "recomputed": RECOMPUTED,
        "loss": "#b5507a",
        "deferred weight gradients": DW,
        "working set": DW_LIGHT,
        "communication": "#b08968",
    }
)
STEP: Mapping[str, str] = MappingProxyType(
    {
        "ideal": FORWARD,
        "kernel efficiency": FORWARD_LIGHT,
        "recompute": RECOMPUTED,
        "offloading": RECOMPUTED_LIGHT,
        "bubble": "#b5507a",
        "TP communication": "#d9822b",
        "CP communication": "#e39b52",
        "EP communication": "#c96f1a",
        "PP communication": "#edb57a",
        "DP communication": "#b08968",
        "optimizer": "#c9a227",
        "jitter": "#9aa3ad",
        "step": DX,
    }
)

_LAYOUT = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:1.5em auto;padding:0 16px}"
    "h1{font-size:1.4em}h2{font-size:1.1em;margin:2em 0 .3em}p{margin:.3em 0}"
    "pre{overflow-x:auto;font:12px/1.45 ui-monospace,Menlo,Consolas,monospace}"
    "pre.prose{white-space:pre-wrap}"
    "table{border-collapse:collapse;font-size:14px;display:block;overflow-x:auto}"
    "td,th{text-align:left;padding:.15em 1em .15em 0;vertical-align:top}th{font-weight:600}"
    ".number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
    ".legend{display:flex;flex-wrap:wrap;gap:.2em 1.2em;font-size:13px}"
    ".legend i{display:inline-block;width:12px;height:12px;margin-right:5px;vertical-align:-1px}"
    ".legend i.mark{width:0}"
    ".row{display:grid;grid-template-columns:11em 1fr 10em;gap:8px;align-items:center;"
    "font-size:13px;line-height:22px}"
    ".row .name{text-align:right}.row .track{position:relative;height:15px}"
    ".track *{position:absolute;top:0;height:100%;min-width:1px}"
    ".mark{border-left:2px dotted;box-sizing:border-box}.mark.hard{border-left-style:solid}"
    "small,.quiet{font-size:13px}"
    "@media(max-width:640px){.row{grid-template-columns:1fr auto;gap:0 8px;margin-bottom:4px}"
    ".row .name{text-align:left}.row .track{grid-row:2;grid-column:1/3}}"
)
_TONES = (
    ("body", "background", PAPER),
    ("body", "color", INK),
    ("small,.quiet", "color", QUIET),
    (".mark", "border-color", LIMIT),
)


def rules(tones: Iterable[tuple[str, str, Tone]]) -> str:
    """CSS of (selector, property, tone) in literal colours, which every viewer of SVG reads."""
    each = list(tones)
    light = "".join(f"{selector}{{{name}:{tone.light}}}" for selector, name, tone in each)
    dark = "".join(f"{selector}{{{name}:{tone.dark}}}" for selector, name, tone in each)
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


def document(title: str, body: Iterable[str]) -> str:
    """A self-contained HTML page with this title and body."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title><style>{_LAYOUT}{rules(_TONES)}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def as_script(data: object) -> str:
    """Data as JavaScript within a page; no text in it can end the script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), numbers: Sequence[int] = ()
) -> str:
    """A table; the columns with these numbers are aligned to the right."""

    def cells(row: Sequence[str], kind: str) -> str:
        named = [' class="number"' if i in numbers else "" for i in range(len(row))]
        return "".join(
            f"<{kind}{c}>{escape(text)}</{kind}>" for c, text in zip(named, row, strict=True)
        )

    lines = [f"<tr>{cells(head, 'th')}</tr>"] if head else []
    lines += [f"<tr>{cells(row, 'td')}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def row(name: str, track: Iterable[str], value: str) -> str:
    """A row of a chart: a name, bars and marks on a common scale, and a value as text."""
    return (
        f'<div class="row"><span class="name">{escape(name)}</span>'
        f'<span class="track">{"".join(track)}</span><span>{escape(value)}</span></div>'
    )


def bar(start: float, length: float, colour: str, title: str) -> str:
    """A bar on a track; `start` and `length` are shares of the track's width, 0 to 1."""
    return (
        f'<i style="left:{start:.3%};width:{length:.3%};background:{colour}" '
        f'title="{escape(title)}"></i>'
    )


def mark(at: float, title: str, *, hard: bool) -> str:
    """A line across a track, at a share of its width."""
    return f'<i class="mark{" hard" * hard}" style="left:{at:.3%}" title="{escape(title)}"></i>'


def legend(colours: Mapping[str, str], marks: Mapping[str, bool]) -> str:
    """A legend of colours, and of marks by whether they are hard limits."""
    entries = [
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    ]
    entries += [
        f'<span><i class="mark{" hard" * hard}"></i>{escape(name)}</span>'
        for name, hard in marks.items()
    ]
    return f'<div class="legend">{"".join(entries)}</div>'
