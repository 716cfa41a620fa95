#!/usr/bin/env bash
# For whoever has a GPU: checks that streaming beside it changes no bit, and measures it against plain llama.cpp with the
# experts in mapped memory (its --cpu-moe), in one command. llama-cpp-python must have been built for the GPU: docs/gpu.md.
#
#     benchmarks/gpu.sh MODEL [LAYERS] [CELL_FLAGS...]      for example: benchmarks/gpu.sh big.gguf all --cache-mb 8G
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?give a GGUF file}
layers=${2:-all}
flags=("${@:3}")
export PATH=$PWD/.venv/bin:$PATH
mkdir -p build

routeahead inspect "$model" -ngl "$layers"
python benchmarks/gpu_identity.py "$model" -ngl "$layers"
routeahead bench "$model" --passes "${PASSES:-5}" --tokens "${TOKENS:-48}" --json build/gpu.json \
    --cell "cpu-moe: benchmarks/plain_mmap.py -ngl $layers" \
    --cell "stream: -ngl $layers ${flags[*]}" \
    --cell "stream-cpu: ${flags[*]}"
