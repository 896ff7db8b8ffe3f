#!/usr/bin/env bash
# The checks that take seconds: ruff, import-linter, shellcheck and tests/test_house.py.
# Any violation ends it with an exit code that is not zero. The sentences that
# scripts/plain_language.py prints last are a warning only.
#   MAXDILOCO_VENV: the environment made by scripts/test.sh (.venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${MAXDILOCO_VENV:-.venv}/bin/python
if ! "$python" -m ruff --version >/dev/null 2>&1; then
  echo "check: no ruff in ${MAXDILOCO_VENV:-.venv}. Make the environment with" \
    "'bash scripts/make_venv.sh ${MAXDILOCO_VENV:-.venv}" \
    "buckets,data,dev,docs,eval,hf,quantization,text,torch,tpu'." >&2
  exit 2
fi
"$python" -m ruff check .
"${MAXDILOCO_VENV:-.venv}/bin/lint-imports" --no-cache
"${MAXDILOCO_VENV:-.venv}/bin/shellcheck" -x scripts/*.sh benchmarks/*.sh scripts/launch/*.sh \
  scripts/launch/train.sbatch .ci/run
"$python" -m pytest -q tests/test_house.py
"$python" scripts/plain_language.py || true
