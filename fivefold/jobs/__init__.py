"""Job files that start a run on Slurm, Kubernetes, SkyPilot or Ray."""
