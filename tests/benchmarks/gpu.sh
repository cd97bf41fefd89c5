#!/usr/bin/env bash
# What one GPU can settle, in at most eight minutes: run it in the checkout, on the machine with the GPU.
#
#   tests/benchmarks/gpu.sh [STAGE ...]
#
# Packages: `ORBITSERVE_GPU=1 make tools`. A stage whose packages are absent is left out, and a line says which: torch with
# CUDA and Triton are enough for those that need neither vLLM nor NIXL.
#
# Every stage is a process of its own and leaves a JSON line in $OUT/gpu.jsonl (OUT: build/gpu by default). A second call
# goes on with the stages that have none; those that are named run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT=${OUT:-build/gpu} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD
mkdir -p "$OUT"
python=${PYTHON:-.venv/bin/python}
[[ -x $python ]] || python=python3
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || true
exec timeout "${GPU_SECONDS:-470}" "$python" -m tests.benchmarks.gpu_stages "$@" 2>&1 | tee -a "$OUT/gpu.log"
