"""Settings of the data: corpora, tokenizer and packing."""

from dataclasses import dataclass

from fivefold.config.settings import Count, Probability, option

MOCK = "mock"
"""The data path of synthetic tokens."""
IGNORED = -100
"""The label of a token that the loss ignores, as in torch."""
FIM_TOKENS = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")
"""Settings that name the tokens of rearranged documents (FIM)."""


@dataclass(frozen=True)
class DataConfig:
    """Corpora, tokenizer and packing."""

    data_path: tuple[str, ...] = option(
        ("builtin",),
        "files, folders, globs (.txt .md .py .jsonl .parquet .arrow), "
        "hf://datasets/ORG/NAME/PATH, Megatron .bin/.idx prefixes, 'builtin' (the sources of "
        "Python's standard library), or 'mock' (made-up numbers, to measure without a corpus); "
        "weights and paths alternately to blend",
    )
    valid_data_path: tuple[str, ...] = option(
        (),
        "validation sets, each NAME=PATH with a path as for data_path; each has its own loss "
        "(eval_loss_NAME)",
    )
    tokenizer_model: str | None = option(
        None,
        "path of a tokenizer.json, a SentencePiece model, a vocab.json with merges.txt, or a "
        "folder with one of these, or ORG/NAME on the hub; none: train a byte-level BPE on the "
        "corpus",
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
        "data_path holds conversations: apply the tokenizer's chat template; only answers have "
        "a loss",
    )
    fim_data: bool = option(
        False,
        "rearrange documents as prefix, suffix and middle, so that the model learns to fill in "
        "(FIM)",
    )
    fim_rate: Probability = option(0.5, "share of documents that are rearranged")
    fim_spm_rate: Probability = option(
        0.5, "share of the rearranged documents whose suffix comes before their prefix"
    )
    fim_split_sample: str | None = option(
        None,
        "token between the parts of a document, such as the files of a repository; parts are "
        "rearranged separately",
    )
    fim_fragment_rate: Probability | None = option(
        None, "with fim_split_sample: share of parts that are rearranged"
    )
    fim_no_prefix: str | None = option(
        None, "documents and parts that begin with this text stay as they are"
    )
    fim_prefix_token: str = option("<fim_prefix>", "token before the prefix")
    fim_middle_token: str = option("<fim_middle>", "token before the middle")
    fim_suffix_token: str = option("<fim_suffix>", "token before the suffix")
    reset_position_ids: bool = option(True, "count positions from each document's start")
    reset_attention_mask: bool = option(True, "let no token attend beyond its document")
    eod_mask_loss: bool = option(
        True, "mask the loss of predicting the token after an end of document"
    )
    document_length: Count | None = option(
        None,
        "mean length of a token's document, for predictions of attention (default: seq_length)",
    )
