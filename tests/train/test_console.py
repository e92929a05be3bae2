import errno
import io
import re
import signal

import pytest

from fivefold.train.console import HEADER_EVERY, Console
from fivefold.train.metrics import EvalMetrics
from fivefold.train.ranks.failures import raised
from tests.train.test_metrics import step_metrics

AT_80 = """\
     step     loss  grad norm        lr  tokens/s    MFU    memory     ETA
   3/1000   2.5000      1.250  3.00e-04    4.00 K  10.0%  3.00 GiB  33m14s
"""
AT_80_UNKNOWN = """\
     step     loss  grad norm        lr  tokens/s  FLOP/s/rank    memory     ETA
   3/1000   2.5000      1.250  3.00e-04    4.00 K       1.00 T  3.00 GiB  33m14s
"""
AT_120 = (
    "     step     loss  grad norm        lr  tokens/s    /gpu  FLOP/s/gpu    MFU    memory"
    "  data wait     ETA\n"
    "   3/1000   2.5000      1.250  3.00e-04    4.00 K  1.00 K      1.00 T  10.0%  3.00 GiB"
    "       4 ms  33m14s\n"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("width", "device", "peak", "golden"),
    [
        (80, "gpu", 10e12, AT_80),
        (80, "rank", None, AT_80_UNKNOWN),
        (120, "gpu", 10e12, AT_120),
        (None, "gpu", 10e12, AT_120),
    ],
)
def test_step_lines(width, device, peak, golden):
    out = io.StringIO()
    console = Console(1000, device=device, peak_known=peak is not None, stream=out, width=width)
    console.record(step_metrics(3, peak_flops=peak))
    console.close()
    assert out.getvalue() == golden
    assert max(map(len, golden.splitlines())) <= (width or 160)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120])
def test_lines_fit_the_width_and_stay_aligned(width):
    out = io.StringIO()
    console = Console(1_000_000, device="gpu", peak_known=True, stream=out, width=width)
    for step, norm in ((1, 1e9), (999_999, 0.0), (1_000_000, 123.4)):
        console.record(step_metrics(step, grad_norm=norm, seconds=5.0, lr=0.0))
    lengths = {len(line) for line in out.getvalue().splitlines()}
    assert len(lengths) == 1 and lengths.pop() <= max(width, 15)


def test_the_rest_of_the_story():
    out = io.StringIO()
    console = Console(10, stream=out)
    console.banner("tiny on 4 ranks", [("dp", "2", "4 ranks / tp 2"), ("folder", "runs/tiny", "")])
    console.record(EvalMetrics(4, 3.21, 1_000_000, 2.2))
    console.note("checkpoint 4 saved in 2.1 s")
    console.warning("the loss [3] is rising")
    assert out.getvalue() == (
        "tiny on 4 ranks\n"
        "  dp      2  4 ranks / tp 2\n"
        "  folder  runs/tiny\n"
        "\n"
        "step 4: validation loss 3.2100, perplexity 24.78 (1.00 M tokens in 2.2 s)\n"
        "checkpoint 4 saved in 2.1 s\n"
        "warning: the loss [3] is rising\n"
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_an_explanation_goes_on_below_itself(width):
    out = Terminal()
    why = " + ".join(f"part {n} of it 128 KiB" for n in range(8))
    Console(10, stream=out, width=width).banner("a run", [("sent", "1 MiB", why), ("to", "it", "")])
    lines = re.sub("\x1b\\[\\d+m", "", out.getvalue()).splitlines()
    first, *more = lines[1 : lines.index("  to    it")]
    assert first.startswith("  sent  1 MiB  part 0") and max(map(len, lines)) <= width
    assert all(line.startswith(" " * 15) and line[15] != " " for line in more)
    assert not any(line.endswith("128") for line in lines)
    assert " ".join([first[15:], *(line[15:] for line in more)]) == why


def test_long_lines_in_a_log_are_not_wrapped():
    out = io.StringIO()
    Console(10, stream=out).warning("x" * 500)
    assert out.getvalue() == "warning: " + "x" * 500 + "\n"


def test_only_steps_whose_turn_has_come():
    out = io.StringIO()
    console = Console(25, stream=out, log_interval=10)
    for step in range(1, 26):
        console.record(step_metrics(step))
    assert [line.split("/")[0].strip() for line in out.getvalue().splitlines()[1:]] == [
        "1",
        "10",
        "20",
        "25",
    ]


def test_the_eta_is_the_median_of_recent_steps():
    out = io.StringIO()
    console = Console(100, stream=out)
    for step, seconds in ((1, 600.0), (2, 1.0), (3, 1.0)):
        console.record(step_metrics(step, seconds=seconds))
    assert out.getvalue().splitlines()[-1].endswith("1m37s")


def terminal_output(steps: int) -> str:
    out = Terminal()
    console = Console(steps, stream=out, width=80)
    for step in range(1, steps + 1):
        console.record(step_metrics(step))
    console.warning("hot")
    console.close()
    return out.getvalue()


def test_a_terminal_has_a_bar_colour_and_repeated_headers():
    text = terminal_output(HEADER_EVERY + 1)
    assert "━" in text and "\x1b[33mwarning: hot" in text
    assert text.count("grad norm") == 2


def test_no_color_and_dumb_terminals(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in terminal_output(2)
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in terminal_output(2) and "━" not in terminal_output(2)


def test_a_reader_who_has_gone_is_told_as_such() -> None:
    """Of a rank, too, whose launcher has no other sign of it than its exit."""

    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError) as caught:
        Console(10, stream=Unread()).note("a line")
    failure = raised(caught.value, 0, None)
    assert failure.cause.startswith("nobody reads") and not failure.traceback
    assert failure.status == 128 + signal.SIGPIPE
