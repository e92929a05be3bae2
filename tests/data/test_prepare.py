import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fivefold.config.data import DataConfig
from fivefold.data import prepare as module
from fivefold.data.indexed import write_indexed
from fivefold.data.mixture import parse_data_path
from fivefold.data.prepare import prepare
from fivefold.errors import ConfigError, DataError

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 40


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    lines = [json.dumps({"text": f"line {n}: {TEXT[: n + 30]}"}) for n in range(60)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def config(texts):
    def config(*paths, **options):
        defaults = {
            "tokenizer_vocab_size": 280,
            "split": "8,2",
            "data_cache_path": f"{texts}/cache",
        }
        paths = tuple(p if p[0].isdigit() else f"{texts}/{p}" for p in paths)
        return DataConfig(data_path=paths, **defaults | options)

    return config


def test_the_corpus_is_the_text_with_ends_of_documents(config):
    prepared = prepare(config("a.txt", "b.jsonl"), 16, 1)
    (corpus,) = prepared.corpora
    assert corpus.name == "a.txt + b.jsonl"
    text = prepared.tokenizer.decode(corpus.data.tokens)
    documents = text.split("<|endoftext|>")
    assert documents[0] == TEXT
    assert documents[60] == f"line 59: {TEXT[:89]}"
    assert documents[61:] == [""]
    assert corpus.data.num_documents == 61
    assert prepared.train.num_samples > prepared.valid.num_samples > 0


def test_pieces_of_a_document_stay_one_document(config, monkeypatch):
    whole = prepare(config("a.txt"), 16, 1).corpora[0].data
    monkeypatch.setattr("fivefold.data.corpus.PIECE_BYTES", 100)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 150)
    monkeypatch.setattr(module, "_CACHE_VERSION", 0)
    pieces = prepare(config("a.txt"), 16, 1).corpora[0].data
    assert pieces.num_documents == 1
    np.testing.assert_array_equal(pieces.tokens, whole.tokens)


def test_the_second_time_nothing_is_done(config, texts):
    said = []
    first = prepare(config("a.txt"), 16, 1, said.append)
    assert any("tokenised" in line for line in said) and any("training" in line for line in said)
    said.clear()
    again = prepare(config("a.txt"), 16, 1, said.append)
    assert said == []
    assert again.train.fingerprint == first.train.fingerprint
    (texts / "a.txt").write_text(TEXT + "more")
    changed = prepare(config("a.txt"), 16, 1, said.append)
    assert any("tokenised" in line for line in said)
    assert changed.train.fingerprint != first.train.fingerprint


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl"])
def test_text_that_is_removed_while_it_is_read_is_named(config, texts, name):
    """At each line that the work tells; what is half made then is not taken for whole."""
    path, refused = texts / name, 0
    content = path.read_bytes()
    for moment in range(4):
        settings = config("a.txt", "b.jsonl", data_cache_path=f"{texts}/cache {moment}")
        said = []

        def tell(line, said=said, moment=moment):
            said.append(line)
            if len(said) == moment + 1:
                path.unlink()

        try:
            prepare(settings, 16, 1, tell)
        except DataError as error:
            assert str(error) == f"{path} was there when the command began, and is gone"
            refused += 1
        path.write_bytes(content)
        assert prepare(settings, 16, 1).train.num_samples
    assert refused == 3  # but not when all is read


def test_a_moved_corpus_is_the_same_data(config, texts):
    before = prepare(config("a.txt"), 16, 1).train.fingerprint
    (texts / "elsewhere").mkdir()
    (texts / "a.txt").rename(texts / "elsewhere" / "a.txt")
    assert prepare(config("elsewhere/a.txt"), 16, 1).train.fingerprint == before


def test_weights_make_corpora_of_their_own(config):
    prepared = prepare(config("0.25", "a.txt", "0.75", "b.jsonl"), 16, 1)
    assert [corpus.name for corpus in prepared.corpora] == ["a.txt", "b.jsonl"]
    corpora = [prepared.train.locate(i)[0] for i in range(400)]
    assert corpora.count(0) == 100


