#!/usr/bin/env bash
# All checks and all tests, in an environment of their own. The last line printed is pytest's.
#   usage: bash scripts/test.sh [pytest arguments]     for example tests/diloco -k schedule
#   MAXDILOCO_VENV: the environment's folder (.venv); MAXDILOCO_PYTHON: the Python to make it with.
#   MAXDILOCO_TEST_WORKERS: test processes at once (2); 1 runs them in pytest's own process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export MAXDILOCO_VENV=${MAXDILOCO_VENV:-.venv}
workers=${MAXDILOCO_TEST_WORKERS:-2}

# libtpu compiles for TPU slices without a TPU; gcs reads and writes a fake bucket of the tests.
bash scripts/make_venv.sh "$MAXDILOCO_VENV" data,dev,gcs,hf,text,tpu
bash scripts/check.sh
# Without a GPU JAX's plugin for CUDA writes to stderr of every program that finds it, so only the
# tests that compile for GPUs do.
if [ $# = 0 ]; then
  plugin=$MAXDILOCO_VENV/cuda-plugin
  if [ ! -d "$plugin/jax_cuda12_plugin" ]; then
    "$MAXDILOCO_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
      -c constraints.txt --target "$plugin" \
      jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
  fi
  PYTHONPATH=$plugin "$MAXDILOCO_VENV/bin/python" -m pytest -q -n "$workers" -m gpu_aot \
    tests/aot/test_gpus.py tests/integration/test_compile_for_gpus.py
fi
parallel=()
# loadgroup: tests that share a resource (libtpu) wear one xdist_group and stay in one worker.
if [ "$workers" != 1 ]; then parallel=(-n "$workers" --dist loadgroup); fi
exec "$MAXDILOCO_VENV/bin/python" -m pytest -q ${parallel[@]+"${parallel[@]}"} "$@"
