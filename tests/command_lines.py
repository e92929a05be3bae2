"""What runs command lines in a process of its own; it imports nothing that they do not need."""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

EFFORT = (15_000, 8_000, 1_500)
"""A small part of the planner's usual work, of which tests/search/ see what it finds: pages show
what is said and not by which layout it is said, and a search ends in the same ways."""


def work(channel: Connection) -> None:
    """Run command lines as they come; send the status of each and all it prints."""
    from fivefold import process
    from fivefold.cli.main import main

    process.begin()  # as a program does
    output = Path(f".output-{os.getpid()}")
    plans = False
    while True:
        argv = channel.recv()
        if argv[0] == "plan" and not plans:
            plans = True
            _search_less()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            status = main(argv)
            sys.stdout.flush()
            sys.stderr.flush()
        channel.send((status, output.read_text(encoding="utf-8")))


def _search_less() -> None:
    from fivefold.search import branch_and_bound, search
    from tests.search.once import once

    search.search = once(search.search)  # a plan is shown as text, as a recipe, as a page
    search.WORK, branch_and_bound.TO_IMPROVE, branch_and_bound.TO_TRADE = EFFORT
