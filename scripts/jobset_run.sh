#!/usr/bin/env bash
# Starts a run on Kubernetes as a JobSet, with the current context of kubectl: on TPU slices of GKE
# (TPU_TYPE, scripts/launch/tpu_jobset.yaml), or on nodes with GPUs (GPU_TYPE, gpu_jobset.yaml).
#   usage: bash scripts/jobset_run.sh [RUN_NAME] [configs/file.yml] [key=value ...]
#   example:
#     TPU_TYPE=v5e-16 NUM_SLICES=2 IMAGE=us-docker.pkg.dev/my-project/images/maxdiloco \
#     OUTPUT=gs://my-bucket/runs TEXT_CLAIM=my-text \
#     bash scripts/jobset_run.sh first-run model_name=1b dataset_path=/text
#   DRY_RUN=1 prints the manifest and creates nothing. Every variable and flag is checked first;
#   all faults are printed, and the exit code is 2.
#
#   needed: NUM_SLICES, IMAGE (DOCKER_IMAGE, MY_IMAGE), OUTPUT (BASE_OUTPUT_DIRECTORY), and
#     TPU_TYPE (DEVICE_TYPE), or GPU_TYPE: the label cloud.google.com/gke-accelerator of the nodes
#   optional: RUN_NAME (RUNNAME), WORKLOAD_NAME (XPK_WORKLOAD), RESERVATION, MAX_RESTARTS (50),
#     GRACE_SECONDS (180), XLA_FLAGS_FILE and the flags: as in xpk_run.sh
#     NAMESPACE (default), SERVICE_ACCOUNT (default): it may write to the bucket
#     TEXT_CLAIM: a PersistentVolumeClaim with the text, mounted at /text; without it the text is in
#       the image
#     QUEUE: a local queue of Kueue; SHM_GB (16): shared memory of a pod
#     GPUS_PER_NODE (8), NODES_PER_SLICE (1): with GPU_TYPE
# The run restarts as under xpk_run.sh: not after the exit codes 1, 2, 3 and 4. Before it is started
# again under its name: kubectl delete jobset NAME.
exec bash "$(dirname "${BASH_SOURCE[0]}")/launch/launch.sh" jobset_run jobset "$@"
