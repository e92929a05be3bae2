"""Flags of older releases of Megatron-LM, and of what grew from it, in flags of the release.

Sources: `megatron/arguments.py` of Megatron-LM's releases 1 to 3, and of the Megatron-DeepSpeed of
DeepSpeed and of BigScience, and of bigcode's Megatron-LM; `loongforge/train/arguments.py`, and
`mindspeed_llm`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from fivefold.config.settings import name_of_flag
from fivefold.errors import Mistakes

_FULL = ("--recompute-granularity", "full")
_GROUPS = ("--group-query-attention",)
_HUGGING_FACE = ("--tokenizer-type", "HuggingFaceTokenizer")
_RENAMED: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "--activations-checkpoint-method": ("--recompute-method", _FULL),
        "--activations-checkpoint-num-layers": ("--recompute-num-layers", ()),
        "--checkpoint-num-layers": ("--recompute-num-layers", ()),
        "--ds-sequence-parallel-size": ("--context-parallel-size", ("--cp-comm-type", "a2a")),
        "--hf-tokenizer-path": ("--tokenizer-model", _HUGGING_FACE),
        "--tokenizer-name-or-path": ("--tokenizer-model", _HUGGING_FACE),
        "--layernorm-epsilon": ("--norm-epsilon", ()),
        "--num-key-value-heads": ("--num-query-groups", _GROUPS),
        "--pad-vocab-size-to": ("--padded-vocab-size", ()),
        "--rotary-position-embeddings-theta": ("--rotary-base", ()),
        "--rotary-theta": ("--rotary-base", ()),
    }
)
"""Flags whose value is that of another one, which says more with others."""
_SAID: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("--activations-checkpoint-method", "uniform"): ("--recompute-num-layers", "1"),
        ("--attention-head-type", "multihead"): (),
        ("--attention-head-type", "multiquery"): (*_GROUPS, "--num-query-groups", "1"),
        ("--checkpoint-activations", ""): (
            *(*_FULL, "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ),
        ("--cpu-optimizer", ""): ("--optimizer-cpu-offload",),
        ("--mlp-type", "standard"): (),
        ("--normalization", "layernorm"): ("--normalization", "LayerNorm"),
        ("--normalization", "rmsnorm"): ("--normalization", "RMSNorm"),
        ("--position-embedding-type", "rotary"): ("--position-embedding-type", "rope"),
        ("--moe-token-dispatcher-type", "alltoall_seq"): (
            "--moe-token-dispatcher-type",
            "alltoall",
        ),
        ("--tokenizer-type", "HFTokenizer"): _HUGGING_FACE,
        ("--tokenizer-type", "PretrainedFromHF"): _HUGGING_FACE,
        ("--zero-stage", "0"): (),
        ("--zero-stage", "1"): ("--use-distributed-optimizer",),
        ("--zero-stage", "2"): (
            *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads"),
        ),
        ("--zero-stage", "3"): (
            *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
        ),
    }
)
"""Flags that say something with one value."""
_ANOTHER = (
    *("--attention-head-type", "--embed-layernorm", "--glu-activation", "--kd", "--mlp-type"),
    *(
        "--mos",
        "--moe-num-experts",
        "--language-model-type",
        "--vision-model-type",
        "--retro-add-retriever",
    ),
)
"""Flags, with values that are not among those, of what no model here is."""
_MIXERS = "--hybrid-layer-pattern"
_OF_PREDICTIONS = "--mtp-hybrid-override-pattern"
_LATER = (_OF_PREDICTIONS, "--mtp-use-repeated-layer")
_TOKENS = ("train_tokens", "lr_decay_tokens", "lr_warmup_tokens")
_NO_PRETRAINING = re.compile(
    r"bert|t5|ict|mimo|multimodal|hf2|_to_|retro|vlm|vision|dino|hybrid|mamba|prefix_lm|generat"
    r"|eval|server|inference|convert|checkpoint|analyze|ptq|quant|merge_|preprocess|prune|export"
    r"|distill|main\.py"
)


def is_pretraining(launcher: Sequence[str]) -> bool:
    """Whether a command may train a language model, judging by its program's name."""
    *before, program = launcher or ("",)
    if before[-1:] != ["-m"] and not program.endswith(".py"):
        return True
    folder, _, name = program.rpartition("/")
    named = f"{folder}/{name}" if name == "train.py" else name
    if name == "pretrain_mamba.py":
        return True
    return not _NO_PRETRAINING.search(named)


def release_flag(flag: str) -> str:
    """The release's flag for one of a relative's, or the same."""
    return _RENAMED[flag][0] if flag in _RENAMED else flag


