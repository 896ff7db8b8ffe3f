#!/usr/bin/env bash
# Makes or refreshes a virtual environment: the pinned dependencies of requirements.lock, each file
# compared with its hash, and this checkout, editable. Does nothing when the folder already holds
# them. The extra torch, for tests, is installed by its versions only.
#   usage: bash scripts/make_venv.sh FOLDER [EXTRA,EXTRA...]      extras: see setup.py
#   MAXDILOCO_PYTHON: the Python to use; by default `python3` if it is 3.11 or newer, else the first
#   one found that is.
set -euo pipefail
folder=${1:?usage: bash scripts/make_venv.sh FOLDER [EXTRA,EXTRA...]}
extras=${2:-}
case $folder in /*) ;; *) folder=$PWD/$folder ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "make_venv: $*" >&2; exit 2; }

# Runs the candidate: a name on PATH may be a shim that has no Python behind it.
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  if [ -n "${MAXDILOCO_PYTHON:-}" ]; then
    new_enough "$MAXDILOCO_PYTHON" ||
      fail "MAXDILOCO_PYTHON=$MAXDILOCO_PYTHON is not a Python 3.11 or newer that runs." \
        "Set it to one, or unset it to search PATH."
    echo "$MAXDILOCO_PYTHON"
    return
  fi
  local name names="python3 python python3.12 python3.11 python3.13"
  for name in $names; do
    if new_enough "$name"; then echo "$name"; return; fi
  done
  fail "no Python 3.11 or newer on PATH (tried $names)." \
    "Install one, or set MAXDILOCO_PYTHON=/path/to/python3.12."
}

venv_works() {
  new_enough "$folder/bin/python" && "$folder/bin/python" -m pip --version >/dev/null 2>&1
}

if [ -e "$folder" ] && [ ! -f "$folder/pyvenv.cfg" ] && [ -n "$(ls -A "$folder")" ]; then
  fail "$folder exists and is not a virtual environment. Name another folder, or remove it."
fi
if ! venv_works; then
  python=$(find_python)
  "$python" -m venv --clear "$folder" || fail "'$python -m venv $folder' failed." \
    "On Debian and Ubuntu install the package python3-venv (or python3.12-venv)."
fi

# One stamp for each set of extras: installing one set removes nothing of another.
stamp=$folder/maxdiloco-${extras:-base}.stamp
want=$("$folder/bin/python" - <<'PYTHON'
import hashlib, os, sys
files = b"".join(open(name, "rb").read() for name in ("requirements.lock", "setup.py"))
print(hashlib.sha256(files).hexdigest(), os.getcwd(), "%d.%d" % sys.version_info[:2])
PYTHON
)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi

echo "installing the pinned dependencies into $folder (about a minute the first time)"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
pins=$folder/maxdiloco-pins.txt
"$folder/bin/python" scripts/lock.py extras "${extras//torch/}" >"$pins"
"${pip[@]}" --require-hashes --no-deps -r "$pins" # the lock also has their dependencies
case ,$extras, in
  *,torch,*) # a package index may offer a build for CPUs, which has other hashes and needs less
    "$folder/bin/python" scripts/lock.py pins >"$pins"
    "${pip[@]}" -c "$pins" torch accelerate ;;
esac
# --no-build-isolation: an isolated build would fetch a setuptools that nothing pins.
"${pip[@]}" --no-build-isolation --no-deps --editable .
echo "$want" >"$stamp"
