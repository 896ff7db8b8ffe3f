#!/usr/bin/env bash
# Starts a run on TPU slices of a GKE cluster with xpk (https://github.com/AI-Hypercomputer/xpk):
# DiLoCo between the slices (dcn_diloco_parallelism is their number, unless given).
#   usage: bash scripts/xpk_run.sh [RUN_NAME] [configs/file.yml] [key=value ...]
#   example:
#     CLUSTER=my-cluster PROJECT=my-project ZONE=us-west4-a TPU_TYPE=v5litepod-16 NUM_SLICES=2 \
#     IMAGE=us-docker.pkg.dev/my-project/images/maxdiloco OUTPUT=gs://my-bucket/runs \
#     STORAGE=my-text bash scripts/xpk_run.sh first-run model_name=1b dataset_path=/text
#   DRY_RUN=1 prints the command and starts nothing. Every variable and flag is checked first; all
#   faults are printed, and the exit code is 2.
#
#   needed, with other names that MaxText's DiLoCo scripts have:
#     CLUSTER (CLUSTER_NAME), PROJECT (PROJECT_ID), ZONE, TPU_TYPE (DEVICE_TYPE), NUM_SLICES,
#     IMAGE (DOCKER_IMAGE, MY_IMAGE): built from the Dockerfile with EXTRAS=tpu,buckets and pushed;
#       with USER_ID=0 where only root opens the TPU's devices, as xpk sets no user,
#     OUTPUT (BASE_OUTPUT_DIRECTORY): a folder on gs://
#   optional:
#     RUN_NAME (RUNNAME): instead of the first argument; the same name again resumes the run
#     WORKLOAD_NAME (XPK_WORKLOAD): xpk's name of this start; the run's name. xpk accepts a name once
#     STORAGE: an xpk storage with the text, mounted in every pod. dataset_path is its folder, or
#       one of the image: xpk storage attach my-text --type=gcsfuse --mount-point=/text ...
#     RESERVATION (NONE), PRIORITY (medium), MAX_RESTARTS (50), GRACE_SECONDS (180: SIGTERM to the
#     saved state), XLA_FLAGS_FILE (scripts/launch/xla_flags.env; none: no flags)
#   flags: MODEL_NAME, STEPS, DATASET_PATH, PER_DEVICE_BATCH_SIZE, MAX_TARGET_LENGTH,
#     CHECKPOINT_PERIOD, LOAD_FULL_STATE_PATH, ENABLE_STREAMING_DILOCO, DILOCO_SYNC_PERIOD,
#     DILOCO_OUTER_LR, DILOCO_OUTER_MOMENTUM, DILOCO_NUM_FRAGMENTS, DILOCO_USE_SEQUENTIAL_LAYERS,
#     DILOCO_NUM_COMM_OVERLAP_STEPS, DILOCO_COMM_OVERLAP_ALPHA. key=value wins.
#   MAXDILOCO_VENV: the environment made by scripts/make_venv.sh (.venv).
# A restarted run resumes by its name from OUTPUT/RUN_NAME. A lost or preempted host (exit codes 5,
# 137, 143) or a store that fails to save (75) restarts it. A wrong flag, bad data or a loss that is
# not finite (2, 3, 4) does not, even if only one host has it: the others exit with its code.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch/launch.sh" xpk_run xpk "$@"
