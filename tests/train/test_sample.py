"""Texts are written token by token at the cost of one, and as if each were alone."""

import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.cli.sample import _show
from fivefold.config.model import ModelConfig
from fivefold.data.prompts import encode_prompt
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError
from fivefold.inference.decoder import Decoder
from fivefold.inference.sample import Sampler, Sampling, _Text
from fivefold.inference.text_bounds import TextBounds
from fivefold.mesh.slices import piece_of
from fivefold.model.batch import Batch
from fivefold.model.init import initialise
from fivefold.model.transformer import Stage
from fivefold.parallelize import parallelize
from fivefold.train.layout_groups import groups_of
from tests import programs
from tests.byte_level import byte_level
from tests.pool import run
from tests.verify.cases import CHUNKED, MODELS, chosen, config, named, shared_groups

WINDOW, STEPS = 11, 4


def whole(stage: Stage, ids: list[int]) -> torch.Tensor:
    """The logits after the last tokens of one row, computed at once."""
    kept = torch.tensor([ids[-WINDOW:]])
    places = torch.arange(kept.shape[1])[None]
    with torch.no_grad():
        logits = stage.logits(Batch(kept, kept, places, None, places))
    return logits[-1, : stage.model.vocab_size]


ALL = MODELS | {"chunked": CHUNKED}


# Layers of these are in others, too.
AGAIN = {
    *("hybrid", "hybrid tied", "convolving tied", "delta", "delta tied", "local", "llama tied"),
    *("gpt untied", "sparse", "sparse, not taught", "sparse, chosen alone, plain queries"),
    "sparse, experts, not taught",
}


def continues(name: str, rows: list[list[int]], drawn: Callable[[], list[int]]) -> None:
    """Compare the logits of rows that are continued together, by `drawn` tokens, with those that
    each has alone."""
    torch.manual_seed(0)
    stage = Stage(ALL[name]).double().eval()
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    decoder = Decoder(stage, rows, WINDOW)
    for step in range(STEPS):
        for row, logits in zip(rows, decoder.logits(), strict=True):
            torch.testing.assert_close(logits, whole(stage, row), rtol=1e-10, atol=1e-12)
        if step < STEPS - 1:
            decoder.add(tokens := drawn())
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]


@pytest.mark.parametrize("model", chosen(ALL, *(set(ALL) - AGAIN)))
def test_each_row_is_continued_as_if_alone(model: str) -> None:
    """With padding before two of the rows, and after three tokens beyond the window."""
    random, size = Random(model), ALL[model].vocab_size
    rows = [[random.randrange(size) for _ in range(n)] for n in (1, 5, WINDOW - 2)]
    continues(model, rows, lambda: [random.randrange(size) for _ in rows])


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ALL)
@settings(max_examples=6)
@given(data=st.data())
def test_any_rows_are_continued_as_if_alone(model: str, data: st.DataObject) -> None:
    tokens = st.integers(0, ALL[model].vocab_size - 1)
    row = st.lists(tokens, min_size=1, max_size=WINDOW + 2)
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    several = st.lists(tokens, min_size=len(rows), max_size=len(rows))
    continues(model, rows, lambda: data.draw(several))


@shared_groups()
def _on_a_rank(rank: int, world: int, model: ModelConfig, rows: list[list[int]]) -> float:
    """Largest difference of a rank's logits from those of one device."""
    layout = check(config(model, **named(tp=world, sequence_parallel=False)), world)
    plain = Stage(model).double().eval()
    initialise(plain, layout.config.training.seed)
    groups = groups_of(layout, rank, "cpu")
    parallel = parallelize(layout, groups, torch.device("cpu"))
    parallel.initialise({name: piece_of(p) for name, p in parallel.parameters().items()})
    (stage,) = parallel.stages.values()
    decoder, worst = Decoder(stage, rows, WINDOW, groups.tp), 0.0
    for step in range(4):
        for row, logits in zip(rows, decoder.logits(), strict=True):
            worst = max(worst, float((logits - whole(plain, row)).abs().max()))
        drawn = [(7 * step + 5 * number) % model.vocab_size for number in range(len(rows))]
        decoder.add(drawn)
        for row, token in zip(rows, drawn, strict=True):
            row.append(token)
    return worst


SPLIT = {name: model for name, model in MODELS.items() if model.num_experts is None}
SPLIT["adapted"] = replace(MODELS["llama"], lora_rank=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen([*product(SPLIT, (2, 4))], ("llama", 4), ("sinks", 4), ("latent", 2), ("adapted", 2)),
    ids=str,
)
def test_ranks_continue_rows_as_one_device(case: tuple[str, int]) -> None:
    name, ranks = case
    rows = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8], [9]]
    assert max(run(ranks, _on_a_rank, SPLIT[name], rows)) < 1e-10


@dataclass(frozen=True)
class _Counting(Sampling):
    """Keeps what is drawn on this rank."""

    seen: list[int] = field(default_factory=list)

    def draw(self, *of: Any) -> int:
        self.seen.append(super().draw(*of))
        return self.seen[-1]


