#!/usr/bin/env bash
# Builds the documentation site; a warning of Sphinx fails it.
#   usage: bash scripts/docs.sh [FOLDER]     by default build/docs; open FOLDER/index.html
#   MAXDILOCO_VENV: an environment with the extra docs (.venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${MAXDILOCO_VENV:-.venv}/bin/python
folder=${1:-build/docs}
if ! "$python" -c "import sphinx, furo, myst_parser" 2>/dev/null; then
  echo "docs: no Sphinx in ${MAXDILOCO_VENV:-.venv}." \
    "Run 'bash scripts/make_venv.sh ${MAXDILOCO_VENV:-.venv} docs' first." >&2
  exit 2
fi
JAX_PLATFORMS=cpu "$python" -m sphinx -c docs -d "$folder/.doctrees" -W --keep-going -q . "$folder"
echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' >"$folder/index.html"
echo "$folder/index.html"
