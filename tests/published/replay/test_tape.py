"""What a forward keeps and a backward frees, beside autograd itself where it can be asked."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.published.replay.allocator import Allocator
from fivefold.published.replay.tape import Op, Tape, again, saved_by
from fivefold.published.torchtitan import Torchtitan

KIB = 2.0**10
# y = x + W2 (gate * W1 x), each multiplication of another size
OPS = [
    Op("inner", 4 * KIB, ("x",), ("x",), weight=8 * KIB),
    Op("gated", 2 * KIB, ("inner",), ("inner",)),
    Op("outer", 1 * KIB, ("gated",), ("gated",), weight=16 * KIB),
    Op("y", 1 * KIB, ("x", "outer"), passes=True),
]
SIZES = {"x": 1 * KIB}


def tape(lead: int = 0) -> Tape:
    made = Tape(Allocator(), lead)
    made.allocator.allocate("in", SIZES["x"])
    return made


def backward(run: Tape, kept: frozenset[str]) -> list[float]:
    """Sizes of the gradients of weights."""
    ends = {"x": "in", "y": "out"}
    run.seed("out", 1 * KIB)
    run.allocator.release("out")
    weights = run.backward("m", OPS, kept, ends, SIZES)
    run.drop_gradient("in")
    before = [run.allocator.allocated]
    for name in weights:
        run.allocator.release(name)
        before.append(run.allocator.allocated)
    return [a - b for a, b in pairwise(before)]


@pytest.mark.parametrize("kept", [saved_by(OPS), frozenset({"x"}), frozenset({"x", "gated"})])
def test_a_forward_holds_what_is_kept_and_a_backward_leaves_the_gradients_of_weights(
    kept: frozenset[str],
) -> None:
    run = tape()
    run.forward("m", OPS, kept, {"x": "in", "y": "out"})
    sizes = {op.out: op.size for op in OPS} | SIZES
    assert run.allocator.allocated == sum(sizes[name] for name in kept) + sizes["y"]
    assert backward(run, kept) == [16 * KIB, 8 * KIB]
    assert run.allocator.allocated == 0


def test_only_what_the_kept_tensors_cannot_give_is_run_again() -> None:
    assert [op.out for op in again(OPS, frozenset({"x"}))] == ["inner", "gated"]
    assert [op.out for op in again(OPS, frozenset({"x", "gated"}))] == ["inner"]
    assert again(OPS, saved_by(OPS)) == []


def test_buffers_of_collectives_wait_until_the_host_learns_that_they_are_free() -> None:
    sent = [Op("y", 1 * KIB, ("x",), buffer=4 * KIB)]
    held = []
    for lead in (0, 2):
        run = tape(lead)
        for number in range(3):
            run.forward(number, sent, frozenset({"x"}), {"x": "in"})
        held.append(run.allocator.allocated)
    assert held == [4 * KIB, 12 * KIB]


def test_a_gradient_made_in_the_place_of_a_saved_tensor_needs_no_other() -> None:
    run = tape()
    loss = [Op("y", 8 * KIB, ("x",), ("y",), recycles=True)]
    run.forward("m", loss, saved_by(loss), {"x": "in"})
    run.allocator.allocate("in", SIZES["x"])
    before = run.allocator.most_allocated
    run.seed(("m", "y"), 512)
    run.backward("m", loss, saved_by(loss), {"x": "in"}, SIZES)
    assert run.allocator.most_allocated <= before + 512
    run.drop_gradient("in")
    assert run.allocator.allocated == SIZES["x"]


class _Products(TorchDispatchMode):
    """Counts multiplications of matrices, by the width of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.found[result.shape[1]] += 1
        return result


def test_of_a_layer_with_operations_selected_pytorch_runs_the_same_products_again() -> None:
    """Every second one from the first on is kept; here projections of distinct widths say which."""
    widths = {"q": 8, "k": 4, "v": 6, "o": 16, "gate": 24, "up": 20, "down": 16}
    linears = {name: nn.Linear(16, width, bias=False) for name, width in widths.items()}

    def layer(x):
        q, k, v = (linears[name](x) for name in "qkv")
        mixed = torch.cat([q, k, v], -1)[:, :16].sin()
        middle = x + linears["o"](mixed)
        inner = linears["gate"](middle.sin())[:, :16] * linears["up"](middle.sin())[:, :16].sin()
        return middle + linears["down"](inner)

    count = Counter()

    def policy(context, func, *args, **kwargs):
        if func is not torch.ops.aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        count[context.is_recompute] += 1
        odd = count[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(3, 16, requires_grad=True)
    y = checkpoint(
        layer,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    with _Products() as products:
        y.sum().backward()
    # Gradients are 16 wide, seven of inputs and seven of weights, and so is what o gives.
    assert products.found == {4: 1, 20: 1, 16: 7 + 7 + 1}

    config = Config(PRESETS["llama3-8b"]).with_values(
        seq_length=8192,
        global_batch_size=8,
        micro_batch_size=1,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    run = Torchtitan(check(config, 8, planned=True), 0, selects=True)
    repeated = [op.out for op in again(run.layer, run.kept) if op.is_matmul]
    assert repeated == ["k", "o", "up"]
    assert "down" not in run.kept
    split = config.with_values(tensor_model_parallel_size=2, sequence_parallel=True)
    run = Torchtitan(check(split, 8, planned=True), 0, selects=True)
    assert [op.out for op in again(run.layer, run.kept) if op.is_matmul] == ["k", "up"]
