"""`fivefold plan`: find the fastest layout of a model that fits on a cluster."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli.plan_options import Options, alone, none_proven, planned_request
from fivefold.cli.style import note, paint
from fivefold.config.sources import Loaded, load_with_origins
from fivefold.files import finite, telling_unwritable, write_atomic
from fivefold.tell.columns import listed, prose

if TYPE_CHECKING:
    from fivefold.learn.posterior import Posterior
    from fivefold.search.request import Request
    from fivefold.search.search import SearchResult
    from fivefold.tell.explain import Sensitivity

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    if any(word.partition("=")[0] == "--calibrate" for word in argv):
        return _calibrate(argv)
    if any(word.partition("=")[0] == "--score" for word in argv):
        return _score(argv)
    from fivefold.search.request import LAYOUT

    loaded = load_with_origins(_with_model(argv), Options, note, models=True, ignored=LAYOUT)
    options, tokens = loaded.options, _tokens(loaded.options.train_tokens)
    asked, known = planned_request(loaded, tokens)
    from fivefold.search.search import search
    from fivefold.tell.explain import changed
    from fivefold.tell.infeasible import why_nothing

    other = None if options.why is None else changed(asked, options.why)
    result = search(asked)
    if not result.found:
        raise none_proven(asked) or why_nothing(result)
    notes: tuple[str, ...] = ()
    if options.emit is not None:
        from fivefold.tell.within import within

        result, notes = within(result, options.emit)
    if options.html is not None:
        from fivefold.tell.page import page

        text = page(result, _name(loaded), tokens)
        with telling_unwritable(options.html):
            write_atomic(options.html, text)
        print(f"wrote {options.html}", file=sys.stderr)
    if options.emit is not None:
        _emit(result, options.emit, notes)
    elif options.json:
        print(json.dumps(finite(_record(result, options, tokens, other, known)), indent=2))
    else:
        print("\n".join(_report(result, loaded, tokens, other, known, argv)))
    return 0


def _name(loaded: Loaded[Options]) -> str:
    """What to call the model: its preset, its path, or the recipe."""
    return loaded.model or "this model"


def _with_model(argv: Sequence[str]) -> Sequence[str]:
    """The command line, with a run of --from as its recipe if it names none."""
    if not any(word.partition("=")[0] in ("--from", "--from-runs") for word in argv):
        return argv
    from fivefold.cli.from_runs import with_model

    return with_model(argv)


def _score(argv: Sequence[str]) -> int:
    """Print the errors of the planner on published runs, instead of planning."""
    from fivefold.published.score import report

    options = alone(argv, "score", "json")
    assert options.score is not None
    found = report(Path(options.score))
    print(found.as_json() if options.json else found.table())
    return 0


def _calibrate(argv: Sequence[str]) -> int:
    """Measure this machine, instead of planning; only this part of the command loads torch."""
    from fivefold.cli.train import ranks

    options = alone(argv, "calibrate", "nproc", "device")
    assert options.calibrate is not None
    ranks(options.nproc)  # raises if these ranks are impossible
    from fivefold.calibrate.run import calibrate

    return calibrate(Path(options.calibrate), options.nproc, options.device)


def _tokens(text: str | None) -> float | None:
    """The number in a text such as '15T'; nan if it is none."""
    if text is None:
        return None
    scale = SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        return float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        return nan


def _emit(result: "SearchResult", target: str, notes: Sequence[str]) -> None:
    """Print the settings on standard output, and notes on missing ones on standard error."""
    from fivefold.tell.export.targets import export

    found = export(result.best.layout, target)
    sys.stdout.write(found.text)
    for text in (*notes, *found.missing):
        note(text)


def _record(
    result: "SearchResult",
    options: Options,
    tokens: float | None,
    other: "Request | None",
    known: "Posterior | None",
) -> dict[str, Any]:
    """The whole request, as a value for JSON."""
    from fivefold.tell.record import as_json, compared

    document = as_json(result, tokens, options.top)
    if known is not None:
        from fivefold.learn.tell import record

        document["learned"] = record(known)
    if options.rules:
        from fivefold.tell.rules import rule_of_thumb

        rule = rule_of_thumb(result.request)
        document["rules"] = {"steps": rule.steps, **compared(result, rule.candidate)}
    if options.guide:
        from fivefold.tell.guide import advice
        from fivefold.tell.guide import as_json as advised

        document["guide"] = advised(advice(result))
    if other is not None:
        from fivefold.tell.explain import best_with

        found = best_with(result, other)
        document["why"] = {
            "with": options.why,
            **compared(result, found.best if found.found else None),
        }
    return document


def _report(
    result: "SearchResult",
    loaded: Loaded[Options],
    tokens: float | None,
    other: "Request | None",
    known: "Posterior | None",
    argv: Sequence[str],
) -> Iterator[str]:
    """The answer, the reasons, answers to further questions, and the next commands."""
    from fivefold.tell.answer import answer, next_commands, reasons, title, why
    from fivefold.tell.explain import best_with, sensitivities
    from fivefold.tell.report import NUMBERS, cost_lines, ranked

    options, name = loaded.options, _name(loaded)
    if other is not None:
        yield from why(result, best_with(result, other), str(options.why))
        yield from _questions(result, options)
        return
    changes = sensitivities(result)
    yield paint(title(result, name), "bold", sys.stdout)
    yield from listed(answer(result))
    yield from _section("why", listed(reasons(result, changes)))
    layouts = listed(ranked(result, options.top), NUMBERS)
    yield from _section("layouts, the best of each mesh", layouts)
    if options.verbose:
        yield from _details(result, changes)
    if options.verbose or tokens:
        yield from _section("a whole run", prose(cost_lines(result, tokens)))
    yield from _questions(result, options)
    if known is not None:
        from fivefold.cli.from_runs import taught

        yield from _section("what the runs say", taught(known, result))
    yield from _section("next", next_commands(result, name, argv))


def _details(result: "SearchResult", changes: Sequence["Sensitivity"]) -> Iterator[str]:
    """Where time and memory go, what is sent, and what other layouts would cost."""
    from fivefold.counts.derived import moved_and_kept
    from fivefold.tell import report
    from fivefold.tell.effects import effects
    from fivefold.tell.efficiency import opened

    yield from prose([report.counts(result)])
    yield from _section("where the time goes", report.waterfall(result.best.predicted))
    yield from prose([report.CONVENTION])
    yield from _section("kernel efficiency, opened", opened(result.best.predicted))
    yield from _section("memory by pipeline rank", report.memory_table(result.best))
    moved = moved_and_kept(result.best.layout)
    yield from _section("bytes sent in a step, and kept of a microbatch", listed(moved, right=(1,)))
    if context := list(report.context(result)):
        yield from _section("context parallelism", prose(context))
    if others := report.others(result):
        document = (line for layout, reason in others for line in (f"{layout}:", f"  {reason}"))
        yield from _section("not chosen", prose(document))
    yield from _section("changes", listed(effects(result, changes), right=(1,)))
    yield from _section("time for memory", listed(report.traded(result), report.NUMBERS[:3]))


def _questions(result: "SearchResult", options: Options) -> Iterator[str]:
    """The rules of thumb and public guides, if they were asked for."""
    if options.rules:
        from fivefold.tell.report import rules
        from fivefold.tell.rules import rule_of_thumb

        yield from _section(
            "the rule of thumb", prose(rules(result, rule_of_thumb(result.request)))
        )
    if options.guide:
        from fivefold.tell.guide import advice, guide

        yield from _section("what guides say", guide(result, advice(result)))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield ""
    yield paint(title, "bold", sys.stdout)
    yield from lines
