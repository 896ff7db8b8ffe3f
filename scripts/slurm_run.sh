#!/usr/bin/env bash
# Starts a run under Slurm: submits scripts/launch/train.sbatch, one process for each node.
#   usage: bash scripts/slurm_run.sh [RUN_NAME] [file.yml] [key=value ...]
#   example, two slices of two nodes, one in each partition, DiLoCo between them:
#     PARTITIONS="east west" NUM_SLICES=2 NODES_PER_SLICE=2 GPUS_PER_NODE=8 OUTPUT=/shared/runs \
#     bash scripts/slurm_run.sh first-run model_name=1b dataset_path=/shared/text
#   DRY_RUN=1 prints the command of sbatch and submits nothing. Every variable and flag is checked
#   first; all faults are printed, and the exit code is 2.
#
#   needed: NUM_SLICES, GPUS_PER_NODE (0: train on CPUs), OUTPUT (BASE_OUTPUT_DIRECTORY): a folder
#     that all nodes see, or gs://, s3:// or az://bucket/folder, with the credentials in the
#     environment. This checkout and its environment are at the same path on all.
#   optional: RUN_NAME (RUNNAME), WORKLOAD_NAME: the job's name
#     PARTITIONS: one partition, or several with a blank between, which share the slices equally
#     NODES_PER_SLICE (1), ACCOUNT, TIME: limit of a job, in sbatch's format; then the run is requeued
#     GRACE_SECONDS (180): time between SIGTERM and the end of TIME
#     MAX_RESTARTS (50), PORT (8476): of JAX's coordination service on the first node
#     XLA_FLAGS_FILE and the flags: as in xpk_run.sh
# A run that lost a process, was preempted, or came to the end of TIME is requeued and resumes by
# its name. Ctrl-C, scancel and the exit codes 1 to 4 end it: an error of the program, a wrong flag,
# bad data, or a loss that is not finite.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch/launch.sh" slurm_run slurm "$@"
