"""Reads published runs from a CSV file: the cells of a row, its model and its cluster.

benchmarks/data/README.md describes the columns. A cell such as "1 (2)" gives a value and an
alternative, of which the first counts; "n/a" and an empty cell mean not published.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from reprlib import repr as shortened
from types import MappingProxyType
from typing import Any

from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError, DataError, did_you_mean
from fivefold.files import read_text
from fivefold.hardware import GB, find_gpu
from fivefold.predict.cluster import MAX_GPUS, Cluster, preset
from fivefold.predict.cluster_file import Range

_RUN = ("src", "id", "cert", "gpu", "ngpu", "model")
_MODEL = ("L", "h", "ffn", "heads", "kv", "vocab", "E", "topk")
_LAYOUT = ("seq", "gbs", "mbs", "tp", "pp", "vpp", "cp", "ep", "dp", "zero", "sp", "recomp", "prec")
_MEASURED = ("tflops", "mfu", "tps_gpu", "step_s", "mem", "mem_unit", "flops_conv", "note")
COLUMNS = (*_RUN, *_MODEL, *_LAYOUT, *_MEASURED)
OPTIONAL = (
    "network",
    "gpus_per_node",
    "framework",
    "release",
    "attention",
    "grads",
    "graphs",
    "overlap",
    "fused_loss",
    "etp",
    "dispatcher",
    "ep_overlap",
)
"""Columns that a file may leave out, as if their cells were empty."""
_COUNT = Range(1, 1e6, whole=True)
RANGES: Mapping[str, Range] = MappingProxyType(
    {
        **dict.fromkeys(("ngpu", "dp"), Range(1, MAX_GPUS, whole=True)),
        **dict.fromkeys(("L", "vpp"), Range(1, 1e4, whole=True)),
        **dict.fromkeys(("h", "heads", "kv", "E", "topk", "mbs", "tp", "pp", "cp", "ep"), _COUNT),
        **dict.fromkeys(("ffn", "vocab", "seq", "gbs"), Range(1, 1e9, whole=True)),
        "sp": Range(0, 1, whole=True),
        "tflops": Range(1e-3, 1e6),
        "mfu": Range(1e-3, 100),
        "tps_gpu": Range(1e-3, 1e9),
        "step_s": Range(1e-6, 1e7),
        "network": Range(1e-3, 1e6),
        "gpus_per_node": Range(1, MAX_GPUS, whole=True),
        **dict.fromkeys(("overlap", "fused_loss", "ep_overlap"), Range(0, 1, whole=True)),
        "mem": Range(1e-3, 1e15),
    }
)
"""The range of the numbers in a column."""
NOT_PUBLISHED = "n/a"
OUT_OF_MEMORY = "oom"  # stands in the memory column of a run that failed
_CELL = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?\(.*\))?")
# As in "4x100 Gbit/s" and "8x50 GB/s", but not in "8x80GB", which is memory.
_LINKS = re.compile(
    r"\b(\d{1,2}) ?x ?(\d{2,4}) ?(?:[gG](?:[bB]it(?:/s|ps)?|b/s|bps)|([gG]B(?:/s|ps)))(?!\w)"
)
_PREDICTIONS = re.compile(r"\bmtp (\d{1,3})( repeated)?\b")
MOST_TOLD = 10  # most mistakes of a file that are listed


@dataclass(frozen=True)
class PublishedRow:
    """One published run: its cells by column, and its line in the file."""

    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell, in lower case; empty if it was not published."""
        given = self.cells.get(column, "").strip().lower()
        return "" if given == NOT_PUBLISHED else given

    def number(self, column: str) -> float | None:
        """The first number of a cell, or None."""
        found = _CELL.fullmatch(self.text(column))
        return float(found[1]) if found else None

    def whole(self, column: str) -> int | None:
        """The first number of a cell as an integer, or None."""
        number = self.number(column)
        return None if number is None else int(number)

    @property
    def source(self) -> str:
        """The name of the publication."""
        return self.cells["src"].strip()

    @property
    def name(self) -> str:
        """A description of the run for messages."""
        layout = " ".join(
            f"{axis}{self.cells[axis]}"
            for axis in ("tp", "pp", "cp", "ep", "mbs")
            if self.cells[axis]
        )
        return f"{self.cells['model']} on {self.cells['ngpu']} {self.cells['gpu']} {layout}"


