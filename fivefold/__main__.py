"""`python -m fivefold`, and the script `fivefold`."""

import signal
import sys
from typing import NoReturn


def program() -> NoReturn:
    """Run the program; Ctrl-C ends it without a traceback also while modules are imported."""
    if sys.platform == "win32":  # Windows cannot fork ranks
        sys.exit("error: Fivefold needs Linux or macOS\n  works: Linux in Windows: `wsl --install`")
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fivefold.cli.main import program

    signal.signal(signal.SIGINT, before)
    program()


if __name__ == "__main__":
    program()
