"""Small corpora: a tokenizer trained on a few words, indexed tokens written on the spot."""

import numpy as np
import pytest

from fivefold.data.indexed import IndexedTokens, write_indexed
from fivefold.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.train(["the cat sat on the mat", "a cat, a mat"], 300)


@pytest.fixture(scope="session")
def write_documents(tmp_path_factory):
    """A function that indexes documents, lists of token ids, and opens the result."""

    def write(documents, dtype=np.uint16):
        prefix = tmp_path_factory.mktemp("indexed") / "corpus"
        with write_indexed(prefix, dtype) as writer:
            for document in documents:
                writer.add(np.array(document, dtype=dtype))
                writer.end_document()
        return IndexedTokens(prefix)

    return write
