#!/usr/bin/env bash
# From a bare Python 3.11 or newer to a trained model in under five minutes on two CPU cores: makes
# a virtual environment, trains configs/quickstart.yml with DiLoCo over two emulated slices on the
# source text of Python's standard library, and lets the model write.
#   usage: bash scripts/quickstart.sh [key=value ...]       for example steps=400
#   MAXDILOCO_VENV: the environment's folder (.venv); MAXDILOCO_PYTHON: the Python to make it with.
# A second run continues runs/quickstart; remove that folder to start over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${MAXDILOCO_VENV:-.venv}

name=quickstart
folder=runs
for argument in "$@"; do
  case $argument in
    run_name=*) name=${argument#*=} ;;
    base_output_directory=*) folder=${argument#*=} ;;
  esac
done

bash scripts/make_venv.sh "$venv"
"$venv/bin/python" -m maxdiloco.train configs/quickstart.yml "$@"
"$venv/bin/python" -m maxdiloco.generate "$folder/$name" prompt="def "
