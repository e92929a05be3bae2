"""AdamW on local shards, learning-rate schedules, gradient norm and clipping."""
