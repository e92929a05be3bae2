"""A run, or two runs side by side, as a self-contained HTML page."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Annotated, TypedDict

from msgspec import Meta

from fivefold import pages
from fivefold.audit.report import AuditReport
from fivefold.config.config import SECTION_SETTINGS
from fivefold.errors import DataError
from fivefold.files import as_kind
from fivefold.pipeline.draw.html import timelines
from fivefold.report.charts import charts_of, drawn
from fivefold.report.facts import facts
from fivefold.report.history import RunHistory
from fivefold.train.folder.metrics_file import MOST_STEPS
from fivefold.train.folder.run_folder import RunFolder

_STYLE = """<style>
  table.events td:not(:last-child){white-space:nowrap}
  code{font:12px/1.45 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
  details{margin:1em 0} summary{cursor:pointer;font-weight:600}
</style>"""
Rows = Iterable[Sequence[str]]
_Count = Annotated[int, Meta(ge=0, lt=MOST_STEPS)]


class _Load(TypedDict):
    """The load of a layer's experts, as it is shown."""

    tokens: Annotated[list[_Count], Meta(min_length=1)]


def page(histories: Sequence[RunHistory], gains: Sequence[str] = ()) -> str:
    """The page of one run, or of two that share each chart.

    Args:
        histories: courses of the runs.
        gains: what runs could gain, a sentence each.
    """
    names = " and ".join(history.name for history in histories)
    body = [_STYLE, f"<h1>{escape(names)}</h1>", *_facts(histories), *_runs(histories)]
    body += [f"<p>{escape(line)}</p>" for line in gains]
    body += ["<h2>Training curves</h2>", *_charts(histories)]
    for history in histories:
        head = f" of {escape(history.name)}" if len(histories) > 1 else ""
        body += [f"<h2>Events{head}</h2>", *_events(history)]
        body += [f"<h2>Against theory{head}</h2>", *_audit(history)]
        body += _experts(history, head)
    body += ["<h2>A step's pipeline, beside its simulation</h2>", *_timeline(histories)]
    body += ["<h2>Settings</h2>", *_settings(histories), *_machines(histories)]
    return pages.document(names, body)


def _runs(histories: Sequence[RunHistory]) -> Iterator[str]:
    """A legend of the runs' colours, if there are two."""
    if len(histories) > 1:
        tones = zip(histories, (pages.RUN, pages.OTHER_RUN), strict=True)
        rules = [(f".run{i}", "background", tone) for i, (_, tone) in enumerate(tones)]
        yield f"<style>{pages.rules(rules)}</style>"
        entries = (
            f'<span><i class="run{i}"></i>{escape(history.name)}</span>'
            for i, history in enumerate(histories)
        )
        yield f'<div class="legend">{"".join(entries)}</div>'


def _facts(histories: Sequence[RunHistory]) -> Iterator[str]:
    head = ("", *(history.name for history in histories)) if len(histories) > 1 else ()
    yield pages.table(facts(histories), head)


def _charts(histories: Sequence[RunHistory]) -> Iterator[str]:
    charts = charts_of(histories)
    if charts:
        yield from drawn(charts)
    else:
        yield "<p>No step has ended yet.</p>"


def _events(history: RunHistory) -> Iterator[str]:
    rows = [(f"{x.when:%Y-%m-%d %H:%M:%S}", x.what, x.details) for x in history.happenings]
    yield pages.table(rows).replace("<table>", '<table class="events">', 1)


def _audit(history: RunHistory) -> Iterator[str]:
    report = history.audit()
    if report is None:
        yield "<p>No step was measured: train with <code>--audit</code>.</p>"
        return
    yield pages.table(_findings(report), ("", "predicted", "measured", "", ""), numbers=(1, 2, 3))
    wrong = [finding.name for finding in report.findings if finding.wrong]
    verdict = f"not as predicted: {', '.join(wrong)}" if wrong else "all as predicted"
    yield f"<p>{escape(report.title)}: {escape(verdict)}.</p>"


def _findings(report: AuditReport) -> Iterator[Sequence[str]]:
    for finding in report.findings:
        values = [
            "" if value is None else finding.shown(value)
            for value in (finding.predicted, finding.measured)
        ]
        off = finding.deviation
        shown = "" if off is None else "equal" if off == 0 else f"{off:+.2%}"
        yield finding.name, *values, shown, finding.note


def _experts(history: RunHistory, head: str) -> Iterator[str]:
    last = next((record for record in reversed(history.steps) if "experts" in record), None)
    if last is None:
        return
    yield f"<h2>Load of the experts{head}, step {last['step']:,}</h2>"
    where = f"step {last['step']} of {RunFolder(history.folder).metrics_file}"
    for layer, found in as_kind(last["experts"], dict[str, _Load], where, DataError).items():
        counts = found["tokens"]
        most, total = max(counts), max(sum(counts), 1)
        bars = [
            pages.bar(
                expert / len(counts),
                0.9 / len(counts),
                f"color-mix(in srgb,{pages.EXPERT} {count / max(most, 1):.0%},transparent)",
                f"expert {expert}: {count:,} tokens, {count * len(counts) / total:.2f} of the mean",
            )
            for expert, count in enumerate(counts)
        ]
        shown = f"busiest {most * len(counts) / total:.2f} x mean"
        yield pages.row(f"layer {layer}", bars, shown)


def _timeline(histories: Sequence[RunHistory]) -> Iterator[str]:
    charts = [chart for history in histories for chart in history.timeline()]
    if charts:
        yield from timelines(charts)
    else:
        yield "<p>No step was profiled: train with <code>--profile</code>.</p>"


def _settings(histories: Sequence[RunHistory]) -> Iterator[str]:
    """Settings that are not defaults; of two runs, first those in which they differ."""
    rows, alike = [], []
    for section, settings in SECTION_SETTINGS.items():
        for setting in settings:
            values = [getattr(getattr(s.config, section), setting.name) for s in histories]
            row = (f"{section}.{setting.name}", *map(setting.words, values))
            if any(value != values[0] for value in values):
                rows.append(row)
            elif values[0] != setting.default:
                alike.append(row)
    if len(histories) > 1:
        yield "<p>In which they differ:</p>" if rows else "<p>All settings are the same.</p>"
        yield pages.table(rows, ("", *(history.name for history in histories)))
    kind = "The same in both" if len(histories) > 1 else "All"
    title = f"{kind} that are not defaults ({len(alike)})"
    yield f"<details><summary>{title}</summary>{pages.table(alike)}</details>"


def _machines(histories: Sequence[RunHistory]) -> Iterator[str]:
    for history in histories:
        if history.starts:
            latest = history.starts[-1]
            title = f"Environment of {history.name}'s latest start"
            rows = [(name, _plain(value)) for name, value in latest.items()]
            yield f"<details><summary>{escape(title)}</summary>{pages.table(rows)}</details>"


def _plain(value: object) -> str:
    """A value of a JSON file in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
