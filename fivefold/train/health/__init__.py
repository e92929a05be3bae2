"""Whether a run does well: hangs, stragglers, silent errors, steps that do harm."""
