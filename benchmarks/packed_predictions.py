"""Predicted step times of packed rows beside measured ones, with their documents and without.

    python -m benchmarks.packed_predictions [--results FILE.json]

Reads the runs of packed rows in a file of results of `make gpu` (the newest), and predicts each one
as if rows were whole and with documents as long as its rows hold. Nothing is fitted to these runs.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_runs import RUNS, batches
from benchmarks.memory_tables import markdown
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.hardware import find_gpu
from fivefold.layout import Layout
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.step import predict

RESULTS = Path(__file__).parent / "results"


def table(results: Path) -> str:
    """Markdown: the runs of packed rows of a file of results."""
    found = json.loads(results.read_text())
    head = ("run", "measured", "predicted as whole rows", "tokens of a document", "predicted")
    return markdown([head, *_rows(found)])


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    gpu = find_gpu(found["hardware"]["gpu"])
    assert gpu is not None, found["hardware"]
    cluster = load_cluster(gpu.name, 1)
    rows = found["parts"]["runs"]["gpu_runs"]["rows"]
    measured = {row["model"]: row["measured"] for row in rows if row["quantity"] == "step time"}
    for name, seconds in measured.items():
        if name not in RUNS:
            continue
        model, settings = RUNS[name]
        layout = check(Config(model).with_values(precision="bf16", **settings), 1)
        if not layout.config.data.reset_attention_mask:
            continue
        length = document_length(layout)
        packed = check(layout.config.with_values(document_length=length), 1)
        whole, ours = (predict(each, cluster).step_time for each in (layout, packed))
        yield (
            name,
            f"{1e3 * seconds:.0f} ms",
            f"{1e3 * whole:.0f} ms, {whole / seconds - 1:+.1%}",
            f"{length}",
            f"{1e3 * ours:.0f} ms, {ours / seconds - 1:+.1%}",
        )


def document_length(layout: Layout) -> int:
    """Tokens of the document that a token of the benchmark's rows lies in, on average."""
    rows = [row for batch in batches(layout) for row in batch.documents_BS]
    lengths = np.concatenate([np.bincount(row) for row in rows])
    return round(float((lengths**2).sum() / lengths.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, help="file (default: the newest)")
    print(table(parser.parse_args().results or max(RESULTS.glob("gpu-2*.json"))))


if __name__ == "__main__":
    main()
