"""Times of pipeline programs, for many sets of costs at once."""
