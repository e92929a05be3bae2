"""Tokenizers of others, against the libraries that their files are of."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError

sentencepiece = pytest.importorskip("sentencepiece")

NORMAL, UNKNOWN, CONTROL, USERS, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = "ab\u2581"


@st.composite
def models(draw):
    """A BPE of a few letters, with pieces and an order of merges that no training would give."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model, rng = ModelProto(), random.Random(draw(st.integers(0, 1 << 30)))
    with_bytes = draw(st.booleans())

    def add(piece, kind, score=0.0):
        model.pieces.add(piece=piece, type=kind, score=score)

    add("<unk>", UNKNOWN)
    add("<s>", CONTROL)
    add("</s>", CONTROL)
    if with_bytes:
        for number in range(256):
            add(f"<0x{number:02X}>", BYTE)
    removes = draw(st.booleans())
    long = {"".join(rng.choices(LETTERS, k=rng.randint(2, 5))) for _ in range(rng.randint(1, 14))}
    ordered = sorted(piece for piece in long if not (removes and piece.startswith(2 * "\u2581")))
    rng.shuffle(ordered)
    for number, piece in enumerate([*ordered, *LETTERS]):
        add(piece, NORMAL, -float(number))
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, with_bytes
    trainer.unk_id, trainer.bos_id, trainer.eos_id = 0, 1, 2
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = draw(st.booleans())
    normalizer.remove_extra_whitespaces = removes
    return model


TEXTS = st.lists(
    st.sampled_from([*"aaabbb   \u2581é日\n\t", "\u3000", "<s>", "</s>", "<unk>", "<0x41>", "\0"]),
    max_size=40,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(model=models(), texts=st.lists(TEXTS, min_size=1, max_size=20))
def test_a_sentencepiece_model_gives_its_own_tokens(tmp_path_factory, model, texts):
    file = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    file.write_bytes(model.SerializeToString())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    ours = Tokenizer.load(file)
    assert ours.eod_id == theirs.eos_id()
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == theirs.encode(texts)
    if model.trainer_spec.byte_fallback:  # SentencePiece writes what it does not know as "⁇"
        assert [ours.decode(ids) for ids in theirs.encode(texts)] == theirs.decode(
            theirs.encode(texts)
        )


def _changed(model, change):
    change(model)
    return model.SerializeToString()


def _spaced(model):
    model.normalizer_spec.remove_extra_whitespaces = True
    model.pieces.add(piece=2 * "\u2581", type=NORMAL, score=-99.5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m.trainer_spec, "model_type", 1), "is not BPE"),
        (lambda m: setattr(m.normalizer_spec, "precompiled_charsmap", b"x"), "normalises"),
        (lambda m: m.pieces.add(piece="<mask>", type=USERS), "the user's symbols"),
        (lambda m: m.pieces.add(piece="abab", type=UNUSED), "unused"),
        (lambda m: setattr(m.trainer_spec, "treat_whitespace_as_suffix", True), "after words"),
        (lambda m: setattr(m.normalizer_spec, "escape_whitespaces", False), "hold spaces"),
        (_spaced, "begin with several"),
        (lambda m: [m.pieces.add(piece=p, type=NORMAL) for p in ("aab", "bba")], "equal scores"),
    ],
)
@settings(max_examples=1)
@given(model=models())
def test_a_model_that_would_get_other_tokens_is_refused(tmp_path_factory, model, change, said):
    file = tmp_path_factory.mktemp("pieces") / "m.model"
    file.write_bytes(_changed(model, change))
    with pytest.raises(DataError, match=said):
        Tokenizer.load(file)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_model_is_one_message(tmp_path_factory, data):
    whole = data.draw(models()).SerializeToString()
    cut = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.binary(max_size=3))
    file = tmp_path_factory.mktemp("pieces") / "m.model"
    file.write_bytes(whole[:cut] + change + whole[cut + len(change) + data.draw(st.booleans()) :])
    try:
        Tokenizer.load(file)
    except DataError as error:
        assert str(file) in str(error)


@pytest.fixture
def pair(tokenizer, tmp_path):
    """The vocabulary and merges of a byte-level BPE, in two files as GPT-2's are."""
    model = json.loads(tokenizer.definition)["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (tmp_path / "gpt2-merges.txt").write_text("\n".join(lines))
    return tmp_path / "gpt2-vocab.json"


def test_a_vocabulary_and_its_merges_are_the_tokenizer(tokenizer, pair):
    texts = ["the mat, 12 cats' 日本 \n\n  x<|endoftext|>y", "", "  "]
    read = Tokenizer.load(pair)
    for ours, same in zip(read.encode_batch(texts), tokenizer.encode_batch(texts), strict=True):
        assert ours.tolist() == same.tolist()
    assert read.eod_id == tokenizer.eod_id
    assert read.may_cut == tokenizer.may_cut


def test_a_folder_is_its_tokenizer_json_then_pieces_then_a_vocabulary(tokenizer, pair, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for kind in ("vocab.json", "merges.txt"):
        pair.with_name(f"gpt2-{kind}").rename(folder / kind)
    assert Tokenizer.load(folder).origin.endswith("vocab.json")
    (folder / "tokenizer.model").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match="neither"):
        Tokenizer.load(folder)
    tokenizer.save(folder / "tokenizer.json")
    assert Tokenizer.load(folder).digest == tokenizer.digest
    with pytest.raises(DataError, match="does not say how its tokenizer cuts words"):
        Tokenizer.load(folder / "vocab.json")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("added_tokens.json", {"<|im_start|>": 999}, "has no <|im_start|>"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"999": {"content": "<x>"}}},
            "has no <x>",
        ),
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}, "of a Qwen2Tokenizer"),
        ("gpt2-merges.txt", ["a"], "merges of GPT-2's kind"),
    ],
)
def test_what_lies_beside_a_vocabulary_is_not_ignored(pair, name, content, said):
    pair.with_name(name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=said.replace("|", r"\|")):
        Tokenizer.load(pair)


def test_ranks_of_tiktoken_are_refused_by_name(tmp_path):
    file = tmp_path / "tokenizer.model"
    file.write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(DataError, match="of tiktoken"):
        Tokenizer.load(file)


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B/tokenizer.json"])
def test_a_name_of_the_hub_is_told_the_command_that_fetches_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fetch = "hf download Qwen/Qwen3-8B tokenizer.json --local-dir Qwen/Qwen3-8B\n"
    with pytest.raises(DataError, match=fetch):
        Tokenizer.load(path)


def test_a_path_is_no_name_of_the_hub(tmp_path):
    with pytest.raises(DataError) as caught:
        Tokenizer.load(tmp_path / "a/b")
    assert "hf download" not in str(caught.value)
