"""Documents whose middle comes last: nothing of them is lost, and each draw is the sample's own."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.batch_sizes import BatchSizes
from fivefold.config.data import FIM_TOKENS, DataConfig
from fivefold.data.dataset import Corpus, Dataset
from fivefold.data.indexed import IndexedTokens
from fivefold.data.infilling import Infilling
from fivefold.data.loader import Loader
from fivefold.data.packing import Packing
from fivefold.data.rules import checked_sources
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import ConfigError, DataError

CONFIG = DataConfig(fim_data=True, fim_rate=1.0)
PREFIX, MIDDLE, SUFFIX = (getattr(CONFIG, name) for name in FIM_TOKENS)
SPLIT = "<file_sep>"
TEXTS = st.text("the cat sat, on a mat\n\té\N{CAT FACE}", max_size=60)


@pytest.fixture(scope="module")
def coder() -> Tokenizer:
    special = (PREFIX, MIDDLE, SUFFIX, SPLIT)
    return Tokenizer.train(["the cat sat on the mat", "a cat, a mat"], 300, special)


def tokens_of(coder: Tokenizer, *documents: str) -> np.ndarray:
    """Documents with their ends, and parts of a document between separators."""
    ids: list[np.ndarray] = []
    for document in documents:
        ids += [part for part, _ in coder.encode_spans([(document, ())])]
        ids.append(np.array([coder.eod_id]))
    return np.concatenate(ids).astype(np.int64)


def made(coder: Tokenizer, window: np.ndarray, seed: int = 0, **values: Any) -> list[str]:
    """The documents that a window becomes, with room for all markers."""
    room = np.full(4 * (window == coder.eod_id).sum() + len(window), coder.eod_id)
    infilling = Infilling(replace(CONFIG, **values), coder)
    found = infilling(np.concatenate([window, room]), Random(seed))
    end = coder.decode([coder.eod_id])
    return coder.decode(found).split(end)


def original(document: str) -> str:
    """A document as it was, of one with its middle last."""
    if not document.startswith(PREFIX):
        return document
    document = document.removeprefix(PREFIX)
    if document.startswith(SUFFIX):  # the second form, or an empty prefix, which is the same
        suffix, _, rest = document.removeprefix(SUFFIX).partition(MIDDLE)
        return rest + suffix
    prefix, _, rest = document.partition(SUFFIX)
    suffix, _, middle = rest.partition(MIDDLE)
    return prefix + middle + suffix


@given(documents=st.lists(TEXTS, min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_what_is_rearranged_can_be_put_together_again(
    coder: Tokenizer, documents: list[str], seed: int
) -> None:
    found = made(coder, tokens_of(coder, *documents), seed)[: len(documents)]
    for document, new in zip(documents, found, strict=True):
        assert original(new) == document
        assert new.startswith(PREFIX) or not document


def test_both_forms_are_those_of_the_paper(coder: Tokenizer) -> None:
    window = tokens_of(coder, "the cat sat on the mat")
    first = made(coder, window, fim_spm_rate=0.0)[0]
    second = made(coder, window, fim_spm_rate=1.0)[0]
    prefix, _, rest = first.removeprefix(PREFIX).partition(SUFFIX)
    suffix, _, middle = rest.partition(MIDDLE)
    assert prefix + middle + suffix == "the cat sat on the mat"
    assert second == f"{PREFIX}{SUFFIX}{suffix}{MIDDLE}{prefix}{middle}"


def test_as_many_as_said(coder: Tokenizer) -> None:
    window = tokens_of(coder, *["the cat sat"] * 400)
    for rate in (0.0, 0.3, 1.0):
        found = made(coder, window, fim_rate=rate, fim_spm_rate=0.8)[:400]
        moved = [document for document in found if document != "the cat sat"]
        assert len(moved) / 400 == pytest.approx(rate, abs=0.08)
        second = [document for document in moved if document.startswith(PREFIX + SUFFIX)]
        assert not moved or len(second) / len(moved) == pytest.approx(0.8, abs=0.12)


def test_parts_are_rearranged_by_themselves(coder: Tokenizer) -> None:
    files = ["the cat", "a mat", "", "on the mat"]
    window = tokens_of(coder, SPLIT.join(files), "a cat")
    found = made(coder, window, fim_split_sample=SPLIT, fim_fragment_rate=1.0, fim_spm_rate=0.0)
    assert [original(part) for part in found[0].split(SPLIT)] == files
    assert [part.startswith(PREFIX) for part in found[0].split(SPLIT)] == [True, True, False, True]
    assert found[1].startswith(PREFIX)  # a document without parts, by fim_rate
    kept = made(coder, window, fim_split_sample=SPLIT, fim_fragment_rate=0.0)
    assert kept[0] == SPLIT.join(files) and kept[1].startswith(PREFIX)
    whole = made(coder, window)[0]  # separators are text like any other, and stay whole
    assert whole.count(SPLIT) == 3 and (original(whole) == SPLIT.join(files))


def test_what_begins_as_said_stays_as_it_is(coder: Tokenizer) -> None:
    window = tokens_of(coder, "the cat", "a mat")
    first, second = made(coder, window, fim_no_prefix="the")[:2]
    assert first == "the cat" and second.startswith(PREFIX)


def test_tokens_that_are_no_text_stay_as_they_are(coder: Tokenizer) -> None:
    """A sample may begin within a character."""
    ids = tokens_of(coder, "\N{CAT FACE} sat")[1:]
    infilling = Infilling(CONFIG, coder)
    assert infilling(ids, Random(0)).tolist() == ids.tolist()


@pytest.fixture(scope="module")
def dataset(
    coder: Tokenizer, write_documents: Callable[..., IndexedTokens]
) -> Callable[..., Dataset]:
    documents = [tokens_of(coder, f"the cat sat on mat {n}").tolist() for n in range(80)]
    corpus = Corpus("corpus", write_documents(documents))

    def of(length: int = 32, **values: Any) -> Dataset:
        config = replace(CONFIG, **values)
        return Dataset(
            [corpus],
            coder,
            Packing(length, coder.eod_id),
            split="1",
            part="train",
            seed=5,
            shuffle=True,
            infilling=Infilling(config, coder) if config.fim_data else None,
        )

    return of


def test_a_sample_is_drawn_by_its_number_alone(dataset: Callable[..., Dataset]) -> None:
    one, other, plain = dataset(), dataset(), dataset(fim_data=False)
    size = one.num_samples
    for index in (3, 0, size + 1, 3):
        window, marks = one.window(index)
        assert marks is None and len(window) == 33
        assert window.tolist() == other.window(index)[0].tolist()
        assert window.tolist() != plain.window(index)[0].tolist()
    epochs = [
        {one.locate(n)[1]: one.window(n)[0].tolist() for n in range(e * size, (e + 1) * size)}
        for e in range(2)
    ]
    assert sum(epochs[0][sample] == epochs[1][sample] for sample in range(size)) < size / 10


def test_a_run_goes_on_with_the_same_draws_only(dataset: Callable[..., Dataset]) -> None:
    def loader(**values: Any) -> Loader:
        samples = dataset(**values)
        return Loader(samples, batch_sizes=BatchSizes(2), micro_batch_size=1, dp_rank=0, dp_size=1)

    state = loader().state_dict()
    loader().load_state_dict(state)
    for changed in ({"fim_rate": 0.4}, {"fim_data": False}):
        with pytest.raises(DataError, match=r"fim_rate: was 1"):
            loader(**changed).load_state_dict(state)


def test_a_tokenizer_without_the_tokens_names_its_own(coder: Tokenizer) -> None:
    with pytest.raises(DataError) as error:
        Infilling(replace(CONFIG, fim_middle_token="<|fim_middle|>"), coder)
    said = str(error.value)
    assert "fim_middle_token is '<|fim_middle|>'" in said and MIDDLE in said
    assert "--fim-middle-token" in said and "--fim-prefix-token" not in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fim_suffix_token": PREFIX}, "must differ from each other"),
        ({"fim_split_sample": SPLIT}, "needs fim_fragment_rate"),
        ({"fim_split_sample": PREFIX, "fim_fragment_rate": 0.5}, "separates parts of a document"),
        ({"tokenizer_vocab_size": 259}, r"\+ 3 of fim_data = 260"),
    ],
)
def test_contradictions_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked_sources(replace(CONFIG, **values), 0)
