"""What is not a step of the run leaves no trace in it: steps that are not taken, evaluations,
comparisons of replicas, saves, rewinds and new starts; nor does an audit, of a step that is one."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.audit.measure import measured
from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import SETTINGS, Config
from fivefold.config.training import DYNAMIC_LOSS_SCALE
from fivefold.data.packing import Microbatch
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.mesh.slices import as_piece
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches, rows_of
from fivefold.verify.shrink import prepare
from tests.pool import run
from tests.verify.any_settings import ALL, draw
from tests.verify.cases import chosen, config, flags, shared_groups

pytestmark = pytest.mark.slow

STEPS, AUDITED = 3, 1
BETWEEN = 1000  # and above: batches of what is no step

# (ranks, model, settings): each kind of state that lives from one step into the next.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "weights gathered in the optimizer step": (
        2,
        "llama",
        flags(strategy="optim_grads") | {"overlap_param_gather_with_optimizer_step": True},
    ),
    "experts counted over the batch, with biases": (
        2,
        "mixture",
        {
            "moe_router_load_balancing_type": ("global_aux_loss",),
            "moe_aux_loss_coeff": (0.1,),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "num_layers": 2,
            "moe_layer_freq": "[0,1]",
        },
    ),
    "delayed scales of gathered 8 bits": (
        2,
        "llama",
        flags(strategy="optim_grads_params")
        | {"fp8_format": "hybrid", "fp8_amax_history_len": 4, "fp8_param_gather": True}
        | {"fp8_amax_compute_algo": "max", "num_layers": 2},
    ),
    "delayed scales of gathered 8 bits, moments rounded by numbers of steps": (
        2,
        "llama",
        flags(strategy="optim_grads_params")
        | {"fp8_format": "hybrid", "fp8_amax_history_len": 4, "fp8_param_gather": True}
        | {"fp8_amax_compute_algo": "max", "num_layers": 2, "precision": "bf16"}
        | {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    ),
    "weights and optimizer on the host": (
        2,
        "gpt",
        flags(strategy="optim_grads_params")
        | {"optimizer_cpu_offload": True, "param_cpu_offload": True},
    ),
    "weights gathered within a node": (
        4,
        "llama",
        flags(dp=4, strategy="optim_grads_params") | {"zero_hpz_partition_size": 2},
    ),
    "gradients in messages": (4, "gpt", flags(tp=2, dp=2, sequence=True)),
    "moments rounded to fewer bits, by numbers of steps": (
        2,
        "llama",
        flags(strategy="optim")
        | {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "precision": "bf16"}
        | {"num_layers": 2},
    ),
}
SEEDS = range(60)


def _batch(engine: Engine, number: int, *, spoilt: bool = False) -> list[Microbatch]:
    settings, grid = engine.layout.config, engine.layout.grid
    batch = global_batch(settings, number)
    if spoilt:
        batch = replace(batch, loss_weights_BS=np.full_like(batch.loss_weights_BS, np.nan))
    rows = rows_of(settings, grid.dp_rank(engine.groups.rank), grid.dp)
    return microbatches(settings, batch, rows)


class _Rank:
    """A rank of a run, and what can happen to it between two of its steps."""

    def __init__(self, layout: Layout, rank: int, root: Path) -> None:
        self._layout, self._rank, self._root = layout, rank, root
        self.engine = Engine(layout, rank, torch.device("cpu"))

    def step(self, *, audited: bool = False) -> str:
        """The numbers of a step; as text, since NaN is not NaN."""
        number = self.engine.steps
        audit = measured(self.engine, number + 1, self._root) if audited else nullcontext()
        with audit:
            return repr(self.engine.step(_batch(self.engine, number)))

    def end(self) -> dict[str, Any]:
        """All state, and a loss."""
        stored = self.engine.stored_tensors().items()
        bits = {name: as_piece(kept).local.clone() for name, kept in stored}
        return bits | {"evaluation": self.engine.evaluate([_batch(self.engine, BETWEEN)])}

    def not_finite(self) -> None:
        found = self.engine.step(_batch(self.engine, BETWEEN + 1, spoilt=True))
        assert not found.finite
        self.engine.optimizer.zero_grad()

    def spike(self) -> None:
        self.engine.step(_batch(self.engine, BETWEEN + 2), limit=1e-3)
        self.engine.optimizer.zero_grad()

    def evaluation(self) -> None:
        self.engine.evaluate([_batch(self.engine, BETWEEN + 3), _batch(self.engine, BETWEEN + 4)])

    def comparison(self) -> None:
        self.engine.local_loss(_batch(self.engine, BETWEEN + 5))
        self.engine.gradients(_batch(self.engine, BETWEEN + 5))
        self.engine.optimizer.zero_grad()

    def rewind(self) -> None:
        self._save()
        steps = self.engine.steps
        self.engine.step(_batch(self.engine, BETWEEN + 6))
        self._load(steps)

    def new_start(self) -> None:
        self._save()
        steps = self.engine.steps
        self.engine = Engine(self._layout, self._rank, torch.device("cpu"), initialises=False)
        self._load(steps)

    def _save(self) -> None:
        tensors = self.engine.written_tensors()
        Checkpointer(self._root / str(self.engine.steps)).save(self.engine.steps, tensors, {})

    def _load(self, steps: int) -> None:
        tensors = self.engine.stored_tensors()
        Checkpointer(self._root / str(steps)).load(steps, tensors)
        self.engine.after_load(steps, tensors)


HAPPENINGS: tuple[Callable[[_Rank], None], ...] = (
    *(_Rank.not_finite, _Rank.spike, _Rank.evaluation, _Rank.comparison),
    *(_Rank.rewind, _Rank.new_start),
)


@shared_groups()
def _traces(rank: int, world: int, settings: Config, root: Path, seed: int) -> list[str]:
    """What a disturbed run has that one which only trains has not."""
    layout, random = check(settings, world), Random(seed)
    undisturbed, run = (_Rank(layout, rank, root) for _ in range(2))
    order = random.sample(HAPPENINGS, len(HAPPENINGS))
    found = []
    for step in range(STEPS):
        for happen in order[step::STEPS]:
            happen(run)
        expected, told = undisturbed.step(), run.step(audited=step == AUDITED)
        if told != expected:
            found.append(f"step {step}: {told}, not {expected}")
    mine, theirs = run.end(), undisturbed.end()
    found += [name for name, kept in mine.items() if not _is_same(kept, theirs[name])]
    return [f"after {[happen.__name__ for happen in order]}:", *found] if found else []


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _leaves_none(world: int, asked: Config, root: Path, seed: int, shown: str) -> None:
    layout, _ = prepare(check(asked, world))
    assert not any(found := run(world, _traces, layout.config, root, seed)), (shown, found)


@pytest.mark.parametrize("case", chosen(CASES, *[*CASES][1:4:2]))
def test_what_is_no_step_leaves_no_trace(case: str, tmp_path: Path) -> None:
    world, family, settings = CASES[case]
    _leaves_none(world, config(ALL[family], world, **settings), tmp_path, 0, case)


@pytest.mark.parametrize("seed", chosen(SEEDS))
def test_whatever_goes_together_leaves_no_trace(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    name, world = random.choice(sorted(ALL)), random.choice((1, 2, 2, 4))
    precision = random.choice(("fp64", "bf16"))

    def asked(drawn: dict[str, Any]) -> Config:
        kept: dict[str, Any] = {"check_for_nan_in_loss_and_grad": True}
        if drawn.get("precision") == "fp16":  # what overflows shall lower a scale found by trial
            kept |= {name: SETTINGS[name].default for name in DYNAMIC_LOSS_SCALE} | {
                "loss_scale": 64.0
            }
        return config(ALL[name], **{"precision": precision} | drawn | kept)

    settings = draw(random, lambda drawn: check(asked(drawn), world))
    try:
        _leaves_none(world, asked(settings), tmp_path, seed, f"{name} on {world}: {settings}")
    except ConfigError as refused:
        assert "a last bit of fp32 decides" in str(refused), settings