def read_rows(path: Path) -> list[PublishedRow]:
    """The rows of a file.

    Raises:
        DataError: the file cannot be read, its columns are not those of `COLUMNS`, or a cell is not
            valid in its column.
    """
    text = read_text(path, DataError)
    if "\0" in text:
        raise DataError(f"{path} is no table: it has a zero byte in line {_line(text)}")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        _check_columns(path, names)
        lines = [(reader.line_num, cells) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise DataError(f"cannot read {path}:{reader.line_num}: {error}") from None
    wrong = list(islice(_wrong(names, lines), MOST_TOLD))
    if wrong:
        raise DataError(*(f"{path}:{problem}" for problem in wrong))
    return [
        PublishedRow(line, MappingProxyType(dict(zip(names, cells, strict=True))))
        for line, cells in lines
    ]


def _line(text: str) -> int:
    return text[: text.index("\0")].count("\n") + 1


def _check_columns(path: Path, names: Sequence[str]) -> None:
    if len(names) == 1 and (other := re.search("[;\t|]", names[0])):
        raise DataError(f"{path} has columns that {other[0]!r} separates, where commas must")
    missing = [name for name in COLUMNS if name not in names]
    twice = [name for name, times in Counter(names).items() if times > 1]
    others = [name for name in names if name not in (*COLUMNS, *OPTIONAL)]
    if missing:
        raise DataError(f"{path} has no column {', '.join(missing)}")
    if twice:
        raise DataError(f"{path} has the column {', '.join(map(repr, twice))} more than once")
    if others:
        close = did_you_mean(others[0], (*COLUMNS, *OPTIONAL))
        raise DataError(f"{path} has an unknown column {shortened(others[0])}{close}")


def _wrong(names: Sequence[str], lines: Sequence[tuple[int, list[str]]]) -> Iterator[str]:
    """Descriptions of lines of the wrong length, and of cells that are not valid numbers."""
    for line, cells in lines:
        if len(cells) != len(names):
            yield f"{line}: {len(cells)} cells, and there are {len(names)} columns"
            continue
        for name, cell in zip(names, cells, strict=True):
            if name in RANGES and not _holds(name, cell.strip().lower()):
                yield (
                    f"{line}: {name} must be {RANGES[name]}, empty or n/a, not {shortened(cell)}"
                )


def _holds(column: str, text: str) -> bool:
    """Whether a cell, in lower case, is valid in its column."""
    if text in ("", NOT_PUBLISHED) or (column == "mem" and text == OUT_OF_MEMORY):
        return True
    found, range_ = _CELL.fullmatch(text), RANGES[column]
    if found is None:
        return False
    number = float(found[1])
    return range_.holds(int(number) if range_.whole and number.is_integer() else number)


def model_of(row: PublishedRow, *, drops_scores: bool = False) -> ModelConfig:
    """The model of a row: the preset of its name, if the row's shape is that or has fewer layers,
    else a dense model of this shape.

    Args:
        row: row of a file.
        drops_scores: whether a GPT's attention has dropout of its own, as it had where scores were
            held in memory.

    Raises:
        DataError: the row has neither a shape nor a known name, or a shape with experts that no
            preset of that name has.
    """
    base = _preset(row.text("model"))
    layers, hidden, heads = row.whole("L"), row.whole("h"), row.whole("heads")
    differs = [] if base is None else _differing(row, base)
    if base is not None and not differs:
        dropout = base.attention_dropout if drops_scores else 0.0  # else inside the kernel
        vocab = row.whole("vocab") or base.vocab_size
        changed = replace(base, vocab_size=vocab, attention_dropout=dropout, **_further(row))
        return changed if layers in (None, base.num_layers) else _cut_down(changed, layers)
    if (row.whole("E") or 1) > 1 or (base is not None and base.num_experts):
        why = "; ".join(differs) or "no preset has this name"
        raise DataError(f"a model with experts must be a preset: {row.cells['model']!r}, {why}")
    if not (layers and hidden and heads):
        raise DataError(f"neither a shape nor a known model: {row.cells['model']!r}")
    return _from_shape(row, layers, hidden, heads, drops_scores=drops_scores)


def _further(row: PublishedRow) -> dict[str, Any]:
    """Multi-token predictions as the note gives them, for runs that differ from their preset."""
    given = _PREDICTIONS.search(row.text("note"))
    if given is None:
        return {}
    return {"mtp_num_layers": int(given[1]), "mtp_use_repeated_layer": given[2] is not None}


def _differing(row: PublishedRow, preset: ModelConfig) -> list[str]:
    """How a row's shape, apart from its layers, differs from its preset."""
    shape = {
        "h": (preset.hidden_size,),
        "heads": (preset.num_attention_heads,),
        "kv": (preset.num_kv_heads,),
        "ffn": (preset.ffn_size, preset.expert_ffn_size),
        "E": (preset.num_experts or 1,),
        "topk": (preset.moe_router_topk,) if preset.num_experts else (),
    }
    return [
        f"{column} {row.whole(column)} is not {' or '.join(map(str, dict.fromkeys(own)))}"
        for column, own in shape.items()
        if own and row.whole(column) not in (None, *own)
    ]


def _preset(name: str) -> ModelConfig | None:
    """The preset that a name such as "LLAMA3.1_405B" or "Qwen3-235B" means."""
    plain = re.sub(r"\(.*?\)|moe", "", name).replace("llama3.1", "llama3")
    key = re.sub(r"[^a-z0-9]", "", plain)
    known = {re.sub(r"[^a-z0-9]", "", preset): preset for preset in PRESETS}
    exact = known.get(key)
    if exact is None:
        longer = [preset for short, preset in known.items() if short.startswith(key)]
        exact = longer[0] if len(longer) == 1 else None
    return None if exact is None else PRESETS[exact]


def _cut_down(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with fewer layers; one layer stays dense if the first layers are dense."""
    changes: dict[str, Any] = {"num_layers": layers}
    if model.num_experts and not model.is_moe(0):
        changes |= {"moe_layer_freq": f"[0]*1+[1]*{layers - 1}", "mtp_num_layers": 0}
    return replace(model, **changes)


def _from_shape(
    row: PublishedRow, layers: int, hidden: int, heads: int, *, drops_scores: bool
) -> ModelConfig:
    """A dense model of this shape; other settings are chosen to match the size in its name."""
    name = row.text("model")
    gpt = "gpt" in name or re.search(r"\b(?:mt-nlg|mpt|opt|bloom)z?(?![a-z])", name)
    length = row.whole("seq") or 4096
    base = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=row.whole("kv"),
        ffn_hidden_size=row.whole("ffn"),
        vocab_size=row.whole("vocab") or 51200,
        max_position_embeddings=length,
    )
    old = replace(
        base,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        activation_func="gelu",
        gated_linear_unit=False,
        add_bias_linear=True,
        untie_embeddings_and_output_weights=False,
        hidden_dropout=0.1,
        attention_dropout=0.1 if drops_scores else 0.0,
    )
    wanted = re.search(r"(\d+(?:\.\d+)?)\s*b\b", name)
    if gpt:
        apart = replace(old, untie_embeddings_and_output_weights=True)
        far = wanted and count_parameters(old).total < 0.95e9 * float(wanted.group(1))
        return apart if far else old
    tied = replace(base, untie_embeddings_and_output_weights=False)
    if wanted is None:
        return base
    target = float(wanted.group(1)) * 1e9
    return min((base, tied), key=lambda model: abs(count_parameters(model).total - target))


def cluster_of(row: PublishedRow) -> Cluster:
    """The cluster of a row, by the planner's or the driver's name of the GPU, and its network.

    The network is the one in its column or note, by a node's links ("4x100 Gbit/s"), or else the
    usual one of machines with this GPU.

    Raises:
        ConfigError: the GPU is not known.
    """
    name = row.cells["gpu"].strip()
    try:
        cluster = preset(name, row.whole("ngpu"))
    except ConfigError:
        gpu = find_gpu(name)
        if gpu is None:
            raise
        cluster = preset(gpu.name, row.whole("ngpu"))
    own = row.whole("gpus_per_node")
    if own:
        cluster = replace(cluster, gpus_per_node=own)
    given = row.number("network")
    if given is None and (links := _LINKS.search(row.cells["note"])):
        given = int(links[1]) * int(links[2]) / (1 if links[3] else 8)
    if not given:
        return cluster
    link = replace(cluster.network_link, bandwidth=given * GB / cluster.gpus_per_node)
    return replace(cluster, network_link=link)
