import pytest
import torch

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.parallel import ParallelConfig
from fivefold.config.training import TrainingConfig
from fivefold.layout import Layout
from fivefold.train.machine.threads import GRAIN, choose_threads

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=256,
    num_attention_heads=8,
    vocab_size=512,
    max_position_embeddings=4096,
)


def layout(tokens: int, *, micro: int = 1, ranks: int = 1, **parallel: int) -> Layout:
    training = TrainingConfig(
        seq_length=tokens, micro_batch_size=micro, global_batch_size=8, precision="fp32"
    )
    config = Config(model=MODEL, training=training, parallel=ParallelConfig(**parallel))
    return check(config, ranks)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)


@pytest.mark.parametrize(
    ("tokens", "micro", "expected"), [(64, 1, 1), (128, 1, 1), (256, 1, 2), (256, 4, 8)]
)
def test_each_thread_has_enough_to_do(tokens: int, micro: int, expected: int) -> None:
    assert tokens * micro * MODEL.hidden_size // GRAIN in (expected, 0)
    chosen = choose_threads(layout(tokens, micro=micro), 1, "cpu", {})
    assert chosen.count == expected and f"{tokens * micro:,} tokens x 256 features" in chosen.why


def test_parallelism_divides_the_work_and_the_cores() -> None:
    whole = layout(4096)
    assert choose_threads(whole, 1, "cpu", {}).count == 16
    assert choose_threads(whole, 5, "cpu", {}).count == 3
    assert choose_threads(whole, 64, "cpu", {}).count == 1
    parts = layout(1024, ranks=4, tensor_model_parallel_size=2, context_parallel_size=2)
    assert choose_threads(parts, 4, "cpu", {}).count == 2
    assert "512 tokens x 128 features" in choose_threads(parts, 4, "cpu", {}).why


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_user_says_holds(name: str) -> None:
    chosen = choose_threads(layout(64), 4, "cpu", {name: "16"})
    assert (chosen.count, chosen.why) == (16, name)


@pytest.mark.parametrize("said", ["", " ", "abc", "0", "-2", "1.5", "4 2", "4x"])
def test_what_is_no_number_of_threads_is_left_out_as_openmp_leaves_it_out(said: str) -> None:
    without = choose_threads(layout(4096), 4, "cpu", {})
    assert choose_threads(layout(4096), 4, "cpu", {"OMP_NUM_THREADS": said}) == without
    both = {"OMP_NUM_THREADS": said, "MKL_NUM_THREADS": "16"}
    assert choose_threads(layout(4096), 4, "cpu", both).why == "MKL_NUM_THREADS"
    assert choose_threads(layout(4096), 4, "cpu", {"OMP_NUM_THREADS": " 16, 2"}).count == 16


def test_a_gpu_has_its_share_of_the_cores() -> None:
    assert choose_threads(layout(64), 4, "cuda", {}).count == 4
