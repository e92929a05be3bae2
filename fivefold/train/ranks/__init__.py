"""How the ranks of a run start, meet, fail and start again."""
