"""Layout search: enumerate the legal layouts, bound their memory and time, find the fastest."""
