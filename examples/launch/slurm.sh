#!/bin/bash
# Slurm: sbatch examples/launch/slurm.sh tasks.yaml [--set output_dir=/shared/runs/a ...]
#
# Change the lines marked "change". The repository, tasks.yaml and output_dir must be on a disk that all nodes share.
# The job requeues itself before its time limit; the requeued job resumes from where it was saved, and so do workers that
# torchrun restarts within the job (docs/parallel.md, Restarts).

#SBATCH --job-name=peft-mux
#SBATCH --nodes=2                # change
#SBATCH --gpus-per-node=8        # change
#SBATCH --cpus-per-task=64       # change: CPU cores of a node
#SBATCH --time=24:00:00          # change
#SBATCH --ntasks-per-node=1      # one torchrun per node, which starts a process for each GPU
#SBATCH --requeue
#SBATCH --open-mode=append       # a requeued job appends to the same log
#SBATCH --signal=B:USR1@180      # SIGUSR1 to this script, 180 s before the time limit. On preemption too, if the cluster
                                 # has PreemptParameters=send_user_signal. Change: more than the timeout below.

# source /shared/venv/bin/activate    # change: the environment in which peft_mux is installed

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 50000)) # one for each job, as jobs may share a node

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # restarted workers get a store without the addresses of the attempt before
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150 # seconds to end the step and save; torch 2.11 gives 30 s, whatever is set here
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK" # since Slurm 22.05, srun does not take it from sbatch

srun torchrun \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first_node:$port" \
  -m peft_mux train "$@" &
launcher=$!

# SIGTERM goes to the processes of srun, not to srun itself, which would kill them half a minute later. `scancel` sends
# this script no SIGUSR1, so a cancelled job is not requeued.
requeue=no
trap 'requeue=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
wait "$launcher"
status=$?
if [ "$requeue" = yes ]; then # the signal interrupted `wait`
  wait "$launcher"
  status=$?
  if [ "$status" -ne 0 ]; then # 0: training finished before it could be interrupted
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$status"
