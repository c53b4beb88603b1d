#!/bin/bash
# Pretraining of a 7B model on two nodes, with Megatron-LM.
GPUS_PER_NODE=8
NNODES=2

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --vocab-size 32000
)

torchrun --nproc-per-node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    --tensor-model-parallel-size 2 \
    --sequence-parallel \
    --micro-batch-size 8 \
    --global-batch-size 256 \
    --bf16 \
    --use-distributed-optimizer \
    --attention-backend flash
