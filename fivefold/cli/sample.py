"""`fivefold sample`: continue a prompt with a trained model."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.config.parallel import option
from fivefold.config.settings import argument
from fivefold.config.sources import load_options
from fivefold.errors import Mistakes
from fivefold.report.settings import run_config


@dataclass(frozen=True)
class Options:
    """Continue a prompt with the model of a run, on one device, whatever layout trained it."""

    run: str = argument("run folder of `fivefold train`")
    prompt: str = argument("text to continue", "")
    step: int | None = option(None, "step of the checkpoint (default: the latest)")
    max_tokens: int = option(100, "most tokens to generate")
    temperature: float = option(
        0.8, "temperature of the softmax: 0 always takes the most likely token"
    )
    top_k: int = option(50, "number of most likely tokens to draw from; 0: all")
    seed: int = option(0, "seed of the draws")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    _check(options)
    from fivefold.train.sample import sample

    texts = sample(
        Path(options.run),
        options.prompt,
        step=options.step,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    sys.stdout.write(options.prompt)
    for text in texts:
        sys.stdout.write(text)
        sys.stdout.flush()
    print()
    return 0


def _check(options: Options) -> None:
    """Check all that can be checked without loading torch."""
    mistakes = Mistakes()
    for name, value, least in (
        ("max_tokens", options.max_tokens, 1),
        ("temperature", options.temperature, 0),
        ("top_k", options.top_k, 0),
        ("seed", options.seed, 0),
    ):
        if value < least:
            mistakes.add(f"--{name.replace('_', '-')} must be at least {least}, not {value:g}")
    mistakes.raise_if_any()
    run_config(Path(options.run))
