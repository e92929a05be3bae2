"""What decision tables of public guides say of usual questions, beside the planner's answer.

    python -m benchmarks.guides

Every row is `fivefold plan ... --guide`: the best layout within what a table says, and how much
longer its step is than the plan's. A question that a table has no row for is left empty.
"""

import argparse
import shlex
from functools import cache

from fivefold.cli.plan_options import Options, planned_request
from fivefold.config.sources import load_with_origins
from fivefold.search.search import SearchResult, search
from fivefold.tell.describe import degrees
from fivefold.tell.explain import differences, percent
from fivefold.tell.guide import TABLES, Advice, advice
from fivefold.units import human_seconds

QUESTIONS = (
    "llama2-7b --gpus 64 --seq-length 4096",
    "llama3-8b --gpus 8 --seq-length 8192",
    "llama3-8b --gpus 64 --seq-length 131072",
    "llama2-13b --cluster A100 --gpus 64 --seq-length 4096",
    "llama3-70b --gpus 64 --seq-length 8192",
    "llama3-405b --gpus 1024 --seq-length 8192",
    "mixtral-8x7b --gpus 64 --seq-length 4096",
    "qwen3-235b-a22b --gpus 256 --seq-length 4096",
    "deepseek-v3 --gpus 1024 --seq-length 4096",
)


@cache
def planned(question: str) -> SearchResult:
    """The search that `fivefold plan` makes for a question."""
    loaded = load_with_origins(shlex.split(question), Options, models=True)
    return search(planned_request(loaded, None)[0])


def table() -> str:
    """Markdown: a row a question, a column a table, and the plan last."""
    heads = [f"by {each.by}" for each in TABLES]
    lines = [f"| `fivefold plan` | {' | '.join(heads)} | the plan |"]
    lines.append("|---" * (len(heads) + 2) + "|")
    for question in QUESTIONS:
        result = planned(question)
        cells = [_cell(result, each) for each in advice(result)]
        plan = f"{degrees(result.best.layout)}: {human_seconds(result.best.seconds)}"
        lines.append(f"| `{question}` | {' | '.join(cells)} | {plan} |")
    return "\n".join(lines)


def _cell(result: SearchResult, each: Advice) -> str:
    if each.row is None:
        return ""
    if each.follows:
        return "as planned"
    if each.best is None:
        return f"{each.row.says}: nothing fits"
    where = differences(result.best.predicted, each.best.predicted, most=1)
    longer = percent(each.best.seconds / result.best.seconds - 1)
    return f"{degrees(each.best.layout)}: {longer}" + (f", {where[0]}" if where else "")


def main() -> None:
    """Print the table."""
    print(table())


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    main()
