"""Blocks cover exactly what is seen, and every kernel computes them as the definition says."""

import random
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import free_symbols

from fivefold.model.attention import cuda_kernels, kernels
from fivefold.model.attention import grouped_query as attention
from fivefold.model.attention.blocks import Block, Sight, Span, Visibility, common, cut, joined
from fivefold.model.attention.blockwise import local_attention
from fivefold.model.attention.cuda_kernels import Differentiated, Flex, OwnOnCuda, _seen
from fivefold.model.attention.grouped_query import Scope
from fivefold.model.attention.kernels import (
    KERNELS,
    BlockKernel,
    Plain,
    choose_kernel,
    kernel_of,
    visible,
)
from fivefold.model.attention.scores import USUAL, Scores
from fivefold.model.batch import Documents
from fivefold.model.dropout import Dropout, PairDropout
from fivefold.verify.plain_logits import largest_logits
from tests.kernels import DEVICES, run_kernels
from tests.model.plain_attention import plain_attention
from tests.verify.cases import chosen


def seen_by_definition(sight: Sight, query: int, key: int) -> bool:
    document = [sum(start <= x for start in sight.starts) for x in (query, key)]
    near = sight.window is None or query - key <= sight.window
    return document[0] == document[1] and key <= query and near


def random_sight(rng: random.Random, length: int) -> Sight:
    inner = rng.sample(range(1, length), rng.randint(0, min(4, length - 1)))
    return Sight((0, *sorted(inner), length), rng.choice([None, rng.randint(1, length)]))


def random_spans(rng: random.Random, length: int) -> tuple[list[Span], list[Span]]:
    """A row cut into chunks: some are the queries', some the keys'."""
    edges = sorted({0, length, *rng.sample(range(1, length), rng.randint(0, min(5, length - 1)))})
    chunks = list(pairwise(edges))
    return [c for c in chunks if rng.random() < 0.6], [c for c in chunks if rng.random() < 0.6]


