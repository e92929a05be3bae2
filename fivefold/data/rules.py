"""Checks the settings of the data without opening a file."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivefold.config.data import FIM_TOKENS, MOCK
from fivefold.data.dataset import parse_split
from fivefold.data.mixture import Source, parse_data_path, parse_named_paths
from fivefold.data.tokenizer import SMALLEST_VOCAB_SIZE
from fivefold.errors import Mistakes

if TYPE_CHECKING:
    from fivefold.config.data import DataConfig

DEFAULT_VOCAB_SIZE = 8192


def checked_sources(config: "DataConfig", seed: int, model_size: int | None = None) -> list[Source]:
    """Check the settings of the data without opening a file; return the training corpora.

    Args:
        config: settings of the data.
        seed: seed of the run.
        model_size: entries of the model's vocabulary, as many as a tokenizer to train has unless
            it is told otherwise; None: there is no model.

    Raises:
        ConfigError: all mistakes at once.
    """
    mistakes = Mistakes()
    sources: list[Source] = []
    with mistakes.collecting():
        sources = parse_data_path(config.data_path)
    named: dict[str, Source] = {}
    with mistakes.collecting():
        named = parse_named_paths(config.valid_data_path)
    with mistakes.collecting():
        parse_split(config.split)
    indexed = [s.path for s in (*sources, *named.values()) if s.indexed_prefix]
    if indexed and config.tokenizer_model is None:
        mistakes.add(
            f"{indexed[0]} holds tokens already, so tokenizer_model has to name their tokenizer",
            "--tokenizer-model takes the path of a tokenizer.json or a SentencePiece model, or of "
            "a folder that holds one",
        )
    made_up = any(source.path == MOCK for source in sources)
    if config.fim_data:
        _check_infilling(config, mistakes)
    if made_up:
        _check_mock(config, mistakes)
    elif config.sft:
        _check_sft(config, indexed, mistakes)
    if config.tokenizer_model is None:
        _check_vocabulary(config, model_size, mistakes, made_up=made_up)
    if seed < 0:
        mistakes.add(f"seed {seed} is negative")
    mistakes.raise_if_any()
    return sources


def _check_vocabulary(
    config: "DataConfig", model_size: int | None, mistakes: Mistakes, *, made_up: bool
) -> None:
    """Collect the mistake of a vocabulary too small for a tokenizer to train."""
    what, why, least = "a byte-level BPE", "256 bytes + 1 end of document", SMALLEST_VOCAB_SIZE
    if made_up:
        what, why, least = "numbers", "1 number + 1 end of document", 2
    elif config.fim_data:
        why, least = f"{why} + {len(FIM_TOKENS)} of fim_data", least + len(FIM_TOKENS)
    asked = config.tokenizer_vocab_size
    size, name = (model_size, "vocab_size") if asked is None else (asked, "tokenizer_vocab_size")
    if size is None or size >= least:
        return

    def flags(enough: int) -> str:
        """Those of a tokenizer of this size, and of a model that has an entry for each token."""
        of_model = [f"--vocab-size {enough}"] if enough > (model_size or enough) else []
        of_tokenizer = [f"--tokenizer-vocab-size {enough}"] if asked is not None else []
        return " ".join(of_model + of_tokenizer)

    works = [flags(enough) for enough in (least, DEFAULT_VOCAB_SIZE)]
    mistakes.add(f"{name} {size} is too small for {what}", f"{why} = {least}", works=works)


def _check_infilling(config: "DataConfig", mistakes: Mistakes) -> None:
    """Collect settings that contradict infilling."""
    tokens = {name: getattr(config, name) for name in FIM_TOKENS}
    if len(set(tokens.values())) < len(tokens):
        said = ", ".join(f"{name} {token}" for name, token in tokens.items())
        mistakes.add(f"the tokens of fim_data must differ from each other: {said}")
    if config.fim_split_sample in tokens.values():
        mistakes.add(
            f"fim_split_sample {config.fim_split_sample} separates parts of a document, and "
            "cannot be one of the tokens that fim_data inserts into them",
            works=["--fim-split-sample none"],
        )
    if config.fim_split_sample is not None and config.fim_fragment_rate is None:
        mistakes.add(
            "fim_split_sample needs fim_fragment_rate, the share of the parts to rearrange",
            works=["--fim-fragment-rate 0.5"],
        )


def _check_mock(config: "DataConfig", mistakes: Mistakes) -> None:
    """Collect settings that contradict synthetic tokens."""
    if tuple(config.data_path) != (MOCK,):
        mistakes.add(
            f"{MOCK} cannot be part of a blend: it has more tokens than any run reads",
            works=[f"--data-path {MOCK}"],
        )
    if config.valid_data_path and config.tokenizer_model is None:
        mistakes.add(
            f"valid_data_path needs tokenizer_model beside {MOCK}, whose tokens stand for no text",
            works=["--valid-data-path none"],
        )
    if config.sft:
        mistakes.add(f"{MOCK} holds no conversations, which sft reads", works=["--no-sft"])


def _check_sft(config: "DataConfig", indexed: Sequence[str], mistakes: Mistakes) -> None:
    """Collect settings that contradict training on conversations."""
    if indexed:
        mistakes.add(
            f"{indexed[0]} holds tokens already, and sft needs conversations: .jsonl or .parquet",
            works=["--no-sft"],
        )
    if config.tokenizer_model is None:
        mistakes.add(
            "sft needs tokenizer_model: conversations become text by the tokenizer's chat template",
            "--tokenizer-model takes the folder of a chat model, with its tokenizer.json",
            works=["--no-sft"],
        )
    if config.text_key != "text":
        mistakes.add(
            f"text_key {config.text_key} names a field of text, and sft reads conversations",
            works=["--text-key text", "--no-sft"],
        )
    if not config.eod_mask_loss:
        mistakes.add(
            "no eod_mask_loss has no effect with sft: answers alone are learnt",
            works=["--eod-mask-loss", "--no-sft"],
        )
