#!/usr/bin/env bash
# What the documentation lacks about GPUs, in at most ten minutes on one GPU:
#   benchmarks/gpu.sh OUT          with the Python of the environment that is active
#   benchmarks/gpu.sh OUT --dry    the same steps on a CPU, as small as they get
exec python "$(dirname "$0")/gpu.py" "$@"
