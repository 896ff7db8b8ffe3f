#!/usr/bin/env bash
# Starts a run on TPU slices of a GKE cluster with xpk (https://github.com/AI-Hypercomputer/xpk):
# DiLoCo between the slices (dcn_diloco_parallelism is as many as there are, unless given).
#   usage: bash scripts/xpk_run.sh RUN_NAME [file.yml] [key=value ...]
#   example:
#     CLUSTER=my-cluster PROJECT=my-project ZONE=us-west4-a TPU_TYPE=v5litepod-16 NUM_SLICES=2 \
#     IMAGE=us-docker.pkg.dev/my-project/images/maxdiloco OUTPUT=gs://my-bucket/runs \
#     bash scripts/xpk_run.sh first-run model_name=1b diloco_sync_period=100
#   needed: CLUSTER PROJECT ZONE TPU_TYPE NUM_SLICES IMAGE OUTPUT. IMAGE is built from the
#   Dockerfile with EXTRAS=tpu,gcs and pushed to a registry that the cluster can read.
#   Text: dataset_path is a folder of the image, or one that an xpk storage mounts in every pod:
#     xpk storage attach my-text --type=gcsfuse --bucket=my-bucket --mount-point=/text ...
#     STORAGE=my-text ... bash scripts/xpk_run.sh first-run dataset_path=/text
#   optional: STORAGE (none), MAX_RESTARTS (50), PRIORITY (medium),
#   GRACE_SECONDS (180: SIGTERM to the saved state)
#   DRY_RUN=1 prints the command and starts nothing.
# A restarted run resumes by its name from OUTPUT/RUN_NAME. A lost or preempted host (exit codes 5,
# 137, 143) or a store that takes no checkpoint (75) restarts it. A wrong flag, bad data or a loss
# that is not finite (2, 3, 4) does not, not even on one host alone: the others end with its code.
set -euo pipefail

fail() { echo "xpk_run: $*" >&2; exit 2; }

usage="usage: bash scripts/xpk_run.sh RUN_NAME [file.yml] [key=value ...]"

case ${1:-} in
  "" | *=* | *.yml | *.yaml) fail "the first argument is the run's name, not '${1:-}'. $usage" ;;
esac
run=$1
shift
for name in CLUSTER PROJECT ZONE TPU_TYPE NUM_SLICES IMAGE OUTPUT; do
  [ -n "${!name:-}" ] || fail "$name is not set. Set it, as in: $name=... bash scripts/xpk_run.sh"
done
case $OUTPUT in
  gs://*) ;;
  *) fail "OUTPUT=$OUTPUT is not on gs://: a pod's disk goes with it. Use gs://bucket/folder." ;;
esac

# exec: SIGTERM has to reach Python, which saves the state and exits with 143.
command="exec python -m maxdiloco.train"
for argument in "$@"; do
  case $argument in
    run_name=* | base_output_directory=* | hardware=*)
      fail "$argument is set by this script: by RUN_NAME, OUTPUT and TPU_TYPE. Leave it out." ;;
    dataset_path=*://* | eval_dataset_path=*://*)
      fail "$argument is an address. Mount the bucket with STORAGE and give its folder." ;;
  esac
  command+=" $(printf %q "$argument")"
done
for argument in hardware=tpu "base_output_directory=$OUTPUT" "run_name=$run"; do
  command+=" $(printf %q "$argument")"
done

launch=(xpk workload create
  --cluster="$CLUSTER" --project="$PROJECT" --zone="$ZONE"
  --workload="$run" --tpu-type="$TPU_TYPE" --num-slices="$NUM_SLICES" --docker-image="$IMAGE"
  --priority="${PRIORITY:-medium}" --max-restarts="${MAX_RESTARTS:-50}" --restart-on-exit-codes=5,75
  --termination-grace-period-seconds="${GRACE_SECONDS:-180}"
  --command="$command")
[ -z "${STORAGE:-}" ] || launch+=(--storage="$STORAGE")

if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' "${launch[@]}"
  echo
  exit 0
fi
command -v xpk >/dev/null || fail "xpk is not on PATH. Install it with 'pip install xpk'."
exec "${launch[@]}"
