#!/usr/bin/env bash
# The runtime on GPUs against one process. With the package installed (pip install '.[all]'): bash tests/gpu/run.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
    echo "no GPU here: nothing was run"
    exit 0
fi
run() {
    local processes=$1
    shift
    torchrun --standalone --nproc_per_node "$processes" tests/gpu/train.py "$@"
}
# gloo on CUDA tensors: several processes may share one GPU (with NCCL they may not). The sanitizer finds races.
run 2 --backend gloo --sanitize
run 4 --backend gloo --sanitize --replicas 2
# NCCL on every GPU, as users run it.
run "$gpus" --backend nccl
if [ "$gpus" -ge 2 ] && [ $((gpus % 2)) -eq 0 ]; then
    run "$gpus" --backend nccl --replicas 2
fi
echo "all passed on $gpus GPUs"
