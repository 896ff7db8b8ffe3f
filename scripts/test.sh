#!/usr/bin/env bash
# All checks and all tests, in an environment of their own. The last line printed is pytest's.
#   usage: bash scripts/test.sh [pytest arguments]     for example tests/diloco -k schedule
#   MAXDILOCO_VENV: the environment's folder (.venv); MAXDILOCO_PYTHON: the Python to make it with.
#   MAXDILOCO_TEST_WORKERS: test processes at once (2); 1 runs them in pytest's own process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export MAXDILOCO_VENV=${MAXDILOCO_VENV:-.venv}
workers=${MAXDILOCO_TEST_WORKERS:-2}

# tpu and cudacompile compile for slices without one; gcs uses a fake bucket of the tests.
bash scripts/make_venv.sh "$MAXDILOCO_VENV" cudacompile,data,dev,gcs,hf,text,tpu
bash scripts/check.sh
parallel=()
# loadgroup: tests that share a resource (libtpu) wear one xdist_group and stay in one worker.
if [ "$workers" != 1 ]; then parallel=(-n "$workers" --dist loadgroup); fi
exec "$MAXDILOCO_VENV/bin/python" -m pytest -q ${parallel[@]+"${parallel[@]}"} "$@"
