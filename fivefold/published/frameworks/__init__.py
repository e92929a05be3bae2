"""What trainers do that no column of a published run gives: a file for each framework."""
