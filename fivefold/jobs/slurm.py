"""An sbatch file whose job requeues itself before its time is over, and after a failure."""

from datetime import timedelta

from fivefold.jobs.job import STOP_SECONDS, ClusterJob

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node={job.ranks}
{gpus}#SBATCH --time={limit}
#SBATCH --signal=B:USR1@{warning}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# Partition, account, processors: as flags of sbatch, or SBATCH_PARTITION, SBATCH_ACCOUNT, ...
set -u

asked_to_stop=no
cancelled=no
on_usr1() {{
    if [ -z "${{!-}}" ]; then  # srun has not been started: nothing is to be saved
        scontrol requeue "$SLURM_JOB_ID"
        exit
    fi
    [ "$asked_to_stop" = yes ] || kill -USR1 "$!" 2> /dev/null  # srun passes it to every rank
    asked_to_stop=yes
}}
trap on_usr1 USR1
trap 'cancelled=yes' TERM  # by scancel, which srun gets, too: a requeued job would come back

mkdir -p runs
recipe="runs/{job.name}-$SLURM_JOB_ID.toml"
failures="runs/{job.name}-$SLURM_JOB_ID.failures"
cat > "$recipe" <<'RECIPE'
{job.recipe}
RECIPE

export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"
# Since Slurm 22.05 srun does not take over the processors a task that sbatch was asked for.
srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \
    fivefold train "$recipe" --device {job.device}{folder} "$@" &

while kill -0 "$!" 2> /dev/null; do
    wait "$!"  # until srun ends, or a signal comes
done
trap '' USR1
wait "$!"
status=$?

if [ "$cancelled" = yes ]; then
    exit "$status"
elif [ "$status" -ne 0 ]; then
    echo "$(date -Is) status $status on ${{SLURM_JOB_NODELIST:-$HOSTNAME}}" >> "$failures"
    if [ "$(wc -l < "$failures")" -le {job.max_restarts} ]; then
        echo "failed with status $status: the job is requeued ($failures)"
        scontrol requeue "$SLURM_JOB_ID"
    fi
elif [ "$asked_to_stop" = yes ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def sbatch_file(job: ClusterJob) -> str:
    """The text of an sbatch file; the run folder is named after the job's number.

    Ten minutes before the limit Slurm sends USR1 to the script, which passes it to every rank. The
    ranks finish their step, save and leave; the script requeues the job under the same number.
    After a failure it does so, too, at most `job.max_restarts` times. It counts them in a file,
    since SLURM_RESTART_COUNT also counts what the time limit and lost nodes caused. The status of
    srun does not tell failures apart: it is 143 wherever other ranks are ended after the first.
    """
    save = job.config.checkpoint.save
    folder = "" if save is not None else f' --save "runs/{job.name}-$SLURM_JOB_ID"'
    gpus = "" if job.gpu is None else f"#SBATCH --gpus-per-node={job.ranks}\n"
    return _SCRIPT.format(
        job=job, gpus=gpus, folder=folder, limit=_written(job.limit), warning=STOP_SECONDS
    )


def _written(limit: timedelta) -> str:
    minutes, seconds = divmod(limit.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{limit.days}-{hours:02}:{minutes:02}:{seconds:02}"
