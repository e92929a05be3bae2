"""The verdict: what counts as wrong, and how it is told."""

import json
from dataclasses import replace
from math import inf

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.mesh.slices import piece_of
from fivefold.pipeline.split.stages import layout_string
from fivefold.tell.describe import parallelism
from fivefold.verify.compare import _number, _tensor
from fivefold.verify.report import (
    FLOORS,
    SCALARS,
    Difference,
    VerifyReport,
    errors_alone,
    errors_in,
    judge,
)
from tests.verify.cases import LLAMA, config, flags

LAYOUT = check(config(LLAMA, **flags(tp=2, pp=2, dp=2, strategy="optim", sequence=True)), 8)
NARROW = {
    name: check(replace(LAYOUT.config, training=replace(LAYOUT.config.training, precision=name)), 8)
    for name in ("fp32", "bf16", "fp16")
}
RIGHT = Difference("grad", 0, "norm.weight", (0, 4), 1, 1e-14, 1.0, 4.0, 4.0, 4.0, 1e-28)
WEIGHT = replace(RIGHT, what="param", digest="a")


def test_small_errors_pass() -> None:
    report = judge(LAYOUT, [RIGHT, WEIGHT], None)
    assert report.passed and report.max_rel_error["grad"] == 1e-14
    assert report.max_rel_error["loss"] is None
    assert "not reached" in report.text() and "PASSED" in report.text()


@pytest.mark.parametrize("error", [1.1e-12, float("nan"), float("inf")])
def test_large_errors_and_what_is_no_number_fail(error: float) -> None:
    report = judge(LAYOUT, [RIGHT, replace(RIGHT, name="bad", error=error)], None)
    assert not report.passed
    assert report.worst is not None and report.worst["name"] == "bad"
    found = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert found["passed"] is False and set(found) >= {"dtype", "layout", "max_rel_error", "worst"}


@settings(max_examples=200)
@given(
    what=st.sampled_from(("loss", "norm", "evaluation", "grad", "param")),
    wrong=st.sampled_from((float("nan"), float("inf"), -float("inf"), 1e200, -1e308)),
    at=st.integers(0, 3),
    narrow=st.booleans(),
)
def test_one_value_that_no_layout_computes_fails_every_verification(
    what: str, wrong: float, at: int, narrow: bool
) -> None:
    """What a missing wait or a lost message leaves behind: any bits."""
    true = torch.tensor([0.5, -0.25, 0.125, 1.0], dtype=torch.float64)
    own = true.clone()
    own[at] = wrong
    if what in SCALARS:
        off = _number(what, 0, 1, wrong, 0.5)
    else:
        off = _tensor(what, 0, 1, "norm.weight", piece_of(own), true, floor=0.01)
    right = [_tensor("grad", 0, 0, "other.weight", piece_of(true.clone()), true)]
    of_one = [*right, replace(off, error=0.0, own=off.true, off=0.0)]
    baseline = errors_in("bf16", of_one)
    report = judge(
        NARROW["bf16"] if narrow else LAYOUT, [*right, off], baseline if narrow else None
    )
    assert not report.passed
    json.dumps(report.as_json(), allow_nan=False)
    assert "FAILED" in report.text()


def test_a_number_is_called_by_its_name_and_a_tensor_by_its_own() -> None:
    wrong = replace(RIGHT, error=1.0)
    for what, said in (("loss", "loss in step"), ("grad", "gradient of bad in step")):
        text = judge(
            LAYOUT, [replace(wrong, what=what, name="bad" * (what == "grad"))], None
        ).text()
        assert f"worst      {said}" in text


def test_errors_are_relative_to_the_whole_tensor() -> None:
    assert judge(LAYOUT, [replace(RIGHT, error=1e-11, scale=100.0)], None).passed
    assert not judge(LAYOUT, [replace(RIGHT, error=1e-14, scale=0.0)], None).passed


def test_replicas_must_be_bitwise_equal() -> None:
    other = replace(WEIGHT, rank=0)
    assert judge(LAYOUT, [WEIGHT, other], None).passed
    assert judge(LAYOUT, [WEIGHT, replace(other, digest="b", part=(4, 8))], None).passed
    report = judge(LAYOUT, [WEIGHT, replace(other, digest="b")], None)
    assert not report.passed and report.diverged == ("norm.weight",)
    assert "replicas differ in norm.weight" in report.text()


def test_16_bits_are_judged_by_one_device_in_them() -> None:
    off = replace(RIGHT, error=0.02, off=4 * 0.02**2)
    baseline = dict.fromkeys(("loss", "grad", "norm", "param", "evaluation"), 0.0)
    assert not judge(NARROW["bf16"], [off], baseline | {"grad": 0.01}).passed
    assert judge(NARROW["bf16"], [off], baseline | {"grad": 0.02}).passed
    # One device may be right by chance: half a unit of the last place is granted, of these 16 bits.
    last = {name: replace(off, off=4 * (2 * ulp) ** 2) for name, ulp in FLOORS.items()}
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
        fits = {each: judge(NARROW[name], [last[each]], baseline).passed for each in (name, other)}
        assert fits == {name: False, other: name == "bf16"}
    lost = replace(off, off=inf, error=inf)
    assert not judge(NARROW["bf16"], [lost], baseline | {"grad": inf}).passed
    # every element counts once, however many ranks hold it
    assert _grad(judge(NARROW["bf16"], [off, replace(off, rank=3)], baseline)) == pytest.approx(
        0.02
    )


def test_fp32_is_granted_what_one_device_needs_in_it() -> None:
    off = [replace(RIGHT, error=error) for error in (1e-6, 2.9e-5)]
    for of_one, passes in ((1e-6, False), (1.9e-5, False), (2e-5, True), (inf, False)):
        report = judge(NARROW["fp32"], off, errors_in("fp32", [replace(RIGHT, error=of_one)]))
        assert report.passed == passes, of_one
        assert "limit: 1e-05, or 1.5 x the error of one device in fp32" in report.text()
    within = judge(NARROW["fp32"], [replace(RIGHT, error=9e-6)], errors_in("fp32", [RIGHT]))
    assert within.passed and not judge(NARROW["fp32"], off, None).passed


def test_a_small_gradient_that_is_wrong_fails_by_itself_in_bf16() -> None:
    """Of all elements together it is too little."""
    large = replace(RIGHT, name="large", part=(0, 10_000), true=1e4, own=1e4, off=1.0)
    small = replace(RIGHT, true=2.0, own=2.0, off=2e-4)
    alone = errors_alone([large, small])
    assert alone == {"large": 0.01, "norm.weight": pytest.approx(0.01)}
    baseline = errors_in("bf16", [large, small])
    for off, passes in ((2e-4 * 15**2, True), (2e-4 * 17**2, False), (float("nan"), False)):
        report = judge(NARROW["bf16"], [large, replace(small, off=off)], baseline, (), alone)
        assert report.passed is passes
        assert [name for name, *_ in report.strange] == ["norm.weight"] * (not passes)
    assert "by themselves: norm.weight (" in report.text()
    # What is zero up to rounding is not compared to zero.
    least = replace(small, true=1e-30, off=1e-14)
    assert errors_alone([large, least])["norm.weight"] < 1e-4


def _grad(report: VerifyReport) -> float | None:
    return report.max_rel_error["grad"]


def test_layouts_in_words() -> None:
    stages = layout_string(LAYOUT.split.stages)
    assert parallelism(LAYOUT) == (
        f"8 ranks: tp 2 + sequence, pp 2 (1f1b, {stages}), dp 2 (optim), 2 microbatches"
    )
