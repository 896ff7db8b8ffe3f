#!/usr/bin/env bash
# One training run as N processes on this machine, each an emulated slice with CPU devices of its
# own. Every line of output wears its process in front.
#   usage: bash scripts/run_local_slices.sh N [file.yml] [key=value ...]
# Ends when all have ended, with the first exit code that was not 0. Ctrl-C and SIGTERM reach every
# process, and they save together; a second Ctrl-C ends them at once, a third kills what is left.
#   MAXDILOCO_VENV: the environment made by scripts/quickstart.sh or scripts/test.sh (.venv).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${MAXDILOCO_VENV:-$root/.venv}/bin/python
count=${1:-}
if ! [[ $count =~ ^[1-9][0-9]*$ ]]; then
  echo "run_local_slices: N=$count is not a number of processes." \
    "usage: bash scripts/run_local_slices.sh N [file.yml] [key=value ...]" >&2
  exit 2
fi
shift
if ! [ -x "$python" ]; then
  echo "run_local_slices: $python does not exist. Make it with 'bash scripts/make_venv.sh'," \
    "or set MAXDILOCO_VENV." >&2
  exit 2
fi

port=$("$python" -c 'import socket
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1])')
export JAX_COORDINATOR_ADDRESS=127.0.0.1:$port JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:$port
export JAX_NUM_PROCESSES=$count
# A proxy in the environment would stand between the processes; JAX warns of any variable so named.
if env | grep -qi '_proxy='; then export no_grpc_proxy=127.0.0.1; fi
export M_HARDWARE=cpu M_NUM_SLICES=${M_NUM_SLICES:-$count} # the command line wins over these
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
codes=$(mktemp)
groups=()

prefixed() { # the lines of standard input, with $1 in front; outlives the signals of its group
  trap '' INT TERM HUP
  while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

process() { # process $1 of the run; notes its exit code in the order of the ends
  local code=0
  trap : INT TERM HUP # stays to note the code; the program itself has the signals' default
  JAX_PROCESS_ID=$1 "$python" -m maxdiloco.train "${@:2}" </dev/null || code=$?
  echo "$code" >>"$codes"
}

signal() { for group in "${groups[@]}"; do kill -s "$1" -- "-$group" 2>/dev/null || true; done; }

interrupt() {
  presses=$((presses + 1))
  if ((presses < 3)); then signal INT; else signal KILL; fi
}

presses=0
trap 'rm -f "$codes"' EXIT
trap interrupt INT
trap 'signal TERM' TERM HUP
set -m # a process group each: a signal reaches a process once, and through this script alone
for ((id = 0; id < count; id++)); do
  process "$id" "$@" 2>&1 | prefixed "$id" &
  groups+=("$(jobs -p %+)")
done
until wait; do :; done # a trapped signal interrupts it
first=$(grep -vx 0 "$codes" | head -n 1) || true
if [ "$(wc -l <"$codes")" -lt "$count" ]; then first=${first:-137}; fi # killed with its shell
exit "${first:-0}"
