"""Finds places to cut a long text such that its pieces have the same tokens as the whole.

A tokenizer works in steps: it finds added tokens, a normaliser changes characters, a pre-tokeniser
splits the text into words, and the model gives each word its tokens. A cut changes nothing if it is
at the end of a word and every step treats both sides as it would without the cut. This holds for
the tokenizers of most models. It does not hold if the tokenizer puts something before a text
(Metaspace, Prepend, `add_prefix_space`), drops white space at its ends (Strip), or treats the whole
text as one word (Llama 2). Such tokenizers get each document whole.
"""

import unicodedata
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken

# They change a character depending on its neighbours only if a combining mark follows.
_PLAIN_NORMALIZERS = frozenset({"NFC", "NFKC"})
_NORMALIZERS = _PLAIN_NORMALIZERS | {
    "NFD",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "BertNormalizer",
}
# They end a word at white space and drop the space, so the model never sees it.
_AT_SPACE = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
# They treat each word by itself, wherever it stands in the text.
_WORD_BY_WORD = _AT_SPACE | {"ByteLevel", "Digits", "Punctuation", "Split"}

_CYRILLIC = "\u052f"  # the last of Latin, Greek and Cyrillic
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
# No match of these spans a place that `last_border` finds, and none looks beyond one.
_PATTERNS = frozenset(
    {
        rf"{_CONTRACTION}|{_BEFORE_WORD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
        for digits in (r"\p{N}{1,3}", r"\p{N}")  # Llama 3, Qwen
    }
    | {
        rf"{_BEFORE_WORD}[{_CAPITALS}]*[{_SMALL}]+{_CONTRACTION}?"
        rf"|{_BEFORE_WORD}[{_CAPITALS}]+[{_SMALL}]*{_CONTRACTION}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"  # gpt-oss
    }
)


def may_cut(
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    added_tokens: Iterable["AddedToken"],
) -> bool:
    """Whether a tokenizer gives the same tokens when a text is cut at a `last_border`.

    Args:
        normalizer: the normaliser as in tokenizer.json.
        pre_tokenizer: the pre-tokeniser as in tokenizer.json.
        added_tokens: all added tokens; special ones are never searched for in a text.
    """
    steps = _flat(pre_tokenizer, "pretokenizers")
    # Words may first be cut at digits; then they have to end at the border.
    ending = next((step for step in steps if step["type"] != "Digits"), None)
    if ending is None:
        return False
    if ending["type"] in _AT_SPACE:
        normalizers = _NORMALIZERS
    elif _ends_words_at_lines(ending):
        normalizers = _PLAIN_NORMALIZERS
    else:
        return False
    normal = {step["type"] for step in _flat(normalizer, "normalizers")}
    return (
        normal <= normalizers
        and {step["type"] for step in steps} <= _WORD_BY_WORD
        and all(token.special or _stays_on_a_side(token, normal) for token in added_tokens)
    )


def last_border(text: str) -> int:
    """The last position, in characters, at which a text may be cut; 0 if there is none.

    It is before a line end that follows a letter or digit (of an alphabet that every version of
    Unicode knows), or after a line end between two ordinary characters.
    """
    end = text.rfind("\n")
    while end > 0:
        start = end - (text[end - 1] == "\r")
        last = text[start - 1 : start]
        if last.isalnum() and last <= _CYRILLIC and _ordinary(last):
            return start
        following = text[end + 1 : end + 2]
        if _ordinary(text[end - 1]) and _ordinary(following) and following != "/":
            return end + 1
        end = text.rfind("\n", 0, end)
    return 0


def _ordinary(character: str) -> bool:
    """Whether a character is not white space, and no normaliser changes or joins it."""
    return (
        character not in ("", " ")
        and character.isprintable()
        and unicodedata.category(character)[0] != "M"
        and unicodedata.is_normalized("NFKC", character)
    )


def _flat(step: dict[str, Any] | None, members: str) -> Sequence[dict[str, Any]]:
    """The steps of a sequence within sequences, in order."""
    if step is None:
        return ()
    if step["type"] != "Sequence":
        return (step,)
    return [inner for member in step[members] for inner in _flat(member, members)]


def _ends_words_at_lines(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":  # with the pattern of GPT-2
        return step["use_regex"] and not step["add_prefix_space"]
    return (
        step["type"] == "Split"
        and step["pattern"].get("Regex") in _PATTERNS
        and (step["behavior"], step["invert"]) in {("Isolated", False), ("Removed", True)}
    )


def _stays_on_a_side(token: "AddedToken", normal: Set[str]) -> bool:
    """Whether an added token is never found across a border, and its match never depends on text
    beyond it."""
    content: str = token.content
    as_it_is = not (token.normalized and normal)  # both the token and the text it is sought in
    return (
        not (token.lstrip or token.rstrip or token.single_word)
        and (content.isspace() or not any(map(str.isspace, content)))
        and (as_it_is or (normal <= _PLAIN_NORMALIZERS and content.isascii()))
    )
