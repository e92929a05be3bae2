"""Which layers each stage holds, and which rank each stage is on."""
