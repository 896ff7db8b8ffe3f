#!/usr/bin/env bash
# Runs the checks that need a GPU, in under ten minutes. Each part prints the expectation, then the
# result. Logs go into $OUT; the other parts run even if one fails or runs out of time.
#   usage: bash benchmarks/gpu_check.sh [part ...]
#   parts: torch_180m torch_1b replicas_180m (all of them)
#   PYTHON: with jax and its GPU plugin, and torch (python3); HARDWARE: gpu, or cpu to try the script
#   OUT: folder for logs and compile caches (runs/gpu_check); KEYS: further keys of the trainer
#   SLOWER: the time limits are an H100's times this whole number (1)
# With several GPUs it uses the first in CUDA_VISIBLE_DEVICES. When torch runs too, JAX may use half
# of the memory, as it needs it, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${PYTHON:-python3}
hardware=${HARDWARE:-gpu}
out=${OUT:-runs/gpu_check}
slower=${SLOWER:-1}
read -ra keys <<<"${KEYS:-}"
if [[ ! $slower =~ ^[1-9][0-9]*$ ]]; then
  printf 'gpu_check: SLOWER=%s is not a whole number of 1 or more. Use SLOWER=3, say.\n' \
    "$slower" >&2
  exit 2
fi
parts=("$@")
if ((${#parts[@]} == 0)); then parts=(torch_180m torch_1b replicas_180m); fi
mkdir -p "$out"
export PYTHONPATH=$PWD
if [ "$hardware" = gpu ]; then
  CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
fi
failed=()

part() { # name, seconds, expectation, then the command
  local name=$1 limit=$(($2 * slower)) expect=$3 began=$SECONDS code
  shift 3
  printf '== %s, at most %s s\nexpect: %s\n' "$name" "$limit" "$expect"
  timeout "$limit" "$@" "${keys[@]}" 2>"$out/$name.err" | tee "$out/$name.log"
  code=${PIPESTATUS[0]}
  if ((code != 0)); then
    tail -n 4 "$out/$name.err"
    failed+=("$name ($code)")
  fi
  printf 'took %s s\n\n' "$((SECONDS - began))"
}

beside_torch() { # model, sequences
  if [ -z "${XLA_CLIENT_MEM_FRACTION:-}" ]; then  # JAX takes one of the two names
    export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.5}
  fi
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  "$python" benchmarks/peer_torch.py hardware="$hardware" model_name="$1" max_target_length=2048 \
    per_device_batch_size="$2" steps=20 start=false pause_s=0 python="$(command -v "$python")" \
    out="$out/peer_torch" "${@:3}"
}
export -f beside_torch
export python hardware out

memory() { # MiB of the GPU; nothing if it is unknown
  [ "$hardware" = gpu ] && nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits \
    -i "${CUDA_VISIBLE_DEVICES:-0}" 2>/dev/null | head -n 1
}

for name in "${parts[@]}"; do
  case $name in
    torch_180m)
      part "$name" 120 "tokens/s at least 1.1 times torch's" bash -c 'beside_torch 180m 8 "$@"' _ ;;
    torch_1b)
      found=$(memory)
      if [[ $found =~ ^[0-9]+$ ]] && ((found < 75000)); then
        printf '== %s: skipped, two trainers of 1b need 80 GB, and there are %s MiB\n\n' \
          "$name" "$found"
        continue
      fi
      part "$name" 210 "tokens/s at least 1.1 times torch's; half of the GPU's peak" \
        bash -c 'beside_torch 1b 4 "$@"' _ ;;
    replicas_180m)
      part "$name" 160 "4 replicas at 0.95 of data parallelism's tokens/s or more" \
        "$python" benchmarks/replica_cost.py hardware="$hardware" out="$out/replica_cost" \
        turns=1 ;;
    *)
      printf 'gpu_check: %s is no part. Use torch_180m, torch_1b, replicas_180m.\n' \
        "$name" >&2
      exit 2 ;;
  esac
done
if ((${#failed[@]})); then
  printf 'failed: %s; logs in %s\n' "${failed[*]}" "$out" >&2
  exit 1
fi
