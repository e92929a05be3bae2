"""What trainers do that no column of a published run says: one file for each framework."""
