"""Turns prompts into the same tokens as transformers does."""

from dataclasses import replace

from fivefold.data.tokenizer import Tokenizer, backend_of
from fivefold.data.tokenizer_files import telling
from fivefold.errors import DataError


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text; special tokens that it spells out become these tokens.

    Raises:
        DataError: the tokenizer has no token for a part of the text; shows what a text looks like.
    """
    try:
        ((ids, _),) = tokenizer.encode_spans([(text, ())])
    except DataError as error:
        (mistake,) = error.mistakes
        known = tokenizer.decode(range(min(4, tokenizer.vocab_size)))
        why = (*mistake.why, f"a text of its first tokens: {known!r}")
        raise DataError(replace(mistake, why=why)) from error
    return [int(number) for number in ids]


def end_in(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token that ends an answer: in the text after it, the first special token, else the first
    one."""
    ids = encode_prompt(tokenizer, text)
    return ([number for number in ids if number in tokenizer.special] or ids)[:1]


def opening(tokenizer: Tokenizer) -> list[int]:
    """Tokens that a tokenizer.json's template puts before a text, such as Llama's `<s>`."""
    backend = backend_of(tokenizer.definition, tokenizer.origin, templates=True)
    with telling(f"{tokenizer.origin} cannot tokenise 'a'"):
        whole = backend.encode("a")
    mask: list[int] = whole.special_tokens_mask
    return list(whole.ids[: mask.index(0) if 0 in mask else 0])
