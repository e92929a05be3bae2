"""Jobs of Megatron-LM: their arguments, and the settings that these are here."""
