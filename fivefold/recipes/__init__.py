"""Runs that ship with Fivefold, one TOML file each."""

import re
from collections.abc import Mapping
from types import MappingProxyType

# What they read that does not ship with them: how to get it from the Hugging Face hub. `hf` comes
# with the library `tokenizers`.
FETCH: Mapping[str, str] = MappingProxyType(
    {
        "data/openwebtext": "hf download Skylion007/openwebtext --repo-type dataset "
        "--include '*.parquet' --local-dir data/openwebtext",
        "data/corpus": "hf download HuggingFaceFW/fineweb-edu --repo-type dataset "
        "--include 'sample/10BT/*.parquet' --local-dir data/corpus",
        "data/gpt2/tokenizer.json": "hf download openai-community/gpt2 tokenizer.json "
        "--local-dir data/gpt2",
        "data/llama3/tokenizer.json": "hf download meta-llama/Llama-3.1-8B tokenizer.json "
        "--local-dir data/llama3",
        "data/qwen3/tokenizer.json": "hf download Qwen/Qwen3-8B tokenizer.json "
        "--local-dir data/qwen3",
    }
)


_OF_HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?:/tokenizer\.json)?")


def how_to_get(path: str) -> tuple[str, ...]:
    """A line of a message with the command that fetches what a recipe reads, if one does."""
    return (f"get it with: {FETCH[path]}",) if path in FETCH else ()


def how_to_get_tokenizer(path: str) -> tuple[str, ...]:
    """As `how_to_get`, also for names as models have them on the hub (`Qwen/Qwen3-8B`)."""
    if path not in FETCH and (named := _OF_HUB.fullmatch(path)):
        name = named[1]
        command = f"hf download {name} tokenizer.json --local-dir {name}"
        return (f"of a model on the Hugging Face hub, get it with: {command}",)
    return how_to_get(path)
