import pytest
import torch
import torch.nn.functional as F

from fivefold.model import loss as losses_of_tokens
from fivefold.model.loss import LossRule, cross_entropy

PLAIN = LossRule(11)


def example(padded: int, dtype: torch.dtype = torch.float64):
    logits = 3 * torch.randn(6, padded, dtype=torch.float64)
    labels = torch.tensor([0, 10, -100, 3, 3, -100])
    weights = torch.rand(6, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), labels, weights


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("z", [0.0, 0.03])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_equals_pytorch_over_the_true_vocabulary(
    smoothing: float, weighted: bool, z: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses_of_tokens, "CAPPED_AT_A_TIME", 50)
    logits, labels, weights = example(16)
    given = weights if weighted else None
    ours = cross_entropy(logits, labels, LossRule(11, smoothing, z, cap), given)
    true = logits[:, :11] if cap is None else cap * torch.tanh(logits[:, :11] / cap)
    losses = F.cross_entropy(
        true, labels, reduction="none", label_smoothing=smoothing, ignore_index=-100
    )
    losses = losses + z * true.logsumexp(1).square() * (labels != -100)
    theirs = (losses * weights).sum() if weighted else losses.sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    upstream = torch.tensor(0.37, dtype=torch.float64)
    (got,) = torch.autograd.grad(ours, logits, upstream)
    (expected,) = torch.autograd.grad(theirs, logits, upstream)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    assert not got[:, 11:].any() and not got[2].any()


def test_the_part_that_is_z_loss_is_told() -> None:
    logits, labels, weights = example(16)
    told: list[torch.Tensor] = []
    with_z = cross_entropy(logits, labels, LossRule(11, 0.1, 0.03), weights, told)
    assert len(told) == 1 and not told[0].requires_grad
    without = cross_entropy(logits, labels, LossRule(11, 0.1), weights, told)
    torch.testing.assert_close(with_z - without, told[0])
    assert len(told) == 1


def test_gradcheck() -> None:
    logits, labels, weights = example(12)
    rule = LossRule(11, 0.05, 0.1)
    torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, rule, weights), (logits,))


def test_padding_has_no_probability() -> None:
    logits, labels, _ = example(16)
    loss = cross_entropy(logits, labels, PLAIN)
    with torch.no_grad():
        logits[:, 11:] = 1e4
    assert cross_entropy(logits, labels, PLAIN) == loss


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits, labels, _ = example(11, torch.bfloat16)
    loss = cross_entropy(logits, labels, PLAIN)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.float(), labels, reduction="sum"), rtol=1e-6, atol=0
    )
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]), LossRule(2))
    loss.backward()
    assert loss == 2e4 and torch.equal(logits.grad, torch.tensor([[1.0, -1.0]]))


def test_nothing_valid_is_zero() -> None:
    logits, _, _ = example(11)
    loss = cross_entropy(logits, torch.full((6,), -100), PLAIN)
    loss.backward()
    assert loss == 0.0 and not logits.grad.any()
