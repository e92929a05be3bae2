"""The verdict: what counts as wrong, and how it is told."""

import json
from dataclasses import replace

import pytest

from fivefold.check import check
from fivefold.pipeline.stages import layout_string
from fivefold.verify.report import Difference, VerifyReport, describe, judge
from tests.verify.cases import LLAMA, config, flags

LAYOUT = check(config(LLAMA, **flags(tp=2, pp=2, dp=2, strategy="optim", sequence=True)), 8)
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


def test_bf16_is_judged_by_one_device_in_bf16() -> None:
    off = replace(RIGHT, error=0.02, off=4 * 0.02**2)
    baseline = dict.fromkeys(("loss", "grad", "norm", "param", "evaluation"), 0.0)
    assert not judge(LAYOUT, [off], baseline | {"grad": 0.01}).passed
    assert judge(LAYOUT, [off], baseline | {"grad": 0.02}).passed
    # every element counts once, however many ranks hold it
    assert _grad(judge(LAYOUT, [off, replace(off, rank=3)], baseline)) == pytest.approx(0.02)


def _grad(report: VerifyReport) -> float | None:
    return report.max_rel_error["grad"]


def test_layouts_in_words() -> None:
    stages = layout_string(LAYOUT.split.stages)
    assert describe(LAYOUT) == (
        f"8 ranks: tp 2 + sequence, pp 2 (1f1b, {stages}), dp 2 (optim), 2 microbatches"
    )
