"""`python -m fivefold`, and the script `fivefold`."""

import signal
from typing import NoReturn


def program() -> NoReturn:
    """Run the program; Ctrl-C ends it without a traceback also while modules are imported."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fivefold.cli.main import program

    signal.signal(signal.SIGINT, before)
    program()


if __name__ == "__main__":
    program()
