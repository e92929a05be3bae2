"""Texts are written token by token at the cost of one, and as if each were alone."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.cli.main import main
from fivefold.model.batch import Batch
from fivefold.model.transformer import Stage
from fivefold.train.decoder import Decoder
from fivefold.train.sample import Sampling
from tests.verify.cases import MODELS

WINDOW = 11


def whole(stage: Stage, ids: list[int]) -> torch.Tensor:
    """The logits after the last tokens of one row, computed at once."""
    kept = torch.tensor([ids[-WINDOW:]])
    places = torch.arange(kept.shape[1])[None]
    with torch.no_grad():
        logits = stage.logits(Batch(kept, kept, places, None, places))
    return logits[-1, : stage.model.vocab_size]


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=6)
@given(data=st.data())
def test_each_row_is_continued_as_if_alone(model: str, data: st.DataObject) -> None:
    """Of any lengths, also beyond the window."""
    torch.manual_seed(0)
    stage = Stage(MODELS[model]).double().eval()
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = st.integers(0, MODELS[model].vocab_size - 1)
    rows = data.draw(
        st.lists(st.lists(tokens, min_size=1, max_size=WINDOW + 2), min_size=1, max_size=3)
    )
    rows = [list(row) for row in rows]
    decoder = Decoder(stage, rows, WINDOW)
    for _ in range(4):
        found = decoder.logits()
        for row, logits in zip(rows, found, strict=True):
            torch.testing.assert_close(logits, whole(stage, row), rtol=1e-10, atol=1e-12)
        drawn = data.draw(st.lists(tokens, min_size=len(rows), max_size=len(rows)))
        decoder.add(drawn)
        for row, token in zip(rows, drawn, strict=True):
            row.append(token)


def test_tokens_are_drawn_from_those_that_are_asked_for() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[[2, 0, 3, 1]]  # 0.15, 0.5, 0.05, 0.3

    def drawn(**how: Any) -> set[int]:
        generator = torch.Generator().manual_seed(1)
        choice = Sampling(temperature=how.pop("temperature", 1.0), **how)
        return {choice.draw(logits, generator) for _ in range(400)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(temperature=0.0) == {1}
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
    words += ["--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]
    assert main([*words, "--save", str(folder / "own")]) == 0
    (folder / "chat").mkdir()
    text = (folder / "own" / "tokenizer.json").read_text()
    (folder / "chat" / "tokenizer.json").write_text(text)
    (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    words += ["--tokenizer-model", str(folder / "chat" / "tokenizer.json")]
    assert main([*words, "--save", str(folder / "talks")]) == 0
    return folder


@pytest.mark.slow
def test_prompts_are_continued_together_as_one_by_one(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["the number", "a", "the number 17 of"]
    (trained / "prompts.txt").write_text("\n".join(prompts))
    words = ["sample", str(trained / "own"), "--max-tokens", "12", "--device", "cpu"]
    alone = []
    for number, prompt in enumerate(prompts):
        assert main([*words, prompt, "--seed", str(5 + number), "--top-p", "0.9"]) == 0
        alone.append(capsys.readouterr().out)
    file = ("--prompts", str(trained / "prompts.txt"))
    assert main([*words, *file, "--seed", "5", "--top-p", "0.9"]) == 0
    together = capsys.readouterr().out
    assert together == "".join(f"[{n}] {text}" for n, text in enumerate(alone, 1))
    assert main([*words, "the", "--num-samples", "2", "--temperature", "0"]) == 0
    first, second = capsys.readouterr().out.split("[2] ")
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
    assert "|" not in talk[0] and (expected.split("|")[0].rstrip("\n")) == talk[0]
    assert main(["sample", str(trained / "own"), "--chat"]) == 2
    assert "a tokenizer of its own" in capsys.readouterr().err


def test_all_mistakes_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(tmp_path), "x", "--prompts", "y", "--top-p", "1.5", "--num-samples", "0"]
    assert main(words) == 2
    said = capsys.readouterr().err
    for part in ("--top-p must be above 0 and at most 1", "exclude each other", "--num-samples"):
        assert part in said