@pytest.mark.parametrize("seed", range(300))
def test_blocks_hold_each_visible_pair_once_and_no_other(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(2, 24)
    sight = random_sight(rng, length)
    queries, keys = random_spans(rng, length)
    q_at = [p for start, stop in queries for p in range(start, stop)]
    k_at = [p for start, stop in keys for p in range(start, stop)]
    found = []
    for block in cut(queries, keys, sight, tile=rng.choice([1, 2, 3, 8, 64])):
        shape = block.q[1] - block.q[0], block.k[1] - block.k[0]
        seen = visible(block, torch.device("cpu"))
        seen = torch.ones(shape, dtype=torch.bool) if seen is None else seen
        assert seen.shape == shape and seen.any(1).all(), "a query that sees no key has no output"
        assert block.kind != Visibility.CAUSAL or shape[0] == shape[1]
        found += [(block.q[0] + i, block.k[0] + j) for i, j in seen.nonzero().tolist()]
    expected = [
        (i, j)
        for i, query in enumerate(q_at)
        for j, key in enumerate(k_at)
        if seen_by_definition(sight, query, key)
    ]
    assert sorted(found) == expected


@pytest.mark.parametrize("seed", range(100))
def test_area_counts_visible_pairs_and_seen_are_their_keys(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(2, 24)
    sight = random_sight(rng, length)
    queries, keys = random_spans(rng, length)
    pairs = [
        (query, key)
        for start, stop in queries
        for query in range(start, stop)
        for key in range(length)
        if seen_by_definition(sight, query, key)
    ]
    assert sum(sight.area(span) for span in queries) == len(pairs)
    seen = sight.seen(queries)
    assert seen == joined((key, key + 1) for _, key in pairs)
    held = {key for start, stop in common(keys, seen) for key in range(start, stop)}
    assert held == {k for start, stop in keys for k in range(start, stop)} & {k for _, k in pairs}


def test_full_blocks_side_by_side_are_one() -> None:
    """What a zigzag rank computes per ring step is one call: 2 chunks with 1, or 1 with 2."""
    sight = Sight((0, 16))
    mine = ((4, 8), (8, 12))
    early = cut(mine, ((0, 4), (12, 16)), sight)
    assert [(b.q, b.k, b.kind) for b in early] == [((0, 8), (0, 4), Visibility.FULL)]
    late = cut(((0, 4), (12, 16)), mine, sight)
    assert [(b.q, b.k, b.kind) for b in late] == [((4, 8), (0, 8), Visibility.FULL)]


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]


BLOCKS = cut(((0, 300),), ((0, 300),), Sight((0, 100, 300), 90), tile=150)
"""Of every kind."""
SMALL = cut(((0, 100),), ((0, 100),), Sight((0, 30, 100), 25), tile=50)
"""Of every kind, and of several tiles of a kernel."""


def compare(
    kernel: BlockKernel,
    inputs: list[torch.Tensor],
    tolerance: float,
    blocks: tuple[Block, ...] = BLOCKS,
    drop: PairDropout | None = None,
    scores: Scores = USUAL,
) -> None:
    """Outputs and gradients of blocks against the plain kernel's in fp64."""
    for block in blocks:
        rows, keys = slice(*block.q), slice(*block.k)
        q, k, v, grad = (
            x[:, :, span] for x, span in zip(inputs, (rows, keys, keys, rows), strict=True)
        )
        wide = [x.double() for x in (q, k, v, grad)]
        out, lse = Plain(drop, scores).forward(*wide[:3], block)
        found = [x.double() for x in kernel.forward(q, k, v, block)]
        torch.testing.assert_close(found, [out, lse], rtol=tolerance, atol=tolerance)
        out, lse = out + 0.1, lse + 0.7  # as over more keys than these
        expected = Plain(drop, scores).backward(wide[3], *wide[:3], out, lse, block)
        narrow = out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))
        grads = kernel.backward(grad, q, k, v, *narrow, block)
        torch.testing.assert_close(
            [x.double() for x in grads], list(expected), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("shared", [1, 2, 8])
def test_the_kernel_for_cpus_equals_the_plain_one(shared: int) -> None:
    shapes = (2, 8, 300, 6), *[(2, 8 // shared, 300, 6)] * 2, (2, 8, 300, 6)
    for scale in (None, 0.7):
        compare(kernel_of("flash_cpu", scale), tensors(*shapes), 1e-12, scores=Scores(scale))


@pytest.mark.parametrize("shared", [1, 2, 8])
def test_the_backward_of_a_kernel_that_autograd_differentiates(shared: int) -> None:
    """With output and log-sum-exp from outside, through the block's own."""
    shapes = (2, 8, 300, 6), *[(2, 8 // shared, 300, 6)] * 2, (2, 8, 300, 6)
    compare(Differentiated(Plain().forward), tensors(*shapes), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-12),
        pytest.param(torch.float32, 1e-5, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_plain_kernel(dtype: torch.dtype, tolerance: float) -> None:
    """Not compiled; on CPUs it has no backward."""
    q, k, v = tensors((2, 4, 100, 6), *[(2, 2, 100, 6)] * 2, dtype=dtype)
    for block in SMALL:
        inputs = [x[:, :, slice(*at)] for x, at in ((q, block.q), (k, block.k), (v, block.k))]
        for scale in (None, 0.7):
            found = Flex(scale, compiled=False)(*inputs, block)
            expected = Plain(None, Scores(scale)).forward(*inputs, block)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 0.7])
def test_flex_attention_is_compiled_for_numbers(
    scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for symbols, of which Inductor makes no kernel; lengths alone are symbols."""
    numbers: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        values = (node.meta.get("example_value") for node in module.graph.nodes)
        numbers.extend(x for x in values if isinstance(x, torch.SymFloat) and free_symbols(x))
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    q, k, v = tensors((1, 2, 128, 16), *[(1, 2, 128, 16)] * 2, dtype=torch.float32)
    block = Block((0, 128), (0, 128), Visibility.FULL)
    found, expected = (
        Flex(scale)(q, k, v, block),
        Plain(None, Scores(scale)).forward(q, k, v, block),
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not numbers


def dropping(device: str, rows: int = 2, fused: bool = True) -> PairDropout:
    """Of heads from the third of 11 on; no two tokens have the same name."""
    ids = torch.arange(rows * 512, device=device).view(rows, 512) + (1 << 40)
    made = Dropout(3, 1, ids.flatten(), ids.flatten(), ids, fused)
    return PairDropout(made.heads(0.3, "site", 2, 11), ids, ids)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "shared", "features", "values"),
    [
        (torch.float64, 1e-12, 1, 6, 6),
        *[
            pytest.param(*kind, *shape, marks=pytest.mark.exhaustive)
            for kind, shape in (
                ((torch.float64, 1e-12), (2, 64, 24)),
                ((torch.float64, 1e-12), (4, 20, 40)),
                ((torch.float32, 1e-5), (4, 20, 40)),
            )
        ],
        (torch.float16, 4e-3, 2, 64, 24),
        # Not multiplied when interpreted:
        pytest.param(torch.bfloat16, 3e-2, 2, 64, 24, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_the_kernel_that_drops_equals_the_plain_one(
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    shared: int,
    features: int,
    values: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where, heads = run_kernels(device, monkeypatch, cuda_kernels), max(2, shared)
    keys = heads // shared
    shapes = (2, heads, 100, features), (2, keys, 100, features), (2, keys, 100, values)
    inputs = [x.to(where, dtype) for x in tensors(*shapes, (2, heads, 100, values))]
    drop = dropping(where)
    kernel = choose_kernel(inputs[0], inputs[2], drop)
    assert isinstance(kernel, OwnOnCuda)
    assert isinstance(choose_kernel(inputs[0], inputs[2], dropping(where, fused=False)), Plain)
    assert {block.kind for block in SMALL} == {*Visibility}
    compare(kernel, inputs, tolerance, SMALL, drop)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "dropped"),
    [
        pytest.param(torch.float64, 1e-12, False, marks=pytest.mark.exhaustive),
        (torch.float64, 1e-12, True),
        (torch.float16, 4e-3, False),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_the_kernel_that_caps_equals_the_plain_one(
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    dropped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where, scores = run_kernels(device, monkeypatch, cuda_kernels), Scores(0.7, 1.3)
    shapes = (2, 2, 60, 6), (2, 1, 60, 6), (2, 1, 60, 8), (2, 2, 60, 8)
    inputs = [x.to(where, dtype) for x in tensors(*shapes)]
    drop = dropping(where) if dropped else None
    kernel = choose_kernel(inputs[0], inputs[2], drop, scores)
    assert isinstance(kernel, OwnOnCuda)
    blocks = cut(((0, 60),), ((0, 60),), Sight((0, 20, 60), 15), tile=30)
    assert {block.kind for block in blocks} == {*Visibility}
    compare(kernel, inputs, tolerance, blocks, drop, scores)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    chosen(
        [*product((False, True), (None, 5), (False, True))],
        *((False, None, True), (False, 5, False), (True, None, False), (True, 5, True)),
    ),
    ids=str,
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_one_call_attends_drops_and_caps(
    device: str, case: tuple[bool, int | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, window, sinks = case
    where = run_kernels(device, monkeypatch, cuda_kernels)
    shapes = (2, 40, 2, 6), (2, 40, 1, 6), (2, 40, 1, 8), (2,), (2, 40, 2, 8)
    *inputs, grad = (x.to(where).requires_grad_() for x in tensors(*shapes))
    documents = Documents((0, 27, 28, 40, 79, 80), 2, grad.device) if packed else None
    scores = Scores(0.7 if packed else None, 0.9 if window or sinks else None)
    scope = Scope(documents, window, None, inputs[3] if sinks else None, scores)
    names = torch.arange(100, 180, device=where).view(2, 40)
    drop = Dropout(3, 1, names.flatten(), names.flatten(), names, True).heads(0.3, "site", 2, 7)
    drop = None if window and sinks else drop
    expected = plain_attention(*inputs[:3], scope, drop)
    monkeypatch.setattr(attention, "local_attention", None)
    found = attention.attention(*inputs[:3], scope, drop)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of = inputs if sinks else inputs[:3]
    grads = [torch.autograd.grad(out, of, grad) for out in (expected, found)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_kernels_note_the_largest_score_of_each_head(
    device: str, ours: bool, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = run_kernels(device, monkeypatch, cuda_kernels) if ours else device
    q, k, v = (x.to(where) for x in tensors((2, 40, 4, 6), (2, 40, 2, 6), (2, 40, 2, 8)))
    largest = torch.full((4,), float("-inf"), dtype=torch.float64, device=where)
    documents = None if sliced else Documents((0, 27, 28, 40, 79, 80), 2, q.device)
    scope = Scope(documents, 5, scores=Scores(0.7, largest=largest))
    expected = largest_logits(q, k, scope)
    for rows in (slice(20), slice(20, 40)) if sliced else (slice(40),):
        keys = slice(rows.stop)
        attention.attention(q[:, rows], k[:, keys], v[:, keys], scope, None)
    torch.testing.assert_close(largest, expected, rtol=1e-14, atol=0)


ON_CUDA = [("cudnn", torch.bfloat16), ("flash_cuda", torch.bfloat16), ("flex", torch.float32)]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), ON_CUDA)
@pytest.mark.parametrize("shared", [1, 2, 8])
def test_kernels_for_cuda_equal_the_plain_one(name: str, dtype: torch.dtype, shared: int) -> None:
    shapes = (2, 8, 512, 64), *[(2, 8 // shared, 512, 64)] * 2, (2, 8, 512, 64)
    q, k, v, grad = (x.to("cuda", dtype) for x in tensors(*shapes))
    if why := KERNELS[name][1](q, v):
        pytest.skip(why)
    regular = (
        Block((0, 512), (0, 512), Visibility.CAUSAL),
        Block((256, 512), (0, 256), Visibility.FULL),
    )
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for scale in (None, 0.2):
        kernel = kernel_of(name, scale)
        compare(kernel, [q, k, v, grad], tolerance, BLOCKS + regular, scores=Scores(scale))


@pytest.mark.parametrize("seed", range(200))
def test_a_band_is_a_window_as_flash_attention_counts(seed: int) -> None:
    """From the diagonal that ends with the last query and key; a negative one has no end."""
    rng = random.Random(seed)
    length = rng.randint(2, 24)
    queries, keys = random_spans(rng, length)
    blocks = cut(queries, keys, Sight((0, length), rng.randint(1, 8)), tile=rng.choice([2, 3, 8]))
    for block in blocks:
        if block.kind == Visibility.BAND:
            causal, window = _seen(block)
            assert not causal
            left, right = window["window_size_left"], window["window_size_right"]
            assert left >= 0 and right >= 0
            num_q, num_k = block.q[1] - block.q[0], block.k[1] - block.k[0]
            all_pairs = torch.ones(num_q, num_k, dtype=torch.bool)
            seen = all_pairs.triu(num_k - num_q - left).tril(num_k - num_q + right)
            assert seen.equal(visible(block, torch.device("cpu")) & all_pairs)
        else:
            assert _seen(block) == (block.kind == Visibility.CAUSAL, {})


def test_a_kernel_that_cannot_says_why() -> None:
    q, v = tensors((1, 2, 3, 6), (1, 2, 3, 8))
    assert choose_kernel(q, q) == kernel_of("flash_cpu")
    assert isinstance(choose_kernel(q, v), Plain)
    assert isinstance(choose_kernel(q, q, dropping("cpu")), Plain)
    lacking = {name: lacks(q, v) for name, (_, lacks) in KERNELS.items()}
    assert lacking == {
        "flash_cpu": "values must not have more features than queries, 8 > 6",
        "cudnn": "it runs on CUDA devices",
        "flash_cuda": "it runs on CUDA devices",
        "flex": "it runs on CUDA devices",
        "plain": "",
    }


def test_deterministic_runs_leave_out_what_torch_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN gives other bits each time, and nothing says so where it is called by name."""
    kind: Any = SimpleNamespace(
        is_cuda=True, dtype=torch.bfloat16, shape=(1, 8, 512, 64), device=torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    assert choose_kernel(kind, kind) == kernel_of("cudnn")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_kernel(kind, kind) == kernel_of("flash_cuda")


@pytest.mark.parametrize("name", ["cudnn", "flash_cuda"])
def test_kernels_for_cuda_are_called_as_they_want(name: str) -> None:
    """On tensors without contents, where there is no such device: shapes and types only."""
    q, k = (torch.empty(2, n, 512, 32, dtype=torch.bfloat16, device="meta") for n in (8, 2))
    kernel = kernel_of(name, 0.7)
    assert "CUDA" in KERNELS[name][1](q, k)
    kinds = set()
    for block in cut(((0, 512),), ((0, 512),), Sight((0, 512), 150), tile=128):
        kinds.add(block.kind)
        own, keys = q[:, :, slice(*block.q)], k[:, :, slice(*block.k)]
        out, lse = kernel.forward(own, keys, keys, block)
        assert out.shape == own.shape and lse.shape == own.shape[:3]
        grads = kernel.backward(out, own, keys, keys, out, lse, block)
        assert [grad.shape for grad in grads] == [own.shape, keys.shape, keys.shape]
    assert kinds == {Visibility.FULL, Visibility.CAUSAL, Visibility.BAND}


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("queries", [20, 13])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_local_attention_is_the_definition(
    window: int | None, packed: bool, queries: int, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole rows, and of their last tokens."""
    monkeypatch.setattr(kernels, "ROWS", 3)
    inputs = tensors((2, queries, 4, 6), (2, 20, 2, 6), (2, 20, 2, 6))
    q, k, v = (x.requires_grad_() for x in inputs)
    documents, sight = None, Sight((0, 20), window)
    if packed:
        documents = Documents((0, 7, 8, 20, 39, 40), 2)
        sight = Sight(documents.starts, window)
    names = torch.arange(100, 140).view(2, 20)
    made = Dropout(3, 1, names.flatten(), names.flatten(), names)
    drop = made.heads(dropout, "site", 2, 7) if dropout else None
    (grad,) = tensors((2, queries, 4, 6))
    scores = Scores(0.7, 0.4) if window == 5 else USUAL
    outs, grads = [], []
    for out in (
        plain_attention(q, k, v, Scope(documents, window, scores=scores), drop),
        local_attention(q, k, v, sight, drop=drop, scores=scores),
    ):
        outs.append(out)
        grads.append(torch.autograd.grad(out, (q, k, v), grad))
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


def test_values_of_fewer_features_than_queries() -> None:
    """As latent attention has them."""
    q, k, v, grad = tensors((2, 4, 20, 6), (2, 2, 20, 6), (2, 2, 20, 4), (2, 4, 20, 4))
    (block,) = cut(((0, 20),), ((0, 20),), Sight((0, 20)))
    results = []
    for kernel in (choose_kernel(q, v), Plain()):
        out, lse = kernel.forward(q, k, v, block)
        results.append((out, lse, *kernel.backward(grad, q, k, v, out, lse, block)))
    assert not isinstance(choose_kernel(q, v), Plain)
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