def test_indexed_data_is_used_where_it_is(config, texts):
    tokenizer = prepare(config("a.txt"), 16, 1).tokenizer
    tokenizer.save(texts / "tokenizer.json")
    with write_indexed(texts / "mine", np.int32) as writer:
        writer.add(np.arange(1, 200))
        writer.end_document()
    needless = {"tokenizer_model": f"{texts}/tokenizer.json", "data_cache_path": f"{texts}/a.txt"}
    for name in ("mine", "mine.bin", "mine.idx"):
        prepared = prepare(config(name, **needless), 16, 1)  # a folder that cannot be made
        assert prepared.corpora[0].data.prefix == f"{texts}/mine"
        assert prepared.corpora[0].data.tokens.tolist() == list(range(1, 200))


def test_a_user_without_a_home_names_a_cache_or_needs_none(config, texts, monkeypatch):
    """As in containers that run under a number for which they have no name."""
    prepare(config("a.txt"), 16, 1).tokenizer.save(texts / "tokenizer.json")
    with write_indexed(texts / "mine", np.int32) as writer:
        writer.add(np.arange(1, 200))
        writer.end_document()

    def nobody(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(DataError, match=r"cache folder ~(?s:.*)no home ~\n  data_cache_path"):
        prepare(config("a.txt", data_cache_path=None), 16, 1)
    known = {"tokenizer_model": f"{texts}/tokenizer.json", "data_cache_path": None}
    assert len(prepare(config("mine", **known), 16, 1).corpora[0].data.tokens) == 199


def test_settings_of_the_packing_arrive(config):
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        packing = prepare(config("a.txt", **{name: False}), 16, 1).packing
        assert getattr(packing, name) is False
        assert packing.seq_length == 16


def test_a_short_split_is_an_error_only_when_it_is_used(config):
    prepared = prepare(config("a.txt", split="999,1"), 64, 1)
    assert prepared.train.num_samples > 0
    with pytest.raises(DataError, match=r"the valid split of a\.txt is too short"):
        prepared.valid  # noqa: B018


@pytest.mark.parametrize(("of_all", "per_token"), [(1000, 100), (100_000, 2)])
def test_the_tokenizer_learns_from_a_share_of_a_large_corpus(of_all, per_token, texts, monkeypatch):
    """Limited in all, or by the size of its vocabulary."""
    files = [texts / "b.jsonl"]
    whole = list(module._sample(files, "text", 500))
    assert len(whole) == 60
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", of_all)
    monkeypatch.setattr(module, "_CHARACTERS_PER_TOKEN", per_token)
    some = list(module._sample(files, "text", 500))
    assert 800 < sum(map(len, some)) < 1200
    assert some[0] == whole[0] and whole.index(some[-1]) > 40


def test_many_at_once_tokenise_once(config):
    said = []
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: prepare(config("a.txt"), 16, 1, said.append), range(4)))
    assert sum("tokenised" in line for line in said) == 1
    assert all(run.train.fingerprint == runs[0].train.fingerprint for run in runs)


