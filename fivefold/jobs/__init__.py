"""Job files that start a run where people run: Slurm, Kubernetes, SkyPilot, Ray."""
