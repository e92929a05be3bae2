import gzip
import json
import re
import subprocess
import sys

import pytest

from fivefold.data import corpus
from fivefold.data.corpus import pieces, records
from fivefold.data.paths import resolve
from fivefold.errors import DataError


def documents(path, text_key="text"):
    found, text = [], ""
    for piece, ends in pieces(path, text_key):
        text += piece
        if ends:
            found.append(text)
            text = ""
    assert not text
    return found


def test_a_text_file_is_one_document_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_BYTES", 10)
    text = "first line\nsecond, ünïcödé\n\nlast without an end"
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    assert len(list(pieces(path))) > 2
    assert documents(path) == [text]


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert documents(path) == ["hello"]


def test_lines_and_rows_are_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = tmp_path / "a.jsonl"
    rows = ["one", "", "two\nlines", None, "drei"]
    lines.write_text("\n\n".join(json.dumps({"body": row, "n": 1}) for row in rows))
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": rows}), table)
    assert documents(lines, "body") == documents(table, "body") == ["one", "two\nlines", "drei"]


ROWS = [{"body": "one", "n": 1}, {"body": "zwei\n", "n": 2}, {"body": "", "n": 3}]


def compressed(folder):
    """The rows as lines of JSON in files of every compression."""
    pyarrow = pytest.importorskip("pyarrow")
    data = "\n".join(map(json.dumps, ROWS)).encode()
    (folder / "a.jsonl").write_bytes(data)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(data))
    # Of two frames, as parallel compressors write it
    frames = [pyarrow.compress(part, "zstd", asbytes=True) for part in (data[:20], data[20:])]
    (folder / "a.jsonl.zst").write_bytes(b"".join(frames))


def tables(folder):
    """The rows in a stream of Arrow, as `datasets` saves them, and in Arrow's file."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(ROWS)
    for name, new in (("s.arrow", pyarrow.ipc.new_stream), ("f.arrow", pyarrow.ipc.new_file)):
        with new(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)


def write_table(path, table):
    """Write a Parquet file, or a stream of Arrow, by the name."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    if path.suffix == ".parquet":
        return parquet.write_table(table, path)
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def test_compressed_lines_and_arrow_are_those_rows(tmp_path):
    compressed(tmp_path)
    tables(tmp_path)
    (tmp_path / "cache-1234.arrow").write_text("of datasets.map")
    files = resolve(str(tmp_path))
    names = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "f.arrow", "s.arrow"]
    assert [file.name for file in files] == names
    for file in files:
        assert documents(file, "body") == ["one", "zwei\n"], file
        assert [record for _, record in records(file, ROWS[0])] == ROWS, file


def test_damaged_compressed_files_and_tables_are_named(tmp_path):
    compressed(tmp_path)
    tables(tmp_path)
    for name in ("a.jsonl.gz", "a.jsonl.zst", "s.arrow", "f.arrow"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            documents(path, "body")
    for name in ("a.jsonl.gz", "a.jsonl.zst"):  # as a transfer that was cut short leaves it
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match=f"{name} cannot be read: it has no bytes"):
            documents(tmp_path / name, "body")


