"""Settings of what is learnt from: corpora, tokenizer and packing."""

from dataclasses import dataclass

from fivefold.config.settings import Count, option

MOCK = "mock"
"""The data path of numbers that are made up."""
IGNORED = -100
"""The label of a token that the loss ignores, as in torch."""


@dataclass(frozen=True)
class DataConfig:
    """Corpora, tokenizer and packing."""

    data_path: tuple[str, ...] = option(
        ("builtin",),
        "files, folders, globs (.txt .md .py .jsonl .parquet .arrow), hf://datasets/ORG/NAME/PATH "
        "(what the hub has there), Megatron .bin/.idx prefixes, "
        "'builtin' (the Python standard library's sources), or 'mock' (numbers, to measure "
        "without text); alternate with weights to blend",
    )
    valid_data_path: tuple[str, ...] = option(
        (),
        "validation sets, each NAME=PATH of a kind that data_path takes, with a loss of its own "
        "(eval_loss_NAME) beside that of the validation split",
    )
    tokenizer_model: str | None = option(
        None,
        "path of a tokenizer.json, a SentencePiece model, a vocab.json beside its merges.txt, or "
        "a folder that holds one, or ORG/NAME of a model on the hub; without it a byte-level BPE "
        "is trained on the corpus",
    )
    tokenizer_vocab_size: Count | None = option(
        None, "vocabulary of the tokenizer to train (default: the model's vocab_size)"
    )
    data_cache_path: str | None = option(
        None, "folder for tokenised corpora (default: ~/.cache/fivefold/data)"
    )
    split: str = option("969,30,1", "shares of train, validation and test")
    text_key: str = option("text", "field of a JSON line or Parquet row that holds the text")
    sft: bool = option(
        False,
        "data_path holds conversations: the tokenizer's chat template, loss on answers alone",
    )
    reset_position_ids: bool = option(True, "count positions from each document's start")
    reset_attention_mask: bool = option(True, "let no token attend beyond its document")
    eod_mask_loss: bool = option(
        True, "mask the loss of predicting the token after an end of document"
    )
    document_length: Count | None = option(
        None,
        "tokens of the document that a token lies in, on average, by which predictions count what "
        "it attends to (default: seq_length)",
    )