def in_release(words: Sequence[str]) -> list[str]:
    """Words with flags of relatives as the release has them.

    Raises:
        ConfigError: flags that make another model.
    """
    mistakes = Mistakes()
    implied: list[str] = []
    found: list[str] = []
    further: list[str] = []
    for flag, values in grouped(words):
        value = " ".join(values)
        if (said := _SAID.get((flag, value))) is not None:
            implied += said
        if flag in _RENAMED:
            name, more = _RENAMED[flag]
            implied += more if (flag, value) != ("--ds-sequence-parallel-size", "1") else ()
            found += (name, *values)
        elif flag == "--glu-activation" and value == "swiglu":
            implied += _gated(words)
        elif flag == _MIXERS:
            layers, *predictions = value.split("/")
            found += _mixers(layers)
            further += _further(predictions)
            if len({*predictions}) > 1:
                what = f"{flag} {value}: all MTP modules have the same layers"
                mistakes.add(what, works=("/".join([layers, *predictions[:1] * len(predictions)]),))
        elif said is None and flag in _ANOTHER:
            mistakes.add(f"{flag} {value}".rstrip() + ": no model here has that")
        elif said is None:
            found += (flag, *values) if flag else values
    if "--deepspeed" in words and dict(grouped(words)).get("--num-experts", ["1"]) != ["1"]:
        mistakes.add("--num-experts with --deepspeed: DeepSpeed's experts, which no model here has")
    elif "--deepspeed" in words:
        found = [
            word
            for flag, values in grouped(found)
            if flag != "--num-experts"
            for word in ((flag, *values) if flag else values)
        ]
    mistakes.raise_if_any()
    return [*implied, *found, *further]


def grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with the values that follow them."""
    flag, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if flag or values:
                yield flag, values
            flag, equals, value = word.partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if flag or values:
        yield flag, values


def _gated(words: Sequence[str]) -> Sequence[str]:
    """BigScience's gates do not make the layer narrower, as Megatron-LM's do."""
    hidden = dict(grouped(words)).get("--hidden-size", [""])[0]
    wide = ("--ffn-hidden-size", str(4 * int(hidden))) if hidden.isdecimal() else ()
    return ("--swiglu", *(() if "--ffn-hidden-size" in words else wide))


def _mixers(layers: str) -> Iterator[str]:
    """Mixers as written after release 0.16, where | separates pipeline stages."""
    stages = layers.split("|")
    letters = "".join(stages)
    yield from ("--hybrid-override-pattern", letters, "--is-hybrid-model")
    yield from ("--num-layers", str(len(letters)))
    if len(stages) > 1:
        cut = "|".join("t" * len(stage) for stage in stages)
        yield from ("--pipeline-model-parallel-layout", f"E{cut}L")


def _further(predictions: Sequence[str]) -> Iterator[str]:
    """The mixers of each MTP module, which those releases have behind a /: they go before
    what else is said of their number."""
    if predictions:
        yield from ("--mtp-num-layers", str(len(predictions)))
        yield from (_OF_PREDICTIONS, predictions[0])


def of_later(unknown: Sequence[str]) -> dict[str, object]:
    """Arguments that releases after 0.16 have and that are settings here, among flags with their
    values."""
    split = (flag.partition(" ") for flag in unknown)
    return {name_of_flag(flag): value or True for flag, _, value in split if flag in _LATER}


def in_samples(given: Mapping[str, object], unknown: Sequence[str]) -> Mapping[str, int]:
    """Lengths of a schedule, converted from tokens to samples.

    There a schedule ends after that many samples or tokens, whichever comes first.
    """
    length, samples = given.get("seq_length"), given.get("train_samples")
    if not isinstance(length, int) or not isinstance(samples, int):
        return {}
    tokens = {name_of_flag(flag): int(flag.split()[-1]) for flag in unknown if is_tokens(flag)}
    found = {name.replace("tokens", "samples"): many // length for name, many in tokens.items()}
    return found | {"train_samples": min(found.get("train_samples", samples), samples)}


def is_tokens(flag: str) -> bool:
    """Whether a flag with its value counts a schedule in tokens."""
    return name_of_flag(flag) in _TOKENS and flag.split()[-1].isdecimal()


def of_relative(flag: str, release: str) -> str:
    """A sentence about a flag, with its values, that the release lacks."""
    if name_of_flag(flag) == "deepspeed_config":
        return f"{flag}: what that file says of precision, clipping and offloading is not read"
    return f"{flag}: no argument of Megatron-LM {release}"
