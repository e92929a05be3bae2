"""`fivefold sample` writes what transformers' `generate` does, to the token."""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from fivefold.cli.sample import _converse
from fivefold.data.tokenizer import Tokenizer
from fivefold.inference.sample import Sampler, Sampling
from fivefold.inference.text_bounds import TextBounds
from fivefold.train.folder.convert import to_run
from tests.byte_level import byte_level
from tests.config.families import TINY
from tests.config.oracle import oracle

SPECIAL = ["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{{- bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }} <|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OPENINGS: dict[str, tuple[bool, dict[str, Any]]] = {  # in tokenizer.json, in tokenizer_config.json
    "none": (False, {}),
    "template": (True, {}),
    "no template": (False, {"add_bos_token": True}),  # which transformers 5 does not heed
    "no saying": (True, {"add_bos_token": False}),
}
SIZES = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 128}
PROMPTS = ("the cat", "a <|im_end|> on<|im_start|>", " <s> mat", "the")
COUNT = 12


@dataclass(frozen=True)
class Recorded(Sampling):
    """Greedy, and keeps what is drawn."""

    max_tokens: int = COUNT
    temperature: float = 0.0
    seen: list[int] = field(default_factory=list)

    def draw(self, *of: Any) -> int:
        self.seen.append(super().draw(*of))
        return self.seen[-1]


def backend(*, begins: bool) -> Backend:
    made = byte_level("user assistant the cat sat on the mat", SPECIAL, 300)
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return made


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, Any]]]:
    """Name of an opening -> the folder of a model, and the model."""
    transformers = pytest.importorskip("transformers")
    model = oracle(TINY["llama"] | SIZES).float().eval()
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 1, 0

    def made(name: str) -> tuple[Path, Any]:
        begins, said = OPENINGS[name]
        folder = tmp_path_factory.mktemp("hub")
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend(begins=begins),
            **{"bos_token": "<s>", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE},
        ).save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        kept = json.loads(file.read_text())
        kept = {k: v for k, v in kept.items() if k not in ("add_bos_token", "add_eos_token")}
        file.write_text(json.dumps(kept | said))
        return folder, model

    yield made


def theirs(model: Any, ids: torch.Tensor, ends: list[int]) -> list[int]:
    """The tokens that transformers generates."""
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False,
        eos_token_id=ends, pad_token_id=0,
    )  # fmt: skip
    new: list[int] = made[0, ids.shape[1] :].tolist()
    return new


@pytest.mark.parametrize("name", OPENINGS)
def test_prompts_are_continued_as_by_transformers(
    name: str, hub: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """After what it puts before a text, and up to each of the ends that `generate` is told."""
    from transformers import AutoTokenizer

    folder, model = hub(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    ends = [0, theirs(model, first, [])[COUNT // 2]]
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
    to_run(folder, tmp_path / "run")
    sampler = Sampler.load(tmp_path / "run", device="cpu")
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        how = Recorded()
        list(sampler.write([prompt], how))
        assert how.seen == theirs(model, ids, ends)


def test_a_chat_is_that_of_transformers(
    hub: Callable[[str], tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens are such tokens, nothing stands before, and one of them ends an answer."""
    from transformers import AutoTokenizer

    folder, model = hub("template")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "the cat"}]
    ids = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    to_run(folder, tmp_path / "run")
    sampler, how = Sampler.load(tmp_path / "run", device="cpu"), Recorded()
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    ended: list[set[int]] = []
    write = sampler.write

    def noted(prompts: Any, how: Any, ends: Any = (), **more: Any) -> Any:
        ended.append(set(ends))
        return write(prompts, how, ends, **more)

    monkeypatch.setattr(sampler, "write", noted)
    _converse(sampler, how, tmp_path / "run")
    assert ended == [{3}]
    assert how.seen == theirs(model, ids, [0, 3])


def test_what_is_trained_here_begins_with_nothing_before_it(tmp_path: Path) -> None:
    """As its documents do; even if the tokenizer has a template for texts."""
    tokenizer = Tokenizer(backend(begins=True).to_str(), "it")
    assert TextBounds.of(tmp_path, tokenizer) == TextBounds((), frozenset({0}))
