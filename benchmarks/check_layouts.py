"""Hold the layout language against Megatron-LM's own parser.

    pip install --no-deps megatron-core   # and what it imports
    python -m benchmarks.check_layouts --texts 100000 --record

Random texts are read by both: what Megatron-LM accepts must mean the same here. `--record` keeps
some of them, with Megatron-LM's meaning, for tests/pipeline/test_layout_texts.py.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from fivefold.errors import ConfigError
from fivefold.files import write_atomic
from fivefold.pipeline.split.layout import SplitSettings
from fivefold.pipeline.split.layout_language import MAX_SYMBOLS, parse

RECORD = Path(__file__).parents[1] / "tests" / "pipeline" / "megatron_layouts.json"
KEPT = 300  # of the accepted texts, and of the refused ones
_NAMED = ("E*0tL", "Et*1,2L", "E(tt|)*2*3L", "((t)*0|)*0", "E(t*2|)*3L", "t*1*2", "v*0:*0EtL")


def texts(rng: random.Random, number: int) -> Iterator[str]:
    """Soups of characters, texts that a grammar makes, and these with a few mistakes."""
    yield from _NAMED
    for turn in range(number):
        if turn % 4 == 0:
            yield "".join(rng.choices("EtmL|*(),0123 \n:v\u0663x", k=rng.randint(0, 12)))
            continue
        text = ("E" if turn % 3 else "") + _some(rng, 2) + ("L" if turn % 5 else "")
        if turn % 4 == 1:
            for _ in range(rng.randint(1, 2)):
                at = rng.randint(0, len(text))
                text = text[:at] + rng.choice("EtmL|*(),0123 ") + text[at + rng.randint(0, 1) :]
        yield text


def _some(rng: random.Random, depth: int) -> str:
    parts = []
    for _ in range(rng.randint(0, 4)):
        part = rng.choice("tttt||m,")
        if depth and rng.random() < 0.4:
            part = f"({_some(rng, depth - 1)})"
        while rng.random() < 0.4:
            part += f"*{rng.choice(('0', '1', '2', '3', '02', '1,2', '12'))}"
        parts.append(part)
    return "".join(parts)


def by_megatron(text: str) -> str | None:
    """Its meaning, written out; None if it refuses."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout as Theirs,
    )

    chars = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    try:
        stages = Theirs.parse_str_to_list(text)
    except (AssertionError, ValueError, OverflowError, MemoryError):
        return None
    return "|".join("".join(chars[layer.name] for layer in stage) for stage in stages)


def by_fivefold(text: str) -> str | None:
    """The same here."""
    try:
        return "".join(symbol.char for symbol in parse(text).symbols)
    except ConfigError:
        return None


def same_stages(text: str, meaning: str, pp: int) -> bool:
    """Whether both make the same stages of an accepted text on so many ranks.

    The embedding and the head are where its `GPTModel` makes them, on the first and the last stage:
    its layout is not asked for them.
    """
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout as Theirs,
    )

    layers, mtp = meaning.count("t"), meaning.count("m")
    try:
        theirs = Theirs(text, pp)
        theirs.validate_layer_layout(layers, mtp)
    except (AssertionError, IndexError):
        return True  # places of m that it lacks are refused there only
    split = SplitSettings(layers, pp, layout=text, mtp_num_layers=mtp).split()
    held = [
        [[layer.name for layer in stage if layer.name in ("decoder", "mtp")] for stage in rank]
        for rank in theirs.layout
    ]
    return held == [
        [
            ["decoder"] * len(stage.layers) + ["mtp"] * stage.mtp
            for stage in map(split.stages.__getitem__, split.stages_of(rank))
        ]
        for rank in range(pp)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=20_000, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    read: dict[str, str | None] = {}
    for text in texts(rng, options.texts):
        if re.search(r"\d{6}|\*\(+\d", text.replace(",", "")):
            continue  # a number, or one that repeats make, that would fill the memory there
        meaning = by_megatron(text)
        if meaning is not None and len(meaning) > MAX_SYMBOLS:
            continue  # too long here
        if meaning is not None and by_fivefold(text) != meaning:
            raise SystemExit(f"{text!r} is {meaning!r} there and {by_fivefold(text)!r} here")
        if meaning and "t" in meaning and not same_stages(text, meaning, rng.choice((1, 2, 3))):
            raise SystemExit(f"{text!r} makes other stages")
        read[text] = meaning
    accepted = {text for text, meaning in read.items() if meaning is not None}
    refused = read.keys() - accepted
    more = sum(by_fivefold(text) is not None for text in refused)
    release = f"megatron-core {version('megatron-core')}"
    print(
        f"{release}: of {len(read)} texts it accepts {len(accepted)}, each with the same meaning "
        f"here; of those that it refuses, {more} mean something here"
    )
    if options.record:
        kept = {
            text: read[text]
            for group in (accepted, refused)
            for text in [
                *(name for name in _NAMED if name in group),
                *sorted(sorted(group), key=lambda t: (len(t) > 24, rng.random()))[:KEPT],
            ]
        }
        text = json.dumps({"release": release, "meanings": kept}, indent=1)
        write_atomic(RECORD, text + "\n")


if __name__ == "__main__":
    main()
