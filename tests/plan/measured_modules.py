"""Modules of a user's own: ``factory()`` of each returns (module, input), as measure wants it."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional

B, T, H, A = 2, 16, 32, 4


class Mlp(nn.Module):
    def __init__(self, inplace: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.inplace = inplace

    def forward(self, x):
        hidden = self.up(x)
        return self.down(functional.relu_(hidden) if self.inplace else functional.gelu(hidden))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, A, H // A).transpose(1, 2) for z in self.qkv(x).split(H, dim=-1))
        probs = (q @ k.transpose(-1, -2) / (H // A) ** 0.5).softmax(-1)
        return self.out((probs @ v).transpose(1, 2).reshape(b, t, H))


class Block(nn.Module):
    def __init__(self, inplace: bool = False, dropout: float = 0.0):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(H), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(H), Mlp(inplace)
        self.inplace, self.dropout = inplace, dropout

    def forward(self, x):
        branch = functional.dropout(self.attn(self.ln_1(x)), self.dropout)
        x = branch.add_(x) if self.inplace else x + branch
        return x + functional.dropout(self.mlp(self.ln_2(x)), self.dropout)


class Routed(nn.Module):
    """Two experts by top-1; ``counting``: and a buffer that counts the steps."""

    def __init__(self, counting: bool = False):
        super().__init__()
        self.counting = counting
        self.gate = nn.Linear(H, 2, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(2))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.counting:
            self.steps.add_(1)
        weight, which = self.gate(x).softmax(-1).topk(1)
        made = torch.stack([expert(x) for expert in self.experts], -2)
        picked = made.gather(-2, which.unsqueeze(-1).expand(*which.shape, H)).squeeze(-2)
        return x + picked * weight


class Spoiling(nn.Module):
    """Changes what it was given."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return x.add_(self.mlp(x).sigmoid())


class Random(nn.Module):
    """Fifteen steps drawn from ``seed``: products, views, ops in place, random masks, sums."""

    def __init__(self, seed: int):
        super().__init__()
        self.draw = random.Random(seed)
        self.steps = [self.draw.randrange(11) for _ in range(15)]
        self.picks = [self.draw.random() for _ in range(60)]
        self.linears = nn.ModuleList(nn.Linear(H, H) for _ in self.steps)

    def forward(self, x):
        values, picks = [x * 1.0], iter(self.picks)

        def pick():
            return values[int(next(picks) * len(values))]

        for step, linear in zip(self.steps, self.linears, strict=True):
            value = pick()
            if step == 0:
                made = linear(value)
            elif step == 1:
                made = functional.gelu(value)
            elif step == 2:
                made = functional.relu_(linear(value))
            elif step == 3:
                made = value.transpose(0, 1).contiguous().transpose(0, 1)
            elif step == 4:
                made = value.softmax(-1)
            elif step == 5:
                made = value * torch.bernoulli(torch.full_like(value, 0.7))
            elif step == 6:
                made = (linear(value) + 0.5).mul_(2.0).sub_(pick())
            elif step == 7:
                made = torch.cat(value.chunk(2, -1)[::-1], -1)
            elif step in (8, 9):
                # Another op reads a content that is changed later, with what came of it.
                made = linear(value) + 0.5
                read = made.sigmoid()
                made.add_(linear(read) if step == 8 else 1.0)
                values.append(read)
            else:
                made = value * pick()
            values.append(made)
        return sum(values[1:], x)


def plain():
    return Block(), torch.randn(B, T, H)


def inplace():
    return Block(inplace=True), torch.randn(B, T, H)


def dropout():
    return Block(dropout=0.1), torch.randn(B, T, H)


def routed():
    return Routed(), torch.randn(B, T, H)


def counting():
    return Routed(counting=True), torch.randn(B, T, H)


class Spoilt(nn.Module):
    """A layer that changes what it is given, behind another module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(H, H)
        self.layers = nn.ModuleList([Spoiling()])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def spoiling():
    return Spoilt(), torch.randn(B, T, H)
