#!/usr/bin/env bash
# Checks and tests, in an environment of their own. The last line printed is pytest's.
#   usage: bash scripts/test.sh [quick|full] [pytest arguments]
#     no word   the default tier, about 14 minutes on two cores; with arguments that part of it,
#               for example: bash scripts/test.sh tests/diloco -k schedule
#     quick     under 90 seconds: style, the algorithm, the keys, the smallest cases of the oracle
#     full      the default tier and the tests marked `full`: whole grids, every fault and family
#   MAXDILOCO_VENV: the environment's folder (.venv); MAXDILOCO_PYTHON: the Python to make it with.
#   MAXDILOCO_TEST_WORKERS: test processes at once (the cores, up to 8; 3 GB of memory each); 1
#   runs the tests in pytest's own process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export MAXDILOCO_VENV=${MAXDILOCO_VENV:-.venv}
python=$MAXDILOCO_VENV/bin/python
cores=$(nproc)
workers=${MAXDILOCO_TEST_WORKERS:-$((cores < 8 ? cores : 8))}
tier=default
case ${1:-} in quick|full) tier=$1; shift ;; esac

# libtpu compiles for TPU slices without a TPU; buckets reads and writes the tests' buckets.
bash scripts/make_venv.sh "$MAXDILOCO_VENV" buckets,data,dev,docs,eval,hf,quantization,text,torch,tpu
bash scripts/check.sh
if [ $# = 0 ] && [ "$tier" != quick ]; then bash scripts/docs.sh; fi

pytest=("$python" -m pytest -q --durations=10)
# All tests of a file share a worker (tests/grouping.py). Files are handed out in the order of
# collection: tests/conftest.py puts the dearest first.
# A worker that crashes ends the run. With a new worker instead of it, xdist waited for ever.
if [ "$workers" != 1 ]; then
  pytest+=(-n "$workers" --dist loadscope --no-loadscope-reorder --max-worker-restart 0)
fi
chosen="not exhaustive"
if [ "$tier" != full ]; then chosen+=" and not full"; fi

# Without a GPU JAX's plugin for CUDA writes to stderr of every program that finds it, so only the
# tests that compile for GPUs do.
if [ $# = 0 ] && [ "$tier" != quick ]; then
  plugin=$MAXDILOCO_VENV/cuda-plugin
  packages=(jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12)
  last=$plugin/nvidia/cuda_nvcc
  if [ "$tier" = full ]; then  # 1.2 GB
    packages+=(nvidia-cudnn-cu12)
    last=$plugin/nvidia/cudnn
  fi
  if [ ! -d "$last" ]; then
    rm -rf "$plugin"  # pip adds nothing to a folder that is there
    "$python" scripts/lock.py packages "${packages[@]}" >"$MAXDILOCO_VENV/cuda-plugin.txt"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
      --require-hashes --target "$plugin" -r "$MAXDILOCO_VENV/cuda-plugin.txt"
  fi
  PYTHONPATH=$plugin "${pytest[@]}" -m "gpu_aot and $chosen" \
    tests/planning/test_gpu_topologies.py tests/integration/test_compile_for_gpus.py
fi
case $tier in
  quick) set -- -m "$chosen and not tpu_aot" tests/diloco tests/config tests/engine/test_oracle.py \
    tests/integration/test_against_oracle.py "$@" ;;
  full) set -- -m "$chosen" "$@" ;;
esac
exec "${pytest[@]}" "$@"
