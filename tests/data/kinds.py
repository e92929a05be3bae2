"""Small tokenizers of every kind of normaliser and pre-tokeniser, and texts to tell them apart."""

import json
from functools import cache

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, trainers
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

BITS = (
    *("a", "b", "the", "The", ".", ";", "/", "_", "-", "'s", "'", "don't", "</s>"),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\x1c", "\x85", "\u00a0", "\u2028", "\u3000"),
    *("1", "12", "1234", "é", "e\u0301", "\u0301", "¨", "ͺ", "İ", "ﬁ", "क़", "ΑΣ", "ü", "𝄞"),
    *("你", "。", "한", "\u1100\u1161", "😀", "\u200d", "\ufeff", "x\ny", "a\nb", "foo\r\nbar"),
)
texts = st.lists(st.sampled_from(BITS), min_size=1, max_size=40).map("".join)

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + CONTRACTION
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + CONTRACTION
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + SPACES
)


def regex(pattern, behavior="isolated", invert=False):
    split = pre.Split(Regex(pattern), behavior, invert)
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def sequence(*steps):
    return pre.Sequence(list(steps))


GPT2 = pre.ByteLevel(add_prefix_space=False)
PREPEND = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
UNCASED = norm.Sequence([norm.NFD(), norm.Lowercase(), norm.StripAccents()])

# name: normaliser, pre-tokeniser, added tokens
CUT = {
    "GPT-2": (None, GPT2, ()),
    "GPT-NeoX": (norm.NFC(), GPT2, ("  ", "    ")),
    "Llama 3": (None, regex(LLAMA3), ("<tool>",)),
    "Qwen": (norm.NFC(), regex(LLAMA3.replace("{1,3}", "")), ()),
    "gpt-oss": (norm.NFKC(), regex(GPT_OSS), ()),
    "the inverse of Llama 3": (None, regex(LLAMA3, "removed", True), ()),
    "StarCoder": (None, sequence(pre.Digits(individual_digits=True), GPT2), ("\n\n",)),
    "BERT": (norm.BertNormalizer(), pre.BertPreTokenizer(), ()),
    "uncased words": (UNCASED, pre.Whitespace(), ()),
    "words": (norm.NFKD(), sequence(pre.Digits(), pre.WhitespaceSplit()), ()),
    "prefixed words": (None, sequence(pre.WhitespaceSplit(), pre.ByteLevel()), ()),
}
WHOLE = {
    "ByteLevel with a prefix": (None, pre.ByteLevel(add_prefix_space=True), ()),
    "Metaspace, always": (None, pre.Metaspace(prepend_scheme="always"), ()),
    "Metaspace, first": (None, pre.Metaspace(prepend_scheme="first"), ()),
    "Metaspace, never": (None, pre.Metaspace(prepend_scheme="never"), ()),
    "Metaspace, whole": (None, pre.Metaspace(prepend_scheme="first", split=False), ()),
    "T5": (norm.NFKC(), sequence(pre.WhitespaceSplit(), pre.Metaspace()), ()),
    "Mistral": (None, sequence(pre.Metaspace(prepend_scheme="first"), pre.Digits()), ()),
    "Llama 2": (PREPEND, None, ()),
    "no pre-tokeniser": (None, None, ()),
    "Strip": (norm.Strip(), GPT2, ()),
    "Replace": (norm.Replace(Regex(r"\n+"), "\n"), GPT2, ()),
    "lower case": (norm.Lowercase(), GPT2, ()),
    "a decomposing normaliser": (norm.NFD(), regex(LLAMA3), ()),
    "BERT's spaces": (norm.BertNormalizer(), GPT2, ()),
    "punctuation": (None, pre.Punctuation(), ()),
    "scripts": (None, pre.UnicodeScripts(), ()),
    "fixed length": (None, pre.FixedLength(length=3), ()),
    "another pattern": (None, regex(r".{7}|\s"), ()),
    "the pattern of Llama 3, joined": (None, regex(LLAMA3, "merged_with_next"), ()),
    "a token over a line end": (None, GPT2, ("a\nb",)),
    "a token that takes what is left of it": (None, GPT2, (AddedToken("a", lstrip=True),)),
    "a token that takes what is right of it": (None, GPT2, (AddedToken("b", rstrip=True),)),
    "a token that is a word": (None, GPT2, (AddedToken("\n", single_word=True),)),
    "spaces that BERT makes": (norm.BertNormalizer(), pre.BertPreTokenizer(), ("  ",)),
}


@cache
def definition_of(name, model="BPE"):
    """The tokenizer.json of a kind."""
    normalizer, pre_tokenizer, added = (CUT | WHOLE)[name]
    options = {"special_tokens": ["<unk>", "</s>"], "show_progress": False}
    if model == "BPE":
        backend = Backend(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=600, **options)
    else:
        backend = Backend(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", **options)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    # Each bit beside each other one, so that whatever may join has been seen together.
    lines = [one + other for one in BITS for other in BITS]
    backend.train_from_iterator(lines, trainer)
    backend.add_tokens(list(added))
    return backend.to_str()


def changed(definition, **settings):
    """A tokenizer.json with some of its settings replaced."""
    return json.dumps(json.loads(definition) | settings)