@shared_groups()
def _written(rank: int, world: int, prompts: list[str], count: int) -> tuple[list[list[str]], int]:
    """Texts that a rank writes, and how many tokens it draws itself. Nothing is pickled: a GPU
    would be asked for the length of a pickle, then for what it says."""
    model = replace(MODELS["llama"], vocab_size=300)
    layout = check(config(model, **named(tp=world, sequence_parallel=False)), world)
    groups = groups_of(layout, rank, "cpu")
    parallel = parallelize(layout, groups, torch.device("cpu"))
    parallel.initialise({name: piece_of(p) for name, p in parallel.parameters().items()})
    (stage,) = parallel.stages.values()
    tokenizer = Tokenizer(byte_level("the cat sat", ["<|endoftext|>"], 300).to_str(), "it")
    sampler = Sampler(layout.config, stage, tokenizer, TextBounds((), frozenset()), groups.tp)
    how = _Counting(count, seed=7)
    with patch.multiple(dist, broadcast_object_list=None, all_gather_object=None):
        return [*sampler.write(prompts, how)], len(how.seen)


def test_the_first_rank_draws_for_all() -> None:
    prompts, count = ["the cat", "a"], 5
    ((alone, drawn),) = run(1, _written, prompts, count)
    assert drawn == count * len(prompts)
    for rank, (texts, own) in enumerate(run(2, _written, prompts, count)):
        assert texts == alone and own == (0 if rank else drawn)


def _heard(rank: int, world: int) -> tuple[list[str], float]:
    """What ranks hear whose collectives may take less time than a person, and how much of a
    processor they take meanwhile."""
    group = dist.new_group(timeout=timedelta(seconds=0.2))
    sampler = Sampler(None, None, None, None, group)  # type: ignore[arg-type]
    lines = iter(["one\udc80\n", "two\n", ""])

    def hear() -> str:
        assert rank == 0, "only the first rank has standard input"
        time.sleep(0.6)
        return next(lines)

    began = time.process_time()
    return [sampler.heard(hear) for _ in range(3)], time.process_time() - began


def test_ranks_wait_for_a_person_as_long_as_it_takes() -> None:
    for heard, seconds in run(2, _heard):
        assert heard == ["one\udc80\n", "two\n", ""] and seconds < 0.9


