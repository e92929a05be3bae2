"""Turns text into tokens and batches: corpora, tokenizers, Megatron-LM files, packing, the
loader."""
