"""The CUDA paths where there is no GPU: see `stub.py`."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from fivefold.cli.verify import Options
from fivefold.config.sources import load
from tests.gpu_stub.drawn import AMPERE
from tests.gpu_stub.planted import FORGOTTEN
from tests.gpu_stub.stub import (
    disagreements,
    faults,
    needless,
    needs_stub,
    on_stub,
    steps,
    texts,
)

ALONE = ("--tp", "1", "--no-sequence-parallel")
ON_HOST = "--optimizer-cpu-offload"
TWO_STEPS = ("--train-iters", "2", "--lr-warmup-iters", "0")
TWO = ("debug", "--nproc", "2", *ALONE)
FEW = ("--global-batch-size", "2")
"""Sequences, where each has many small parts of attention."""
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tensor": ("debug", "--nproc", "2", "--tp", "2"),
    "tensor, pipeline": ("debug", "--nproc", "4", "--tp", "2", "--pp", "2"),
    "sharded": (*TWO, "--data-parallel-sharding-strategy", "optim_grads_params"),
    "sharded optimizer": (*TWO, "--data-parallel-sharding-strategy", "optim"),
    "sharded optimizer, pipeline": (
        *("debug", "--nproc", "4", *ALONE, "--pp", "2", "--recompute-granularity", "full"),
        *("--data-parallel-sharding-strategy", "optim"),
    ),
    "sharded pipeline": (
        *("debug", "--nproc", "4", *ALONE, "--pp", "2", "--precision", "bf16"),
        *("--data-parallel-sharding-strategy", "optim_grads"),
    ),
    "split norms, optimizer on the host": (
        *("debug", "--nproc", "4", "--tp", "2", "--sequence-parallel", ON_HOST),
        *("--data-parallel-sharding-strategy", "optim_grads"),
    ),
    "replicated": TWO,
    "fp16": ("debug-mixtral", "--nproc", "2", "--ep", "2", "--fp16", "--global-batch-size", "2"),
    "muon": (
        *("debug", "--nproc", "4", "--tp", "2", "--sequence-parallel", "--optimizer", "muon"),
        *("--data-parallel-sharding-strategy", "optim_grads", "--precision", "bf16"),
    ),
    "zb_v": (*TWO, "--pp", "2", "--pipeline-schedule", "zb_v"),
    "dualpipe_v": (*TWO, "--pp", "2", "--pipeline-schedule", "dualpipe_v"),
    "ring": (*TWO, "--cp", "2", *FEW),
    "ring, probabilities dropped": (*TWO, "--cp", "2", *FEW, "--attention-dropout", "0.1"),
    "gathered keys": (*TWO, "--cp", "2", *FEW, "--cp-comm-type", "all_gather"),
    "chunks": (
        *("debug", "--nproc", "2", "--tp", "2", "--attention-chunk-size", "24", "--qk-l2-norm"),
        *("--no-rope-freq", "2", "--attn-temperature-tuning", "--floor-scale", "16"),
    ),
    "ulysses": (*TWO, "--cp", "2", *FEW, "--cp-comm-type", "a2a"),
    "ulysses in a ring": (
        *("debug", "--nproc", "4", *ALONE, *FEW, "--cp", "4", "--cp-comm-type", "a2a+p2p"),
        *("--hierarchical-context-parallel-sizes", "2", "2"),
    ),
    "hybrid": (
        *("debug", "--nproc", "4", *ALONE, "--num-distributed-optimizer-instances", "2"),
        *("--data-parallel-sharding-strategy", "optim_grads_params"),
    ),
    "states, experts of latents": (
        *("debug", "--nproc", "4", "--tp", "2", "--ep", "2", "--pp", "2", "--sequence-parallel"),
        *("--hybrid-override-pattern", "ME*E", "--position-embedding-type", "none"),
        *("--no-use-rope-scaling", "--mamba-num-heads", "8", "--mamba-head-dim", "16"),
        *("--mamba-num-groups", "2", "--num-experts", "4", "--moe-latent-size", "32"),
        *("--mtp-num-layers", "2", "--mtp-hybrid-override-pattern", "*E"),
        "--mtp-use-repeated-layer",
    ),
    "states, ulysses": (
        *(*TWO, *FEW, "--cp", "2", "--cp-comm-type", "a2a", "--experimental-attention-variant"),
        *("gated_delta_net", "--linear-attention-freq", "2", "--linear-key-head-dim", "16"),
        *("--linear-value-head-dim", "16", "--linear-num-key-heads", "2"),
        *("--linear-num-value-heads", "4"),
    ),
    "chosen tokens": (
        *("debug", "--nproc", "4", "--tp", "2", "--pp", "2", "--sequence-parallel"),
        *("--multi-latent-attention", "--num-query-groups", "none", "--kv-channels", "none"),
        *("--no-use-rope-scaling", "--experimental-attention-variant", "dsa"),
        *("--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "64"),
        *("--dsa-indexer-topk", "16", "--dsa-indexer-loss-coeff", "0.1"),
    ),
    "chosen tokens of ranks": (
        *("debug", "--nproc", "4", "--tp", "2", *FEW, "--cp", "2", "--cp-comm-type", "all_gather"),
        *("--multi-latent-attention", "--num-query-groups", "none", "--kv-channels", "none"),
        *("--no-use-rope-scaling", "--experimental-attention-variant", "dsa"),
        *("--dsa-indexer-n-heads", "4", "--dsa-indexer-head-dim", "64"),
        *("--dsa-indexer-topk", "16", "--dsa-indexer-loss-coeff", "0.1"),
    ),
    "offloaded": (
        *("debug", "--nproc", "1", *ALONE),
        *("--fine-grained-activation-offloading", "--offload-modules", "core_attn"),
    ),
    "weights off the device": (
        *(*TWO, "--data-parallel-sharding-strategy", "optim_grads_params"),
        *(ON_HOST, "--param-cpu-offload"),
    ),
    "widths that kernels pad": (
        *("debug", "--nproc", "2", "--tp", "2", "--no-sequence-parallel", "--fp8-format", "e4m3"),
        *("--hidden-size", "72", "--kv-channels", "16", "--global-batch-size", "2"),
    ),
    "widths without a grouped kernel": (
        *("debug-mixtral", "--nproc", "2", "--moe-ffn-hidden-size", "12", "--ep", "2"),
        *("--global-batch-size", "2"),
    ),
}
GRAPH = ("--cuda-graph-impl", "local", "--no-reset-attention-mask")
GRAPHED = ("tensor", "sharded", "replicated", "ring", "gathered keys", "ulysses", "hybrid")
GRAPHED += ("chosen tokens of ranks",)


TOGETHER = 5
"""Layouts that the same processes run in turn: a start takes as long as one of them."""


def _of_ranks(ranks: str) -> Iterator[list[str]]:
    """Names of layouts for so many ranks, which run together."""
    names = [name for name, words in LAYOUTS.items() if words[2] == ranks]
    return (names[begin : begin + TOGETHER] for begin in range(0, len(names), TOGETHER))


@needs_stub
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpus", [8, 1], ids=["a GPU a rank", "one GPU"])
@pytest.mark.parametrize("names", [*chain.from_iterable(map(_of_ranks, "124"))], ids="; ".join)
def test_no_races_one_wait_a_step_and_the_same_calls(
    names: list[str], gpus: int, tmp_path: Path
) -> None:
    commands = {
        name: (*LAYOUTS[name], *(() if "--fp16" in LAYOUTS[name] else ("--bf16",)))
        for name in names
    }
    words = (word for command in commands.values() for word in ("+", *command))
    found = steps(tmp_path, *words, gpus=gpus, seconds=900)
    assert len(found) == len(names) * int(LAYOUTS[names[0]][2])
    configs = [load(command, Options, lambda _: None)[1] for command in commands.values()]
    wrong = [
        f"{names[report['layout']]}: {fault}"
        for report in found
        for fault in faults(report, configs[report["layout"]], own_gpu=gpus > 1)
    ]
    assert not wrong, "\n".join(wrong)
    assert not disagreements(tmp_path)


MOVED = (*ALONE, "--fine-grained-activation-offloading", "--offload-modules", "core_attn")
ALL_MOVED = ("debug", "--nproc", "1", *MOVED, "--min-offloaded-tensor-size", "1")
SEEN_IN = {
    "collectives": LAYOUTS["tensor"],
    "messages": LAYOUTS["ring"],
    "stages": LAYOUTS["zb_v"],
    "copies": ALL_MOVED,
    "owners": ALL_MOVED,
    "streams": LAYOUTS["sharded"],
    "events": LAYOUTS["sharded"],
}


@needs_stub
@pytest.mark.slow
@pytest.mark.parametrize("gpus", [8, 1], ids=["a GPU a rank", "one GPU"])
@pytest.mark.parametrize("name", FORGOTTEN)
def test_planted_missing_waits_are_found(name: str, gpus: int, tmp_path: Path) -> None:
    ranks = steps(tmp_path, "--forget", name, *SEEN_IN[name], "--bf16", gpus=gpus)
    assert ranks and all(rank["races"] for rank in ranks)


@needs_stub
@pytest.mark.slow
def test_a_verification_that_follows_streams_ends(tmp_path: Path) -> None:
    """torch frees events of CUDA without a word to weak references, which then crash a rank."""
    flags = ("--steps", "1", "--device", "cuda", "--races")
    said = on_stub(
        "fivefold", "verify", *LAYOUTS["zb_v"], *flags, gpus=1, folder=tmp_path, status=1
    )
    assert "worst      loss in step 1" in said and "FAILED" in said  # nothing is computed there


@needs_stub
@pytest.mark.slow
@pytest.mark.parametrize("name", ["one rank", *GRAPHED])
def test_steps_are_recorded_as_graphs(name: str, tmp_path: Path) -> None:
    """A stub with the rules of captures refuses waits of the host, for events from outside, and
    streams that are not joined."""
    words = LAYOUTS.get(name, ("debug", "--nproc", "1", *ALONE))
    try:
        ranks = steps(tmp_path, *words, *GRAPH, "--bf16", gpus=8)
    except AssertionError as failure:
        if "cudaErrorNotSupported" in str(failure):
            pytest.skip("this stub knows no captures")
        raise
    for rank in ranks:
        assert rank["replayed"] == 3  # of five, after two
        assert not rank["races"] and not [*needless(rank)]
    assert not disagreements(tmp_path)


@needs_stub
@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_token_of_a_text_waits_once(ranks: str, tmp_path: Path) -> None:
    words = ("debug", "--nproc", ranks, "--tp", ranks, "--no-sequence-parallel")
    found = texts(tmp_path, *words, gpus=8)
    assert len(found) == int(ranks)
    for report in found:
        for waits, pageable in zip(report["waits"], report["pageable"], strict=True):
            assert sum(waits.values()) == 1 and pageable.keys() <= waits.keys(), report
    assert not disagreements(tmp_path)


@needs_stub
@pytest.mark.slow
def test_gpus_without_a_grouped_kernel_wait_once_for_the_rows_of_an_input(tmp_path: Path) -> None:
    words = ("debug-mixtral", "--nproc", "1", "--bf16", "--global-batch-size", "1")
    (rank,) = steps(tmp_path, *words, gpus=1, capability=AMPERE)
    inputs = 4 * 2  # layers, and what goes into and out of their experts
    for waits in rank["waits"]:
        assert sum(n for place, n in waits.items() if "model/moe/grouped.py" in place) == inputs


@needs_stub
@pytest.mark.slow
def test_operations_that_are_called_are_known(tmp_path: Path) -> None:
    """This torch may be another one than that of the other tests."""
    on_stub("tests.operations", gpus=1, folder=tmp_path)


@needs_stub
@pytest.mark.slow
def test_steps_are_rehearsed(tmp_path: Path) -> None:
    """This torch may have other rules for shapes."""
    words = ("fivefold", "rehearse", *LAYOUTS["tensor, pipeline"], "--bf16")
    assert "agree on every message" in on_stub(*words, gpus=0, folder=tmp_path)


@needs_stub
@pytest.mark.slow
def test_trains_and_saves(tmp_path: Path) -> None:
    flags = (*TWO_STEPS, "--bf16", "--save", "run", "--device", "cuda")
    words = ("fivefold", "train", *LAYOUTS["tensor, pipeline"], *flags)
    on_stub(*words, "--no-check-for-nan-in-loss-and-grad", gpus=8, folder=tmp_path)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert not disagreements(tmp_path)


AUDITED: dict[str, tuple[str, ...]] = {
    "offloaded": (*ALL_MOVED, "--seq-length", "1024"),
    "offloaded optimizer": LAYOUTS["split norms, optimizer on the host"],
    "offloaded states": (
        *(*TWO, "--data-parallel-sharding-strategy", "optim_grads"),
        "--offload-optimizer-states",
    ),
    "widths that kernels pad": LAYOUTS["widths that kernels pad"],
    "second copies of a node": (
        *("debug", "--nproc", "4", *ALONE, "--zero-hpz-partition-size", "2"),
        *("--data-parallel-sharding-strategy", "optim_grads_params"),
    ),
}


@needs_stub
@pytest.mark.slow
@pytest.mark.parametrize("name", AUDITED)
def test_what_gpus_send_keep_and_multiply_is_as_predicted(name: str, tmp_path: Path) -> None:
    flags = ("--device", "cuda", "--bf16", "--save", "run", "--audit", *TWO_STEPS)
    words = (*AUDITED[name], *flags, "--no-check-for-nan-in-loss-and-grad")
    on_stub("fivefold", "train", *words, gpus=4, folder=tmp_path)
    assert "as predicted: all" in on_stub("fivefold", "audit", "run", gpus=4, folder=tmp_path)


def test_a_log_that_disagrees_is_told(tmp_path: Path) -> None:
    made = "init comm a rank {} of 2 device {}\nthread 7 uses device {} (set)\n"
    same = "allreduce comm a type float count 4 op sum stream 5\n"
    for rank in (0, 1):
        text = made.format(rank, rank, rank) + same
        (tmp_path / f"calls.{rank}").write_text(text)
    assert not disagreements(tmp_path)
    (tmp_path / "calls.1").write_text(made.format(1, 1, 1) + same.replace("4", "5"))
    assert disagreements(tmp_path) == ["a: ranks 0 and 1 differ"]
    (tmp_path / "calls.1").write_text(
        made.format(1, 1, 0) + same + "thread 8 uses device 1 (set)\n"
    )
    (wrong,) = disagreements(tmp_path)
    assert "device 1" in wrong
    (tmp_path / "calls.1").write_text(
        made.format(1, 1, 1) + same + "send comm a type float count 4 peer 0 stream 5\n"
    )
    assert disagreements(tmp_path) == ["('a', '1', '0'): what is sent is not what is received"]