def test_splits_of_a_data_set_are_not_mixed(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    works = f"works: --data-path {tmp_path}/train | --data-path {tmp_path}/test"
    with pytest.raises(DataError, match=re.escape(works)):
        resolve(str(tmp_path))


def test_folders_and_globs_are_sorted_and_skip_what_is_no_text(tmp_path):
    for name in ("b.txt", "a/z.md", "a/y.py", "c.png", ".hidden.txt", ".git/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert resolve(str(tmp_path)) == [tmp_path / n for n in ("a/y.py", "a/z.md", "b.txt")]
    assert resolve(f"{tmp_path}/**/*.md") == [tmp_path / "a/z.md"]
    assert resolve(f"{tmp_path}/b.txt") == [tmp_path / "b.txt"]


def test_builtin_is_the_standard_library_without_its_tests():
    files = resolve("builtin")
    assert files == sorted(files)
    names = {file.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not {"site-packages", "test", "tests", "encodings"} & {p for f in files for p in f.parts}
    assert 5e6 < sum(file.stat().st_size for file in files) < 20e6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"abc\xffdef", r"a.txt is not UTF-8: byte 3 is 0xff"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}', r"a.jsonl:2 is not UTF-8: byte 24 is 0xe9"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b"[1]", "a.jsonl:1 is a list, not an object"),
        (
            "a.jsonl",
            b'{"txt": "x", "tex": 1}',
            r"no key 'text', did you mean 'txt'\?\n.*: txt, tex\n  works: --text-key txt$",
        ),
        ("a.jsonl", b'{"meta": {"text": "x"}}', "no key 'text'\n  its keys: meta$"),
        ("a.jsonl", b'{"text": 3}', "a.jsonl:1: 'text' is a number, not a text"),
        ("a.parquet", b"PAR1 nonsense", "a.parquet cannot be read as Parquet"),
    ],
)
def test_bad_content_is_placed(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        documents(path)


def test_the_byte_is_counted_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_BYTES", 4)
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\n" * 10 + b"ba\xffd")
    with pytest.raises(DataError, match="byte 52 is 0xff"):
        documents(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"texts": ["x"], "n": [1], "m": [["x"]]},
            r"did you mean 'texts'\?\n.*: texts, n, m\n  works: --text-key texts$",
        ),
        ({"txt": [1]}, "no column 'text'\n  its columns: txt$"),
        ({"text": [1]}, "column 'text' is int64, not a string"),
        ({"text": [["x"]]}, "column 'text' is list<.*>, not a string"),
    ],
)
def test_bad_columns_are_named(columns, message, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_column_is_one_that_has_the_whole_name(suffix, tmp_path):
    """Not a field of that name in another column, and neither of two of one name."""
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / f"a{suffix}"
    nested = {"a": [{"text": "no"}], "a.text": ["yes"], "text": ["too"]}
    write_table(path, pyarrow.table(nested))
    assert documents(path, "a.text") == ["yes"] and documents(path, "text") == ["too"]
    write_table(path, pyarrow.table([["x"], ["y"], [1]], names=["text", "text", "n"]))
    for read in (documents, lambda path: list(records(path, ["text"]))):
        with pytest.raises(DataError, match=r"a\..* has several columns of one name: text"):
            read(path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_a_column_of_texts_may_be_stored_in_any_way(kind, suffix, tmp_path):
    """Polars writes views, and pandas makes dictionaries of categories."""
    pyarrow = pytest.importorskip("pyarrow")
    text = pyarrow.array(["one", None, "two", "one"])
    if kind == "dictionary":
        text = text.dictionary_encode()
    elif kind != "string":
        text = text.cast(getattr(pyarrow, kind)())
    write_table(tmp_path / f"a{suffix}", pyarrow.table({"text": text}))
    assert documents(tmp_path / f"a{suffix}") == ["one", "two", "one"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_values_that_python_lacks_are_not_read_unless_they_are_asked_for(suffix, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / f"a{suffix}"
    times = pyarrow.array([2**60, None], pyarrow.timestamp("ms"))  # in the year 36 million
    write_table(path, pyarrow.table({"prompt": ["a", "b"], "at": times}))
    read = [record for _, record in records(path, ["prompt", "completion"])]
    assert read == [{"prompt": "a", "at": None}, {"prompt": "b", "at": None}]
    with pytest.raises(DataError, match=r"a\..* cannot be read as"):
        list(records(path, ["at"]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("corpus.tx", r"no such file or folder: .*corpus.tx, did you mean 'corpus.txt'\?"),
        ("elsewhere/corpus.txt", "no such file or folder"),
        ("picture.png", "unknown extension '.png'"),
        ("noextension", r"unknown extension '\(none\)'"),
        ("empty", "nothing to read in .*empty: 0 files\n"),
        ("pictures", "nothing to read in .*pictures: 1 file, with extensions .png"),
        ("*.rst", "nothing to read in .*rst: 0 files"),
    ],
)
def test_paths_that_name_nothing_readable(spec, message, tmp_path):
    for name in ("corpus.txt", "picture.png", "noextension", "pictures/a.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        resolve(f"{tmp_path}/{spec}")


@pytest.mark.parametrize("spec", ["empty", "pictures", "*.rst", "gone", "picture.png", "splits"])
def test_what_is_suggested_is_typed_where_the_path_was(spec, tmp_path):
    """A validation set is mended by its own flag: that of the corpus changes what is learnt."""
    for name in ("empty/.hidden", "pictures/a.png", "picture.png", "splits/dataset_dict.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"splits": ["train", "my test"]}')
    flag = "--valid-data-path held="
    with pytest.raises(DataError) as error:
        resolve(f"{tmp_path}/{spec}", flag)
    works = str(error.value).rpartition("  works: ")[2]
    assert works
    assert all(choice.startswith(flag) for choice in works.split(" | "))


def test_builtin_is_suggested():
    with pytest.raises(DataError, match="did you mean 'builtin'"):
        resolve("buildin")


def test_a_missing_pyarrow_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"needs pyarrow\n  works: pip install"):
        documents(tmp_path / "a.parquet")


def test_a_mark_alone_is_no_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    assert documents(tmp_path / "a.txt") == []


def test_json_lines_may_have_a_mark_and_carriage_returns(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two\\r\\n"}\r\n')
    assert documents(path) == ["one", "two\r\n"]


@pytest.mark.parametrize("line", [r'"\ud800"', r'"\udc00"', r'"\ud800\u0041"', '"a" "b"', "NaN"])
def test_text_that_is_none_is_refused(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "one"}}\n{{"text": {line}}}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not JSON"):
        documents(path)


@pytest.mark.parametrize(("coding", "guess"), [("utf-16", "utf-16"), ("latin1", "latin1")])
def test_the_copy_that_is_offered_can_be_read(coding, guess, tmp_path):
    path = tmp_path / "my text.txt"
    path.write_bytes("déjà vu\n".encode(coding))
    with pytest.raises(DataError, match=f"if it is {guess}") as error:
        documents(path)
    command = str(error.value).rpartition("try:   ")[2]
    subprocess.run(command, shell=True, check=True)
    assert documents(tmp_path / "my text.utf8.txt") == ["déjà vu\n"]


def test_links_are_followed_once(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("b")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("a")
    for name in ("one", "two"):
        (tmp_path / "corpus" / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "corpus")
    found = resolve(str(tmp_path / "corpus"))
    assert found == [tmp_path / "corpus" / name for name in ("a.txt", "one/b.txt")]


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    for spec in (f"{tmp_path}", f"{tmp_path}/*.txt", f"{tmp_path}/b.txt"):
        with pytest.raises(DataError, match=r"b\.txt is a link to nothing"):
            resolve(spec)
    with pytest.raises(DataError, match="File name too long"):
        resolve("x" * 5000)


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        resolve(str(tmp_path))
