import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from fivefold.data.indexed import IndexedTokens
from fivefold.data.prepare import build_index
from fivefold.data.tokenizer import END_OF_DOCUMENT_NAMES, Tokenizer
from fivefold.errors import DataError
from tests.data.kinds import CUT, WHOLE, changed, definition_of, texts


@pytest.mark.slow
@settings(max_examples=50)
@given(text=st.text())
def test_any_text_survives(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.uint16
    assert tokenizer.eod_id not in ids


def test_a_document_that_spells_the_end_of_a_document_does_not_end(tokenizer):
    text = "before <|endoftext|> after"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eod_id]) == "<|endoftext|>"


def test_the_same_corpus_gives_the_same_vocabulary():
    # many pairs of equal counts
    texts = [a + b + c for a in "abcde" for b in "klmno" for c in "vwxyz"]
    first, second = Tokenizer.train(texts, 290), Tokenizer.train(iter(texts), 290)
    assert first.digest == second.digest
    assert first.vocab_size == 290
    assert Tokenizer.train(texts[:60], 290).digest != first.digest


@pytest.mark.timeout(60)
@pytest.mark.parametrize("character", ["x", "語", "7", "=", "\n"])
def test_a_word_without_end_is_learnt_from_in_time(character):
    """The trainer's time grows with the square of a word's length: whole, it would take minutes."""
    text = character * 200_000
    tokenizer = Tokenizer.train(["the cat sat on the mat", text], 300)
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text
    whole, apart = (len(tokenizer.encode_batch([t])[0]) for t in (text[:4000], text[:2000]))
    assert whole <= 2 * apart  # only the trainer cuts it


def test_saved_and_loaded_it_encodes_alike(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = Tokenizer.load(path)
        assert (again.digest, again.eod_id) == (tokenizer.digest, tokenizer.eod_id)
        np.testing.assert_array_equal(
            again.encode_batch(["the mat"])[0], tokenizer.encode_batch(["the mat"])[0]
        )


def tokenizer_json(*special):
    tokens = [
        {"id": i, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, name in enumerate(special)
    ]
    vocab = {name: i for i, name in enumerate([*special, "a", "b"])}
    return json.dumps(
        {"version": "1.0", "added_tokens": tokens}
        | dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
        | {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": special[0]}}
    )


@pytest.mark.parametrize("name", END_OF_DOCUMENT_NAMES)
def test_the_end_of_a_document_goes_by_many_names(name, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json("<unk>", "<pad>", name), encoding="utf-8")
    assert Tokenizer.load(path).eod_id == 2


def test_llama_3_ends_a_document_not_a_turn(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json("<unk>", "<|eot_id|>", "<|end_of_text|>"), encoding="utf-8")
    assert Tokenizer.load(path).eod_id == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer at .*tokenizer.json: No such file"),
        (b"\x0a\x0e\xff", "byte 2 is not UTF-8"),
        (b'{"version": "1.0"', "is not a tokenizer.json"),
        (b"{}", "is not a tokenizer.json"),
        (tokenizer_json("<unk>", "<pad>").encode(), "its special tokens: <unk> <pad>"),
    ],
)
def test_broken_files_are_named(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value)


def stored(name, length, side, pad, template):
    """The tokenizer.json of a kind, with settings for the batches of some other use in it."""
    backend = Backend.from_str(definition_of(name))
    if length is not None:
        backend.enable_truncation(length, stride=length // 2, direction=side)
    if pad is not None:
        backend.enable_padding(direction=side, length=pad, pad_to_multiple_of=8, pad_id=1)
    if template is not None:
        special = [("<unk>", 0), ("</s>", 1)]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special
        )
    return Tokenizer(backend.to_str(), "it")


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "Metaspace, first", "Llama 2"])
@settings(max_examples=30)
@given(
    text=texts,
    length=st.none() | st.integers(0, 6),
    side=st.sampled_from(["left", "right"]),
    pad=st.none() | st.integers(0, 40),
    template=st.sampled_from([None, "<unk> $A </s>", "$A $A", "$A </s> </s>"]),
)
def test_settings_of_batches_are_left_out(name, text, length, side, pad, template):
    tokenizer = stored(name, length, side, pad, template)
    plain = Tokenizer(definition_of(name), "it")
    for ids, expected in zip(
        tokenizer.encode_batch([text, "a"]), plain.encode_batch([text, "a"]), strict=True
    ):
        np.testing.assert_array_equal(ids, expected)


def test_a_prepared_corpus_is_neither_truncated_nor_padded(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "the a " * n}) + "\n" for n in (1, 200, 40))
    )
    streams = []
    for number, options in enumerate([(None, "right", None, None), (64, "left", 99, "<unk> $A")]):
        build_index([tmp_path / "a.jsonl"], stored("Llama 2", *options), tmp_path / str(number))
        streams.append(IndexedTokens(tmp_path / str(number)).tokens.tolist())
    assert streams[0] == streams[1] and len(streams[0]) > 241