@pytest.fixture
def locks_of_each_host(monkeypatch):
    """Locks that other machines do not see, as of BeeGFS and some mounts of NFS and Lustre."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)

    def moved_to(host):
        monkeypatch.setattr("socket.gethostname", lambda: host)

    moved_to("one")
    return moved_to


@pytest.mark.parametrize("work", ["training", "tokenising"])
def test_machines_that_do_not_see_each_others_locks_prepare_at_once(
    work, config, locks_of_each_host, monkeypatch
):
    works, others, read = ["training", "tokenising"], [], module.pieces

    def pieces(*arguments, **options):
        begun = works.pop(0) if works else ""
        for piece in read(*arguments, **options):
            if begun == work and not others:
                locks_of_each_host("two")
                others.append(prepare(config("a.txt"), 16, 1))
            yield piece

    monkeypatch.setattr(module, "pieces", pieces)
    mine = prepare(config("a.txt"), 16, 1)
    (other,) = others
    assert other.train.fingerprint == mine.train.fingerprint


@pytest.mark.parametrize(("host", "gone"), [("one", True), ("two", False)])
def test_what_a_killed_process_left_is_removed(host, gone, config, texts, locks_of_each_host):
    prepare(config("a.txt"), 16, 1)
    (made,) = (texts / "cache").glob("*.bin")
    left = made.with_name(f".tmp-0123abcd-{made.name}")
    locks_of_each_host(host)
    for is_old in (False, True):
        left.touch()
        if is_old:
            os.utime(left, (0, 0))
        made.with_suffix(".idx").unlink()
        prepare(config("a.txt"), 16, 1)
        assert left.exists() != (is_old or gone)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a", "b"], [("a", None), ("b", None)]),
        (["0.3", "a", "0.7", "b"], [("a", 0.3), ("b", 0.7)]),
        (["0.5 a 2 b"], [("a", 0.5), ("b", 2)]),
        (["one file.txt"], [("one file.txt", None)]),
    ],
)
def test_data_paths_are_parsed(words, expected):
    sources = parse_data_path(words)
    assert [(s.path, s.weight and float(s.weight)) for s in sources] == expected


def test_a_file_whose_name_begins_with_a_number_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2024 texts.txt").touch()
    assert [s.path for s in parse_data_path(["2024 texts.txt"])] == ["2024 texts.txt"]


def test_every_mistake_is_told_at_once():
    config = DataConfig(
        data_path=("0.3", "a", "-1", "0.5", "b"), split="1,2,3,4", tokenizer_vocab_size=100
    )
    with pytest.raises(ConfigError) as error:
        prepare(config, 16, -1)
    assert [mistake.what for mistake in error.value.mistakes] == [
        "data_path has 5 entries; weights and paths by turns make an even number",
        "weight -1 in data_path is not positive",
        "entry 4 of data_path is 0.5, where a path should be",
        "entry 5 of data_path is 'b', where a weight should be",
        "split '1,2,3,4' is not up to three shares, of train, valid, test",
        "tokenizer_vocab_size 100 is too small for a byte-level BPE",
        "seed -1 is negative",
    ]


def test_indexed_data_needs_its_tokenizer(config, texts):
    (texts / "mine.idx").write_bytes(b"")
    with pytest.raises(ConfigError, match="tokenizer_model has to name their tokenizer"):
        prepare(config("mine"), 16, 1)


def test_an_empty_corpus_is_refused(config, texts):
    (texts / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"no text in 1 file, the first is .*empty\.txt"):
        prepare(config("empty.txt"), 16, 1)
    assert not list((texts / "cache").glob("*.idx"))


def test_a_cache_that_cannot_be_made_is_named(config, texts):
    with pytest.raises(DataError, match=r"cannot make the cache folder .*a\.txt"):
        prepare(config("a.txt", data_cache_path=f"{texts}/a.txt"), 16, 1)


def test_the_room_needs_no_torch():
    code = (
        "import sys, fivefold.data.prepare, fivefold.data.loader;"
        "print(sorted({'torch', 'tokenizers', 'pyarrow'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_documents_without_tokens_are_left_out(config, texts):
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "<unk>": 1, "a": 2}, "unk_token": "<unk>"}
    definition = {"version": "1.0", "added_tokens": [], "model": model}
    definition["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (texts / "t.json").write_text(json.dumps(definition))
    rows = ["a a", " \n ", "a"]
    (texts / "c.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    prepared = prepare(config("c.jsonl", tokenizer_model=f"{texts}/t.json", split="1"), 1, 1)
    data = prepared.corpora[0].data
    assert data.tokens.tolist() == [2, 2, 0, 2, 0]
    assert data.num_documents == data.num_sequences == 2


@pytest.mark.parametrize("name", ["flush", "replace"])
def test_a_full_disk_is_named(name, config, texts, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace" if name == "replace" else "fivefold.files._fsync", full)
    with pytest.raises(
        DataError, match=r"cannot write .*: No space left on device\n  works: --data"
    ):
        prepare(config("a.txt"), 16, 1)
    assert not list((texts / "cache").glob("*.idx"))
