"""Pipeline parallelism: programs, their schedules, lowering, proof, time and pictures."""
