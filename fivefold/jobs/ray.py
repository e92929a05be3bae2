"""A script for Ray Train, whose workers each run one rank."""

from fivefold.jobs.job import ClusterJob

_SCRIPT = '''\
"""Trains {name} on {nodes} x {ranks} workers of Ray.

    ray job submit --working-dir . -- python FILE
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

RECIPE = r"""
{recipe}
"""


def run_rank(_: dict) -> None:
    """One rank. Ray's process group tells all of them a port, where the run makes its own."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    recipe = Path(tempfile.mkdtemp(), "{name}.toml")
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "fivefold", "train", str(recipe), "--device", "{device}"]
    subprocess.run(command, env=os.environ | {{"MASTER_PORT": str(port[0])}}, check=True)


if __name__ == "__main__":
    TorchTrainer(
        run_rank,
        train_loop_config={{}},
        scaling_config=ScalingConfig(num_workers={workers}, use_gpu={gpu}{kind}),
        run_config=RunConfig(
            name="{name}", failure_config=FailureConfig(max_failures={max_restarts})
        ),
    ).fit()
'''


def ray_script(job: ClusterJob) -> str:
    """The text of a Python script for `ray job submit`; a new attempt resumes where the failed one
    was."""
    return _SCRIPT.format(
        name=job.name,
        nodes=job.nodes,
        ranks=job.ranks,
        workers=job.nodes * job.ranks,
        gpu=job.gpu is not None,
        kind="" if job.gpu is None else f', accelerator_type="{job.gpu}"',
        device=job.device,
        max_restarts=job.max_restarts,
        recipe=job.recipe,
    )
