"""What runs teach of a machine, against machines whose constants are known."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path

import numpy as np
import pytest

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.errors import FivefoldError
from fivefold.layout import Layout
from fivefold.learn.constants import CONSTANTS, moved
from fivefold.learn.posterior import (
    NORMAL_80,
    Observation,
    Posterior,
    learned,
    log_seconds,
    without_runs,
)
from fivefold.learn.runs import noise_of
from fivefold.learn.tell import constants_table, gain, mean_error
from fivefold.predict.cluster import Cluster, preset
from fivefold.predict.cluster_file import load_cluster, to_toml

MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 2), (1, 8))


def layouts(model: str, ranks: int, batches: Sequence[int] = (16, 64)) -> list[Layout]:
    found = []
    for tp, pp in MESHES:
        for batch in batches:
            config = Config(resolve_model(model)).with_values(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                sequence_parallel=tp > 1,
                seq_length=2048,
                global_batch_size=batch,
                data_parallel_sharding_strategy="optim",
            )
            found.append(check(config, ranks, planned=True))
    return found


def measured(
    machine: Cluster, which: Sequence[Layout], noise: float, random: np.random.Generator
) -> list[Observation]:
    times = log_seconds(which, machine) + noise * random.normal(size=len(which))
    return [
        Observation(str(n), layout, exp(time), noise)
        for n, (layout, time) in enumerate(zip(which, times.tolist(), strict=True))
    ]


def test_of_no_run_nothing_is_learned() -> None:
    prior = preset("H100", 16)
    known = learned(prior, [])
    assert known.cluster == prior
    assert known.doubts.tolist() == pytest.approx([c.doubt(prior) for c in CONSTANTS])


@pytest.mark.parametrize("machines", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_runs_on_another_machine_tell_it_and_what_new_layouts_take(machines: int) -> None:
    """Six of twenty layouts are run; the others' times are then known within the interval."""
    random, prior, space = np.random.default_rng(0), preset("H100", 16), layouts("llama3-8b", 16)
    inside = before = after = count = 0.0
    for _ in range(machines):
        doubts = [constant.doubt(prior) for constant in CONSTANTS]
        machine = moved(prior, (random.normal(size=len(doubts)) * doubts).tolist())
        order = random.permutation(len(space)).tolist()
        runs = measured(machine, [space[i] for i in order[:6]], 0.01, random)
        known = learned(prior, runs)
        new = [space[i] for i in order[6:]]
        tests = measured(machine, new, 0.0, random)
        before += mean_error(tests, prior)
        after += mean_error(tests, known.cluster)
        off = np.abs(log_seconds(new, known.cluster) - log_seconds(new, machine))
        inside += float((off < NORMAL_80 * known.spread(new)).sum())
        count += len(new)
        assert mean_error(runs, known.cluster) < 0.03
        assert (known.doubts <= without_runs(prior).doubts + 1e-12).all()
    assert after < 0.5 * before
    assert inside / count > 0.8


@pytest.fixture(scope="module")
def known() -> Posterior:
    """A node's GPUs, all of whose constants are off, known by runs of every second layout."""
    prior, space = preset("H100", 8), layouts("llama3-8b", 8, (32,))
    machine = moved(prior, [0.2] * len(CONSTANTS))
    return learned(prior, measured(machine, space[::2], 0.01, np.random.default_rng(1)))


def test_what_runs_do_not_use_stays_in_doubt(known: Posterior) -> None:
    prior = known.prior
    for constant, doubt, shift in zip(CONSTANTS, known.doubts, known.shifts, strict=True):
        if "between nodes" in constant.name or constant.name == "copies to the host":
            assert doubt == pytest.approx(constant.doubt(prior))
            assert shift == pytest.approx(0.0, abs=1e-9)
    assert known.doubts[0] < CONSTANTS[0].doubt(prior)


