"""Text to tokens to batches: tokenizers, corpora, Megatron-LM files, packing, the loader."""
