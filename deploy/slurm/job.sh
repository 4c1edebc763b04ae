#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --chdir=/project
#SBATCH --output=/project/runs/train.log
#SBATCH --comment=/project/runs/train
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --partition=gpu
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00

# A notice (USR1 before the time limit, TERM to the agents at a preemption) stops the run with a
# checkpoint; the requeued job resumes it. INT stops the run for good, and so does a cancel.
# After the first start, the run directory holds this job's run.
set --
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then set -- --auto-resume; fi
# sbatch exports these from a shell that srun has started; this script is no job step.
unset SLURM_STEP_ID SLURM_STEP_NUM_TASKS
python -m pipeworker launch "$@" --stages 8 --steps 10000 --checkpoint-every 30m --run-dir /project/runs/train /project/train.py -- --width 4096 &
run=$!
requeue=yes
trap 'kill -TERM $run' USR1
trap 'requeue=no; kill -TERM $run' INT
trap : TERM
wait $run
status=$?
while kill -0 $run 2> /dev/null; do
    wait $run
    status=$?
done
state=$(squeue --noheader --job $SLURM_JOB_ID --format %T)
if [ -e /project/runs/train/cancelled ]; then requeue=no; fi
if [ $status -eq 130 ] && [ $requeue = yes ] && [ "$state" = RUNNING ]; then
    scontrol requeue $SLURM_JOB_ID
fi
exit $status
