"""A small byte-level BPE, as Hugging Face's library has it."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level(words: str, special: Sequence[str], size: int) -> Tokenizer:
    """One that knows every byte, some special tokens, and what `words` have in common."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([words] * 9, trainer)
    return made
