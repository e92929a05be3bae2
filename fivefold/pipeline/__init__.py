"""Pipeline parallelism: programs, their schedules, lowering, validation, timing and drawing."""
