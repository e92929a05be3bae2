"""A TrainJob of Kubeflow Trainer (v1alpha1) under its runtime `torch-distributed`."""

from typing import Any

from fivefold.jobs.job import STOP_SECONDS, ClusterJob, started_by
from fivefold.jobs.yaml import written

MOUNT = "runs"
MANAGER = "fivefold.org/launch"


def train_job(job: ClusterJob) -> str:
    """The text of a TrainJob; the runtime sets the variables by which torchrun finds its peers.

    Runs are kept on a volume claim that all pods mount; a restarted pod resumes from there.
    """
    assert job.volume is not None and job.image is not None
    claim, path = job.volume
    job = job.saved_in(f"{path}/runs/{job.name}")
    script = started_by("torchrun", f"/tmp/{job.name}.toml", job)
    trainer: dict[str, Any] = {
        "image": job.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks,
        # Kubernetes itself replaces $(NAME) in a command, and $$ by $.
        "command": ["bash", "-c", script.replace("$", "$$")],
    }
    if job.gpu is not None:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": job.ranks}}
    pod = {
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "volumes": [{"name": MOUNT, "persistentVolumeClaim": {"claimName": claim}}],
        "containers": [
            {"name": "node", "volumeMounts": [{"name": MOUNT, "mountPath": path}]},
        ],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    return written(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.name},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "activeDeadlineSeconds": int(job.limit.total_seconds()),
                "trainer": trainer,
                "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": patch}],
            },
        }
    )
