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
from fivefold.report.story import Story
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


def page(stories: Sequence[Story], gains: Sequence[str] = ()) -> str:
    """The page of one run, or of two that share each chart.

    Args:
        stories: courses of the runs.
        gains: what runs could gain, a sentence each.
    """
    names = " and ".join(story.name for story in stories)
    body = [_STYLE, f"<h1>{escape(names)}</h1>", *_facts(stories), *_runs(stories)]
    body += [f"<p>{escape(line)}</p>" for line in gains]
    body += ["<h2>Course</h2>", *_charts(stories)]
    for story in stories:
        head = f" of {escape(story.name)}" if len(stories) > 1 else ""
        body += [f"<h2>Events{head}</h2>", *_events(story)]
        body += [f"<h2>Against theory{head}</h2>", *_audit(story)]
        body += _experts(story, head)
    body += ["<h2>A step's pipeline, beside its simulation</h2>", *_timeline(stories)]
    body += ["<h2>Settings</h2>", *_settings(stories), *_machines(stories)]
    return pages.document(names, body)


def _runs(stories: Sequence[Story]) -> Iterator[str]:
    """A legend of the runs' colours, if there are two."""
    if len(stories) > 1:
        tones = zip(stories, (pages.RUN, pages.OTHER_RUN), strict=True)
        rules = [(f".run{i}", "background", tone) for i, (_, tone) in enumerate(tones)]
        yield f"<style>{pages.rules(rules)}</style>"
        entries = (
            f'<span><i class="run{i}"></i>{escape(story.name)}</span>'
            for i, story in enumerate(stories)
        )
        yield f'<div class="legend">{"".join(entries)}</div>'


def _facts(stories: Sequence[Story]) -> Iterator[str]:
    head = ("", *(story.name for story in stories)) if len(stories) > 1 else ()
    yield pages.table(facts(stories), head)


def _charts(stories: Sequence[Story]) -> Iterator[str]:
    charts = charts_of(stories)
    if charts:
        yield from drawn(charts)
    else:
        yield "<p>No step has ended yet.</p>"


def _events(story: Story) -> Iterator[str]:
    rows = [(f"{x.when:%Y-%m-%d %H:%M:%S}", x.what, x.details) for x in story.happenings]
    yield pages.table(rows).replace("<table>", '<table class="events">', 1)


def _audit(story: Story) -> Iterator[str]:
    report = story.audit()
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


def _experts(story: Story, head: str) -> Iterator[str]:
    last = next((record for record in reversed(story.steps) if "experts" in record), None)
    if last is None:
        return
    yield f"<h2>Load of the experts{head}, step {last['step']:,}</h2>"
    where = f"step {last['step']} of {RunFolder(story.folder).metrics_file}"
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


def _timeline(stories: Sequence[Story]) -> Iterator[str]:
    charts = [chart for story in stories for chart in story.timeline()]
    if charts:
        yield from timelines(charts)
    else:
        yield "<p>No step was profiled: train with <code>--profile</code>.</p>"


def _settings(stories: Sequence[Story]) -> Iterator[str]:
    """Settings that are not defaults; of two runs, first those in which they differ."""
    rows, alike = [], []
    for section, settings in SECTION_SETTINGS.items():
        for setting in settings:
            values = [getattr(getattr(s.config, section), setting.name) for s in stories]
            row = (f"{section}.{setting.name}", *map(setting.words, values))
            if any(value != values[0] for value in values):
                rows.append(row)
            elif values[0] != setting.default:
                alike.append(row)
    if len(stories) > 1:
        yield "<p>In which they differ:</p>" if rows else "<p>All settings are the same.</p>"
        yield pages.table(rows, ("", *(story.name for story in stories)))
    kind = "The same in both" if len(stories) > 1 else "All"
    title = f"{kind} that are not defaults ({len(alike)})"
    yield f"<details><summary>{title}</summary>{pages.table(alike)}</details>"


def _machines(stories: Sequence[Story]) -> Iterator[str]:
    for story in stories:
        if story.starts:
            latest = story.starts[-1]
            title = f"Environment of {story.name}'s latest start"
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
