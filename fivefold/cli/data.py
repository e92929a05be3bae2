"""`fivefold data`: tokenise a corpus before training, and count its tokens."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.cli.helps import RECIPE_HELP
from fivefold.cli.style import note
from fivefold.config.settings import argument
from fivefold.config.sources import load
from fivefold.counts.derived import as_table
from fivefold.errors import DataError
from fivefold.units import human_count, several


@dataclass(frozen=True)
class Options:
    """Tokenise the corpus of a recipe, cache the result for training, and count its tokens."""

    recipe: str | None = argument(RECIPE_HELP, None)


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    _, config = load(argv, Options, note)
    from fivefold.train.corpora import check_corpora, open_data
    from fivefold.train.folder.fetched import with_fetched_data

    config = with_fetched_data(config, note)
    check_corpora(config)
    data = open_data(config, lambda line: print(line, file=sys.stderr))
    tokenizer = data.tokenizer
    rows = [
        ("vocabulary", f"{tokenizer.vocab_size:,}", f"of the model's {config.model.vocab_size:,}")
    ]
    for corpus in data.corpora:
        tokens, documents = len(corpus.data.tokens), corpus.data.num_documents
        weight = f", weight {corpus.weight}" if corpus.weight else ""
        why = f"in {several(documents, 'document')}{weight}"
        rows.append((corpus.name, f"{human_count(tokens)} tokens", why))
    for name, corpus in data.named.items():
        tokens, documents = len(corpus.data.tokens), corpus.data.num_documents
        source = f"in {several(documents, 'document')} of {corpus.name}"
        rows.append((f"validation set {name}", f"{human_count(tokens)} tokens", source))
    length, batch = config.training.seq_length, config.training.global_batch_size
    for part in ("train", "valid", "test"):
        try:
            dataset = getattr(data, part)
        except DataError:
            rows.append((part, "none", "too little text, or no share in --split"))
            continue
        samples = dataset.num_samples
        whys = [f"of {length} tokens: {samples / batch:.1f} steps of {batch}", dataset.packed]
        why = ", ".join(filter(None, whys))
        rows.append((part, several(samples, "sample"), why))
    print(as_table(rows))
    return 0