def test_an_interval_of_a_share_ends_before_all_is_lost() -> None:
    """It is moved by its odds: 45 % are odds of 0.82, and 2.16 times those are 64 %."""
    known = without_runs(preset("H100", 8))
    place = [constant.name for constant in CONSTANTS].index("computation lost beside messages")
    shifts = known.shifts.copy()
    shifts[place] = 2.0
    found = replace(known, shifts=shifts, covariance=known.covariance * 0.75**2)
    (row,) = (line for line in constants_table(found) if line.startswith("computation lost"))
    assert row.split()[-5:] == ["45.09", "27.6", "to", "63.9", "%"]
    assert any("537 to 650" in line for line in constants_table(found))


def test_a_gain_is_that_of_the_learned_times(known: Posterior) -> None:
    space = layouts("llama3-8b", 8, (32,))
    times = dict(zip(space, log_seconds(space, known.cluster).tolist(), strict=True))
    slow, fast = max(space, key=times.__getitem__), min(space, key=times.__getitem__)
    share, sure = gain(known, slow, fast)
    assert share == pytest.approx(1 - exp(times[fast] - times[slow]))
    assert sure > 0.9 > 0.5 > 1 - sure
    assert gain(known, fast, fast) == (0.0, 0.0)


def test_a_learned_machine_can_be_written_whatever_was_learned(tmp_path: Path) -> None:
    for shift in (-20.0, 0.3, 20.0):
        machine = moved(preset("A100-80", 8), [shift] * len(CONSTANTS))
        file = tmp_path / "machine.toml"
        file.write_text(to_toml(machine))
        assert load_cluster(file) == machine


def test_noise_shrinks_with_more_steps() -> None:
    few, many = [1.0, 1.2, 0.9], [1.0, 1.2, 0.9] * 12
    assert noise_of([1.0]) > noise_of(few) > noise_of(many) >= 0.01
    assert noise_of([1.0] * 50) == 0.01


@pytest.mark.slow
def test_a_plan_from_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, learned_file = tmp_path / "run", tmp_path / "learned.toml"
    words = ["train", "debug", "--nproc", "2", "--train-iters", "4", "--save", str(run)]
    (tmp_path / "text.txt").write_text("\n".join(f"the number {n} of many" for n in range(3000)))
    words += ["--data-path", str(tmp_path / "text.txt")]
    assert main([*words, "--data-cache-path", str(tmp_path / "cache")]) == 0
    machine = tmp_path / "machine.toml"
    machine.write_text(
        'name = "cores"\nnum_gpus = 2\ngpus_per_node = 2\n'
        '[gpu]\nname = "cores"\nmemory_bytes = 8e9\nmemory_bandwidth = 1e10\nmultiprocessors = 1\n'
        "[gpu.peak]\nbf16 = 1e11\nfp32 = 1e11\n[gpu.matmul]\nbf16 = 1e11\nfp32 = 1e11\n"
        "[node_link]\nbandwidth = 1e9\nlatency = 1e-4\n"
        "[network_link]\nbandwidth = 1e9\nlatency = 1e-4\n"
    )
    capfd.readouterr()
    assert main(["plan", "--from", str(run)]) == 2
    assert "--calibrate machine.toml" in capfd.readouterr().err
    asked = ["plan", "--from", str(run), "--cluster", str(machine)]
    assert main([*asked, "--learned", str(learned_file)]) == 0
    told = capfd.readouterr().out
    assert "what the runs say" in told and str(run) in told
    assert load_cluster(learned_file).num_gpus == 2
    assert main([*asked, "--json"]) == 0
    assert '"learned"' in capfd.readouterr().out
    page = run / "report.html"
    assert main(["report", str(run)]) == 0 and "faster" not in page.read_text()
    assert main(["report", str(run), "--cluster", str(machine)]) == 0
    assert "faster" in page.read_text()
    assert main(["plan", "debug", "--learned", "x.toml"]) == 2
    assert main(["plan", "debug", "--from", str(tmp_path / "cache")]) == 2


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    from fivefold.learn.runs import observed

    with pytest.raises(FivefoldError, match="not a run folder"):
        observed(tmp_path)
