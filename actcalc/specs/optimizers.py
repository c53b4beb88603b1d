"""Optimizers, one row each: what they keep of every parameter, and what a step of them moves.

Choices, help, schema, bytes, times and readers of launch files come from these rows; every column
must be given. To add an optimizer is to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from actcalc.specs.row import Row

Kept = Literal["recipe", "8-bit", "factored"]
"""How moments are stored: each in the recipe's type; in blocks of 8 bits that share an fp32 scale,
fp32 for small tensors; as fp32 sums over the rows and the columns of a matrix."""


class Optimizer(Row):
    """What one optimizer keeps and does. Names in frameworks are as each spells them."""

    name: str
    """As given to --optimizer."""
    title: str
    """In a few words, for help and schema."""
    updates: bool
    """Weights are updated: there are gradients and, where the recipe has them, master weights."""
    moments: int
    """Moments of one parameter."""
    matrix_moments: int
    """The same of a parameter of a hidden matrix."""
    kept: Kept
    """How moments are stored."""
    fused: bool
    """A kernel of one pass exists; without one a step is a chain of element-wise kernels."""
    passes: int
    """Reads and writes of an element in that chain beyond those of its states themselves."""
    newton_schulz: int
    """Iterations that orthogonalise each hidden matrix, which must be whole for it (0: none)."""
    eight_bit: str
    """The optimizer that does the same with 8-bit moments; empty where there is none."""
    megatron: tuple[str, ...]
    """Megatron-LM's --optimizer."""
    torchtitan: tuple[str, ...]
    """torchtitan's optimizer name."""
    deepspeed: tuple[str, ...]
    """``type`` in DeepSpeed's JSON, which is read in lower case."""
    transformers: tuple[str, ...]
    """transformers' ``optim``."""
    torch: tuple[str, ...]
    """Classes of ``torch.optim``."""
    bitsandbytes: tuple[str, ...]
    """Classes of ``bitsandbytes.optim``."""
    source: str
    """Where states and passes are from."""


# AdamW decays, scales and adds to both moments, takes the root, divides, adds epsilon and updates:
# 22 passes in all, of which the fused kernel needs 7.
_ADAM = "Kingma & Ba 2015, algorithm 1; torch.optim _single_tensor_adam"
_ROWS = (
    Optimizer(
        name="adamw", title="Adam with decoupled weight decay", updates=True,
        moments=2, matrix_moments=2, kept="recipe",
        fused=True, passes=15, newton_schulz=0, eight_bit="adam8bit",
        megatron=("adam",), torchtitan=("AdamW",), deepspeed=("adamw", "adam"),
        transformers=("adamw_torch", "adamw_torch_fused", "adamw_torch_xla"),
        torch=("AdamW",), bitsandbytes=("AdamW", "AdamW32bit"),
        source="Loshchilov & Hutter 2019, algorithm 2; Composer decoupled_weight_decay.py",
    ),
    Optimizer(
        name="adam", title="Adam", updates=True,
        moments=2, matrix_moments=2, kept="recipe",
        fused=True, passes=13, newton_schulz=0, eight_bit="adam8bit",
        megatron=(), torchtitan=("Adam",), deepspeed=(),
        transformers=(), torch=("Adam",), bitsandbytes=("Adam", "Adam32bit"),
        source=_ADAM,
    ),
    Optimizer(
        name="adam8bit", title="Adam with moments in 8 bits", updates=True,
        moments=2, matrix_moments=2, kept="8-bit",
        fused=True, passes=0, newton_schulz=0, eight_bit="",
        megatron=(), torchtitan=(), deepspeed=(),
        transformers=("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"),
        torch=(), bitsandbytes=("Adam8bit", "AdamW8bit"),
        source="Dettmers et al. 2021, section 2; bitsandbytes has fused kernels alone",
    ),
    Optimizer(
        name="sgd", title="gradient descent", updates=True,
        moments=0, matrix_moments=0, kept="recipe",
        fused=True, passes=2, newton_schulz=0, eight_bit="",
        megatron=(), torchtitan=(), deepspeed=("sgd",),
        transformers=("sgd",), torch=("SGD",), bitsandbytes=(),
        source="torch.optim _single_tensor_sgd without momentum",
    ),
    Optimizer(
        name="momentum", title="gradient descent with momentum", updates=True,
        moments=1, matrix_moments=1, kept="recipe",
        fused=True, passes=4, newton_schulz=0, eight_bit="",
        megatron=("sgd",), torchtitan=(), deepspeed=(),
        transformers=(), torch=(), bitsandbytes=("SGD", "SGD32bit"),
        source="torch.optim _single_tensor_sgd; Megatron's --sgd-momentum is 0.9",
    ),
    Optimizer(
        name="adafactor", title="second moments by rows and columns", updates=True,
        moments=1, matrix_moments=1, kept="factored",
        # square and add 3, two means 2, product of the factors 3, times gradient 3, its norm 1,
        # clipping 2, step size 2
        fused=False, passes=16, newton_schulz=0, eight_bit="",
        megatron=(), torchtitan=(), deepspeed=(),
        transformers=("adafactor",), torch=("Adafactor",), bitsandbytes=(),
        source="Shazeer & Stern 2018, algorithm 4; transformers optimization.py Adafactor.step",
    ),
    Optimizer(
        name="lion", title="sign of one moment", updates=True,
        moments=1, matrix_moments=1, kept="recipe",
        fused=True, passes=6, newton_schulz=0, eight_bit="",
        megatron=("lion",), torchtitan=(), deepspeed=("lion",),
        transformers=("lion_32bit",), torch=(), bitsandbytes=("Lion", "Lion32bit"),
        source="Chen et al. 2023, arXiv:2302.06675, algorithm 2",
    ),
    Optimizer(
        name="muon", title="orthogonalised momentum of hidden matrices, Adam for the rest",
        updates=True,
        # unfused, the rest is AdamW's chain
        moments=2, matrix_moments=1, kept="recipe",
        fused=True, passes=15, newton_schulz=5, eight_bit="",
        megatron=("muon", "dist_muon"), torchtitan=("DistMuon",), deepspeed=("muon",),
        transformers=(), torch=("Muon",), bitsandbytes=(),
        source="Jordan et al. 2024, Muon: 5 iterations in bf16",
    ),
    Optimizer(
        name="none", title="no update: no gradients, no states", updates=False,
        moments=0, matrix_moments=0, kept="recipe",
        fused=True, passes=0, newton_schulz=0, eight_bit="",
        megatron=(), torchtitan=(), deepspeed=(),
        transformers=(), torch=(), bitsandbytes=(),
        source="weights alone",
    ),
)  # fmt: skip

FRAMEWORKS = ("megatron", "torchtitan", "deepspeed", "transformers", "torch", "bitsandbytes")
"""Columns with the names that frameworks have for an optimizer."""


def meant(word: str) -> str:
    """The optimizer that a framework calls ``word``, in whatever case; empty if none does.

    A paged one keeps the same states, in memory that the driver may move to the host.
    """
    lower = word.lower()
    word = lower.removeprefix("paged_").removeprefix("paged")
    if word in OPTIMIZERS and word != lower:
        return word
    for row in _ROWS:
        if any(word.lower() in map(str.lower, getattr(row, column)) for column in FRAMEWORKS):
            return row.name
    return ""


OPTIMIZERS: Mapping[str, Optimizer] = {row.name: row for row in _ROWS}
"""Every optimizer by its name."""
