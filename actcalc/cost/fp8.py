"""What scaling costs where products run in fp8: passes over the operands, and slower products.

An operand is read in 16 bits and written in 8 twice, once for each of the two products it is in
(row- and column-wise); what comes on top is the recipe's:

- delayed: the scale is of earlier steps; one pass does all (Transformer Engine's cast_transpose).
- tensorwise (current scaling): the largest value of the tensor is looked for first.
- mxfp8: a scale for each 32 values. NVIDIA/TransformerEngine docs/examples/gemm_profiling/
  gemm_profiling.rst (12 products of a layer on a B300, with quantisation and without): quantising
  takes 1.82 ms where delayed scaling takes 0.99, products alone 7.161 ms where one scale a tensor
  takes 6.812.
- blockwise: a scale for each 128 values (the same page, H200): 22.882 ms where delayed scaling
  takes 18.978, of which 2.19 is quantising: products at 81 % of the speed.
- rowwise: a scale for each row, sought again for columns (pytorch/FBGEMM pull request 2546, H100: 4
  bytes an element for one of the two); most shapes reach 90 to 100 % of the speed with one scale a
  tensor (pytorch/pytorch issue 147971).

Experts' parts of an operand are quantised one by one, except under delayed scaling (Transformer
Engine pytorch/csrc/extensions/cast.cpp multi_tensor_quantize_impl).

What sequence parallelism gathers for a product, or for its gradients, is gathered in 8 bits
(Transformer Engine distributed.py gather_along_first_dim with a quantizer; torchao
float8/float8_tensor_parallel.py), except under scales by row (torchtitan
models/llama3/infra/parallelize.py: float8 tensor parallelism for one scale a tensor alone).

Weights are quantised once a step by Transformer Engine (module/base.py is_first_microbatch), in
each pass by torchao (float8/float8_linear.py matmul_with_hp_or_float8_args), which also writes the
second copy with a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Scaling(NamedTuple):
    """A recipe of scaling."""

    moved: float
    """Bytes an operand's element moves to be quantised for both of its products."""
    speed: float
    """Of the products, over that with one scale a tensor."""
    kernels: int
    """Kernels for one operand: of current scaling the largest value, the scale, the cast."""
    apart: float = 0.0
    """Further bytes where a kernel of its own makes the second copy from the first."""
    together: bool = False
    """One kernel quantises the parts of all experts."""
    gathered: bool = True
    """Parts of sequences are quantised before they are gathered."""


SCALINGS: Mapping[str, Scaling] = {
    "delayed": Scaling(4.0, 1.0, 1, apart=1.0, together=True),
    "tensorwise": Scaling(6.0, 1.0, 3, apart=1.0),
    "blockwise": Scaling(4.0, 0.81, 1),
    "mxfp8": Scaling(7.4, 0.95, 1),
    "rowwise": Scaling(8.0, 0.95, 2, gathered=False),
}
"""By the name of --fp8-recipe and of torchtitan's recipe_name."""


def launches(scaling: Scaling, local: float) -> float:
    """Kernels that quantise an operand of ``local`` experts' parts (a number or an array)."""
    return scaling.kernels * (1 if scaling.together else local)


def scaling_of(recipe: str, *, vendor: bool) -> Scaling:
    """The recipe of a run: ``auto`` is Megatron's delayed scaling, or torchao's, tensor by tensor.

    ``vendor`` says that Transformer Engine runs the products.
    """
    if recipe == "auto":
        recipe = "delayed" if vendor else "tensorwise"
    found = SCALINGS[recipe]
    if vendor or not found.apart:
        return found
    return found._replace(moved=found.moved + found.apart, kernels=found.kernels + 1)
