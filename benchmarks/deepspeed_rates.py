"""Rates of drawn schedulers of DeepSpeed beside those of their translations, step by step.

    PYTHONPATH=. .venv-peers/bin/python -m benchmarks.deepspeed_rates [SEED]

Needs DeepSpeed (the environment of `benchmarks/peers.py`). What a translation says of a warm-up or
of the first step is not compared, and what follows is.
"""

import random
import sys
from math import isclose
from typing import Any

import torch

from fivefold.config.deepspeed_job.file import DeepSpeedJob
from fivefold.config.deepspeed_job.settings import translate
from fivefold.config.sources import read_config
from fivefold.optim.schedule import learning_rate

STEPS, FILES = 60, 400
NAMED = ("warm-up", "first step", "within its decay")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "warmup_num_steps": (1, 2, 3, 10),
    "warmup_type": ("linear", "linear", "log"),
    "last_batch_iteration": (-1, 0, 1, 4, 12),
}
_RATES: dict[str, tuple[Any, ...]] = {
    "warmup_min_lr": (0.0, 1e-5),
    "warmup_max_lr": (1e-3, 3e-3),
}
_SHARES: dict[str, tuple[Any, ...]] = {"warmup_min_ratio": (0.0, 0.1), "cos_min_ratio": (0.0, 0.1)}


def drawn(draw: random.Random) -> dict[str, Any]:
    """The optimizer and the scheduler of a file."""
    kind = draw.choice(("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
    choices = _CHOICES | (_SHARES if kind == "WarmupCosineLR" else _RATES)
    params = {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.7}
    params.setdefault("warmup_num_steps", 5)
    if kind != "WarmupLR":
        params["total_num_steps"] = draw.choice((30, 50))
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": draw.choice((1e-3, 2e-3))}},
        "scheduler": {"type": kind, "params": params},
    }


def theirs(file: dict[str, Any]) -> list[float]:
    """The rate of each step under DeepSpeed."""
    from deepspeed.runtime import lr_schedules

    weights = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.AdamW(weights, **file["optimizer"]["params"])
    kind, params = file["scheduler"].values()
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


def main(seed: int) -> None:
    """Compare; raise AssertionError with the first file whose rates differ without a word."""
    draw, named = random.Random(seed), 0
    for _ in range(FILES):
        file = drawn(draw)
        found = translate(DeepSpeedJob(file))
        config = read_config(model="debug-llama", **found.values)
        ours = [learning_rate(n, config.optimizer, config.training) for n in range(STEPS)]
        said = " ".join(found.lost)
        told = any(name in said for name in NAMED)
        warm = max(2, file["scheduler"]["params"]["warmup_num_steps"]) + 2
        first = STEPS if NAMED[-1] in said else warm if told else 0
        named += told
        pairs = zip(ours[first:], theirs(file)[first:], strict=True)
        assert all(isclose(*pair, rel_tol=1e-9, abs_tol=1e-15) for pair in pairs), file
    print(
        f"{FILES} schedulers: the same rates in {FILES - named}, what differs is named in {named}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