def test_tokens_are_drawn_from_those_that_are_asked_for() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[[2, 0, 3, 1]]  # 0.15, 0.5, 0.05, 0.3

    def drawn(**how: Any) -> set[int]:
        generator = torch.Generator().manual_seed(1)
        choice = Sampling(temperature=how.pop("temperature", 1.0), **how)
        return {choice.draw(logits, generator) for _ in range(400)}

    assert drawn() == {0, 1, 2, 3}
    for tiny in (0.0, 1e-6, 1e-40, 5e-324):
        assert drawn(temperature=tiny) == {1}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_p=0.5) == {1}
    assert drawn(top_p=0.51) == {1, 3}
    assert drawn(top_p=0.96) == {0, 1, 2, 3}
    assert drawn(top_k=3, top_p=0.9) == {0, 1, 3}
    assert drawn(top_k=2, top_p=0.9) == {1, 3}  # 0.5 / 0.8 is below it


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text("\n".join(f"the number {n} of many" for n in range(3000)))
    words = ["train", "debug", "--train-iters", "3", "--seq-length", "32", "--nproc", "2"]
    words += ["--global-batch-size", "2", "--num-layers", "2"]
    words += ["--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]
    assert main([*words, "--save", str(folder / "own")]) == 0
    (folder / "chat").mkdir()
    text = (folder / "own" / "tokenizer.json").read_text()
    (folder / "chat" / "tokenizer.json").write_text(text)
    (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    words += ["--tokenizer-model", str(folder / "chat" / "tokenizer.json"), "--nproc", "1"]
    assert main([*words, "--save", str(folder / "talks")]) == 0
    return folder


@pytest.mark.slow
def test_prompts_are_continued_together_as_one_by_one(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = ["the number", "a\u2028b\x0cc", "the number 17 of"]  # a line ends at line feeds only
    (trained / "prompts.txt").write_text("\n".join(prompts))
    words = ["sample", str(trained / "own"), "--max-tokens", "6", "--device", "cpu"]
    alone = []
    for number, prompt in enumerate(prompts):
        assert main([*words, prompt, "--seed", str(5 + number), "--top-p", "0.9"]) == 0
        alone.append(capfd.readouterr().out)
    file = ("--prompts", str(trained / "prompts.txt"))
    assert main([*words, *file, "--seed", "5", "--top-p", "0.9"]) == 0
    together = capfd.readouterr().out
    assert together == "".join(f"[{n}] {text}" for n, text in enumerate(alone, 1))
    assert main([*words, *file, "--seed", "5", "--top-p", "0.9", "--tp", "2"]) == 0
    assert capfd.readouterr().out.endswith(together)
    assert main([*words, "the", "--tp", "3"]) == 2
    assert "tp" in capfd.readouterr().err
    assert main([*words, "the", "--num-samples", "2", "--temperature", "0"]) == 0
    first, second = capfd.readouterr().out.split("[2] ")
    assert first == f"[1] {second}"


@pytest.mark.slow
def test_lines_are_answered_by_the_template(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("how many\nand now\n"))
    words = ["sample", str(trained / "talks"), "--max-tokens", "4", "--temperature", "0"]
    assert main([*words, "--chat"]) == 0
    talk = capsys.readouterr().out.splitlines()
    prompt = "<user>how many|<assistant>"
    assert main([*words, prompt]) == 0
    expected = capsys.readouterr().out.removeprefix(prompt)
    said = programs.run([*words, "--chat", "--tp", "2"], said="how many\nand now\n")
    assert not said.returncode, said.stderr
    assert said.stdout.splitlines() == talk
    assert "|" not in talk[0] and (expected.split("|")[0].rstrip("\n")) == talk[0]
    assert main(["sample", str(trained / "own"), "--chat"]) == 2
    assert "a tokenizer of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_a_template_is_found_from_where_the_run_was_started(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever lies in the folder of that name here."""
    run, here = tmp_path / "run", tmp_path / "here"
    shutil.copytree(trained / "talks", run)
    settings = (run / "config.toml").read_text()
    (run / "config.toml").write_text(settings.replace(str(trained / "chat"), "chat"))
    starts = json.loads((run / "environment.json").read_text())
    starts[-1]["folder"] = str(trained)
    (run / "environment.json").write_text(json.dumps(starts))
    (here / "chat").mkdir(parents=True)
    (here / "chat" / "chat_template.jinja").write_text("{{ raise_exception('not mine') }}")
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.stdin", io.StringIO("how many\n"))
    assert main(["sample", str(run), "--max-tokens", "4", "--chat"]) == 0
    assert main(["convert", str(run), "hub"]) == 0
    assert (here / "hub" / "chat_template.jinja").read_text() == TEMPLATE
    assert "not mine" not in capsys.readouterr().err


@pytest.mark.slow
def test_conversations_are_evaluated_by_the_template_that_trained(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a folder that has another one of that name."""
    lines = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "17"}]
    (tmp_path / "talks.jsonl").write_text(300 * (json.dumps({"messages": lines}) + "\n"))
    for name, text in (("there", TEMPLATE), ("here", "{% for m in messages %}?{% endfor %}")):
        shutil.copytree(trained / "chat", tmp_path / name / "chat")
        (tmp_path / name / "chat" / "chat_template.jinja").write_text(text)
    words = ["--sft", "--tokenizer-model", "chat", "--train-iters", "4", "--eval-interval", "4"]
    words += ["--eval-iters", "2", "--seq-length", "32", "--global-batch-size", "2"]
    words += ["--data-path", f"{tmp_path}/talks.jsonl", "--data-cache-path", f"{tmp_path}/cache"]
    monkeypatch.chdir(tmp_path / "there")
    assert main(["train", "debug", *words, "--save", str(tmp_path / "run")]) == 0
    said = re.search(r"validation loss ([\d.]+)", capsys.readouterr().out)
    monkeypatch.chdir(tmp_path / "here")
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert said is not None and f"loss {said[1]} " in capsys.readouterr().out


def test_all_mistakes_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, parts in (
        ("--top-p 1.5 --num-samples 0", ("--top-p must be in (0, 1]", "--num-samples must be at")),
        ("--chat --prompts y --num-samples 2", ("exclude each other", "--chat gives one answer")),
    ):
        assert main(["sample", str(tmp_path), "x", *flags.split()]) == 2
        said = capsys.readouterr().err
        assert all(part in said for part in parts)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_what_is_new_goes_on_with_the_space_before_it(scheme: str) -> None:
    """Which tokenizers like Llama 2's leave out at the beginning of what they are given."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=60, special_tokens=["<|endoftext|>"], show_progress=False
    )
    said = "the capital of this land is that city"
    backend.train_from_iterator([said] * 3, trainer)
    tokenizer = Tokenizer(backend.to_str(), "it")
    ids = encode_prompt(tokenizer, said)
    for cut in range(1, len(ids)):
        text = _Text(tokenizer, (), ids[cut - 1 : cut])
        new = "".join(text.add(token) for token in ids[cut:])
        assert tokenizer.decode(ids[:cut]) + new == said


def test_a_prompt_that_cannot_be_tokenised_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> Iterator[str]:
        raise DataError("no token for it")
        yield ""

    with pytest.raises(DataError):
        _show(Mock(prints=True), "a prompt", write())
    assert capsys.readouterr().out == ""
    assert _show(Mock(prints=True), "a prompt", iter(())) == ""
    assert _show(Mock(prints=True), "a prompt", iter(["one", "two"])) == "onetwo"
    assert capsys.readouterr().out == "a prompt\na promptonetwo\n"
