"""Pipeline schedules: generators of programs."""
