#!/usr/bin/env bash
# launch.py with the environment's Python; called by xpk_run.sh, jobset_run.sh and slurm_run.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${MAXDILOCO_VENV:-$root/.venv}/bin/python
if ! [ -x "$python" ]; then
  echo "$1: $python does not exist. Make it with 'bash scripts/make_venv.sh .venv'," \
    "or set MAXDILOCO_VENV." >&2
  exit 2
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
exec "$python" "$root/scripts/launch/launch.py" "$@"
