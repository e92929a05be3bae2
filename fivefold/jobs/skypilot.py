"""A managed job of SkyPilot, for any cloud or Kubernetes cluster that it knows."""

from fivefold.jobs.job import ClusterJob, started_by
from fivefold.jobs.yaml import written

_TORCHRUN = """\
torchrun --nnodes "$SKYPILOT_NUM_NODES" --node_rank "$SKYPILOT_NODE_RANK" \\
    --nproc_per_node {ranks} --master_port 29500 \\
    --master_addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"\
"""


def sky_task(job: ClusterJob) -> str:
    """The text of a task; runs are kept on a SkyPilot volume, which all nodes mount.

    SkyPilot replaces lost machines, and restarts the task after failures of its own.
    """
    assert job.volume is not None and job.image is not None
    volume, path = job.volume
    job = job.saved_in(f"{path}/runs/{job.name}")
    gpus = {} if job.gpu is None else {"accelerators": f"{job.gpu}:{job.ranks}"}
    command = _TORCHRUN.format(ranks=job.ranks)
    return written(
        {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": gpus
            | {
                "image_id": f"docker:{job.image}",
                "job_recovery": {"max_restarts_on_errors": job.max_restarts},
            },
            "volumes": {path: volume},
            "run": started_by(command, f"/tmp/{job.name}.toml", job),
        }
    )
