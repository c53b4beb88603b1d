"""A block of one's own, to measure: ``actcalc measure --module docs/examples/block.py:factory``."""

import torch
from torch import nn
from torch.nn import functional

BATCH, SEQ, HIDDEN, HEADS = 1, 4096, 2048, 16


class Block(nn.Module):
    """Attention and a gated feed-forward with a squared ReLU, both behind one norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 8 * HIDDEN, bias=False)
        self.out = nn.Linear(5 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        """Both branches side by side, joined by one product."""
        y = self.norm(x)
        q, k, v = self.qkv(y).view(*y.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        gate, value = self.up(y).chunk(2, -1)
        fed = functional.relu(gate).square() * value
        return x + self.out(torch.cat([attended.transpose(1, 2).flatten(2), fed], -1))


def factory():
    """The block in bf16, and its input."""
    return Block().bfloat16(), torch.empty(BATCH, SEQ, HIDDEN, dtype=torch.bfloat16)
