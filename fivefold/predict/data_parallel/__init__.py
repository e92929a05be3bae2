"""Times of data-parallel communication and of the optimizer's update."""
