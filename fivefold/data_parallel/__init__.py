"""Data parallelism: replicated, ZeRO-1/2/3, HSDP."""