@pytest.mark.parametrize("name", ["</s>", "<|endoftext|>", "<｜end▁of▁sentence｜>"])
@pytest.mark.parametrize("model", ["WordLevel", "Unigram", "BPE"])
@pytest.mark.parametrize("added", [None, False, True])
def test_no_model_ends_a_document_by_its_text(name, model, added):
    """`added`: as a special token or as another; None: only in the vocabulary."""
    vocab = ["<unk>", name, "a", " ", name[0], name[1:]]
    if model == "Unigram":
        what = {"vocab": [[piece, -2.0 - n % 2] for n, piece in enumerate(vocab)], "unk_id": 0}
    else:
        what = {"vocab": {piece: n for n, piece in enumerate(vocab)}, "unk_token": "<unk>"}
    if model == "BPE":
        vocab += [character for character in name[1:] if character not in vocab]
        what["vocab"] = {piece: n for n, piece in enumerate(dict.fromkeys(vocab))}
        merges = [[name[1:n], name[n]] for n in range(2, len(name))]
        what["vocab"] |= {"".join(m): 50 + n for n, m in enumerate(merges[:-1])}
        what |= {"merges": [*merges, [name[0], name[1:]]], "ignore_merges": True}
    token = {"id": 1, "content": name, "special": added, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    space = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}
    definition = json.dumps(
        {"version": "1.0", "added_tokens": [] if added is None else [token]}
        | {"pre_tokenizer": space, "model": {"type": model, **what}}
    )
    tokenizer = Tokenizer(definition, "it")
    assert tokenizer.eod_id == 1
    first, ids, last = tokenizer.encode_batch(["a a", f"a {name} a{name}", name])
    assert 1 not in ids.tolist() + last.tolist() and len(last)
    assert tokenizer.decode(last).replace(" ", "") == name
    assert tokenizer.decode(ids).replace(" ", "").startswith(f"a{name}")
    assert first.tolist() == [2, 3, 2]


def test_a_tokenizer_that_ends_documents_at_what_it_does_not_know_is_refused():
    definition = changed(words_json("</s>"))
    with pytest.raises(DataError, match="it has '</s>' for text that it does not know"):
        Tokenizer(definition, "it").encode_batch(["a b"])
    assert Tokenizer(definition, "it").encode_batch(["a"])[0].tolist() == [1]


def test_a_tokenizer_without_a_token_for_the_text_says_so():
    with pytest.raises(DataError, match="it cannot tokenise the text\n  it says: WordLevel error"):
        Tokenizer(words_json("nothing"), "it").encode_batch(["a b"])


def words_json(unknown):
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": unknown}
    words = {"type": "WhitespaceSplit"}
    return json.dumps(
        {"version": "1.0", "added_tokens": [], "pre_tokenizer": words, "model": model}
    )


def test_random_tokens_are_refused():
    model = json.loads(definition_of("GPT-2"))["model"]
    with pytest.raises(DataError, match=r'dropout of 0\.1\n  works: "dropout": null'):
        Tokenizer(changed(definition_of("GPT-2"), model=model | {"dropout": 0.1}), "it")


def test_ids_beyond_the_type_that_tokens_are_stored_in_are_refused():
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 2**31}, "unk_token": "</s>"}
    with pytest.raises(DataError, match="it has a token 2147483648, beyond 32-bit integers"):
        Tokenizer(json.dumps({"version": "1.0", "added_tokens": [], "model": model}), "it")


def test_merges_without_their_prefix_are_refused():  # they would end the process
    model = json.loads(definition_of("GPT-2"))["model"] | {"continuing_subword_prefix": "x"}
    with pytest.raises(DataError, match="does not begin with its continuing_subword_prefix 'x'"):
        Tokenizer(changed(definition_of("GPT-2"), model=model), "it")


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_every_kind_keeps_its_own_tokens(name):
    """What is switched off changes nothing else: the ids are those of `tokenizers` itself."""
    definition = definition_of(name)
    backend, text = Backend.from_str(definition), "The a b  don't\n\n  foo.\r\n12 "
    expected = backend.encode(text, add_special_tokens=False).ids
    assert Tokenizer(definition, "it").encode_batch([text])[0].tolist() == expected


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_bytes_of_the_tokens_of_a_byte_level_tokenizer_are_those_of_the_text(tokenizer, text):
    (tokens,) = tokenizer.encode_batch([text])
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
    assert tokenizer.token_bytes[tokenizer.eod_id] == 0


def test_tokenizers_of_other_kinds_tell_no_bytes():
    model = models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 2}, unk_token="[UNK]")
    assert Tokenizer(Backend(model).to_str(), "words").token_bytes is None
