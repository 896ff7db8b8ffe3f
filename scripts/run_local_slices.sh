#!/usr/bin/env bash
# Starts one training run as N processes on this machine. Each is an emulated slice with its own CPU
# devices. Every line of output starts with the number of its process.
#   usage: bash scripts/run_local_slices.sh [--restart COUNT] N [file.yml] [key=value ...]
# Exits when all processes have exited, with the first exit code that was not 0. Ctrl-C and SIGTERM
# reach every process, and they save together. A second Ctrl-C ends them at once, a third kills the
# rest. When this script itself is killed (kill -9), its processes are killed within a few seconds,
# and the same command resumes the run.
# --restart COUNT: start all again from the last checkpoint, at most COUNT times, when the cause may
#   be temporary: lost processes (5), failed saves (75), or a signal other than Ctrl-C. Processes
#   that run 60 s longer than a failed one are killed. Bad flags, data and numbers (2, 3, 4) and
#   errors of the program (1) would occur again, so they are not retried.
#   MAXDILOCO_VENV: the environment made by scripts/quickstart.sh or scripts/test.sh (.venv).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${MAXDILOCO_VENV:-$root/.venv}/bin/python
usage="usage: bash scripts/run_local_slices.sh [--restart COUNT] N [file.yml] [key=value ...]"
restarts=0
if [ "${1:-}" = --restart ]; then
  restarts=${2:-}
  if ! [[ $restarts =~ ^[1-9][0-9]{0,8}$ ]]; then
    echo "run_local_slices: --restart $restarts is not a number of restarts. $usage" >&2
    exit 2
  fi
  shift 2
fi
count=${1:-}
if ! [[ $count =~ ^[1-9][0-9]*$ ]]; then
  echo "run_local_slices: N=$count is not a number of processes. $usage" >&2
  exit 2
fi
shift
if ! [ -x "$python" ]; then
  echo "run_local_slices: $python does not exist. Make it with 'bash scripts/make_venv.sh .venv'," \
    "or set MAXDILOCO_VENV." >&2
  exit 2
fi

# A proxy in the environment would stand between the processes; JAX warns of any variable so named.
if env | grep -qi '_proxy='; then export no_grpc_proxy=127.0.0.1; fi
export JAX_NUM_PROCESSES=$count
export M_HARDWARE=cpu M_NUM_SLICES=${M_NUM_SLICES:-$count} # the command line wins over these
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if ((restarts)); then # the flags have to name a run that can be resumed
  "$python" -c 'import os, sys
from maxdiloco.command_line import guarded
from maxdiloco.errors import ConfigError
from maxdiloco.config import config

@guarded
def check(argv):
    cfg = config.load(argv, os.environ)
    why = "a restart resumes from the last checkpoint of the run with this name"
    if not cfg.run_name:
        raise ConfigError(f"run_name is not set, but {why}. Set run_name, or drop --restart.")
    if not cfg.enable_checkpointing:
        raise ConfigError(f"enable_checkpointing=false: {why}. Set it to true, or drop --restart.")
    return 0

sys.exit(check(sys.argv[1:]))' "$@"
fi
ends=$(mktemp) # "process exit-code" of each, in the order of the ends
exec {silent}<> <(:) # nobody writes to it: a read from it waits for its timeout
groups=()

prefixed() { # the lines of standard input, with $1 in front; outlives the signals of its group
  trap '' INT TERM HUP
  while IFS= read -r line || [ -n "$line" ]; do printf '[%s] %s\n' "$1" "$line"; done
}

kill_orphans() { # kills its process group once the parent of process $1 is not this script
  local parent
  trap '' INT TERM HUP
  while read -r _ _ _ parent _ <"/proc/$1/stat" && ((parent == $$)); do
    read -rt 1 -u "$silent" || true
  done
  kill -KILL 0
}

process() { # process $1 of the run; notes its exit code
  local code=0 own=$BASHPID guard
  trap : INT TERM HUP # stays to note the code; the program itself has the signals' default
  kill_orphans "$own" </dev/null >/dev/null 2>&1 &
  guard=$!
  disown "$guard" # its end is not reported
  JAX_PROCESS_ID=$1 "$python" -m maxdiloco.train "${@:2}" </dev/null || code=$?
  kill -KILL "$guard"
  echo "$1 $code" >>"$ends"
}

signal() { for group in "${groups[@]}"; do kill -s "$1" -- "-$group" 2>/dev/null || true; done; }

# shellcheck disable=SC2329 # called by a trap
interrupt() { # signals within a second are one press: timeout sends the signal twice
  local now=${EPOCHREALTIME//[!0-9]/}
  if ((now - pressed >= 1000000)); then
    pressed=$now presses=$((presses + 1))
    if ((presses < 3)); then signal INT; else signal KILL; fi
  fi
}

start_all() {
  local id
  : >"$ends"
  groups=()
  set -m # a process group each: a signal reaches a process once, and only through this script
  for ((id = 0; id < count; id++)); do
    process "$id" "$@" 2>&1 | prefixed "$id" &
    groups+=("$(jobs -p %+)")
  done
  set +m
}

read_ends() { # the end that counts: $first, of process $who; $mendable: a restart may help
  local process code noted=0
  first=0 who="" mendable=yes
  while read -r process code; do
    noted=$((noted + 1))
    if ((code)) && ((first == 0)); then first=$code who="process $process"; fi
    if ((code != 0 && code != 5 && code != 75 && code <= 128 || code == 130)); then mendable=; fi
  done <"$ends"
  if ((noted < count && first == 0)); then first=137 who="a process"; fi # killed with its shell
}

kill_late() { # once one has failed, those that outlive it for long; a save after SIGTERM may last
  local limit=0 group alive
  while :; do
    alive=
    for group in "${groups[@]}"; do
      if kill -0 -- "-$group" 2>/dev/null; then alive=yes; fi
    done
    if [ -z "$alive" ]; then return; fi
    read -rt 0.2 -u "$silent" || true
    if ((limit)); then
      if ((SECONDS > limit)); then signal KILL; fi
    elif grep -qvE ' (0|143)$' "$ends"; then
      limit=$((SECONDS + 60))
    fi
  done
}

presses=0 pressed=0
stopped= # the exit code of a run that received a signal between two sessions
trap 'rm -f "$ends"' EXIT
trap 'stopped=130; interrupt' INT
trap 'stopped=143; signal TERM' TERM HUP
for ((life = 1; ; life++)); do
  port=$("$python" -c 'import socket
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1])')
  export JAX_COORDINATOR_ADDRESS=127.0.0.1:$port JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:$port
  if [ -n "$stopped" ]; then exit "$stopped"; fi
  start_all "$@"
  if ((restarts)); then kill_late; fi
  until wait; do :; done # a trapped signal interrupts it
  read_ends
  if ((first == 0 || restarts == 0)) || [ -z "$mendable" ] || [ -n "$stopped" ]; then break; fi
  cause="$who ended first, with exit code $first"
  if name=$(kill -l "$first" 2>/dev/null) && ((first > 128)); then cause+=" (SIG$name)"; fi
  if ((life > restarts)); then
    echo "run_local_slices: $cause; no restart of $restarts is left." >&2
    break
  fi
  echo "run_local_slices: restart $life of $restarts: $cause." >&2
done
exit "$first"
