#!/bin/sh
# Train a small Llama on the Python standard library's sources with four processes, change the
# layout in the middle of the run, and let the model write.
set -eu
run="runs/demo-$(date +%Y%m%d-%H%M%S)"

echo "== 1. four processes: tensor parallel 2 x pipeline parallel 2"
fivefold train demo --nproc 4 --save "$run" --train-iters 80 --lr-decay-iters 160

echo
echo "== 2. the same run goes on as data parallel 2 x tensor parallel 2, from the checkpoint"
fivefold train demo --nproc 4 --save "$run" --train-iters 160 \
    --pipeline-model-parallel-size 1 --data-parallel-shard-size 2 \
    --data-parallel-sharding-strategy optim

echo
echo "== 3. what it writes after 'def '"
fivefold sample "$run" "def " --max-tokens 60

echo
echo "Everything is in $run: config.toml, metrics.jsonl, checkpoints/, tokenizer.json"
echo "Prove the layout:   fivefold verify demo --nproc 4"
echo "Look before a run:  fivefold train llama3-405b --nproc 16384 --dry-run"
