"""What a plan says, and why: as text, as a page, as data, as settings of other trainers."""
