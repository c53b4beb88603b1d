"""Blocks of diffusion transformers as diffusers trains them, to measure one by one.

``actcalc measure --module docs/examples/diffusion.py:dit_xl_2 --save dit-xl-2.json``, and so on;
diffusers is needed for that, not for what lies beside this file: what each of them saved. Sizes:
DiT-XL/2 is Peebles and Xie 2022 (arXiv:2212.09748), table 1, 28 such layers; SD3-medium the 2 B
model of Esser et al. 2024 (arXiv:2403.03206), 24 layers; FLUX.1-dev the defaults of diffusers'
FluxTransformer2DModel, 19 double layers and 38 single ones.
"""

import torch
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from diffusers.models.transformers.transformer_flux import (
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)

BF16 = torch.bfloat16
PATCHES = 64 * 64
"""Tokens of an image of 1024 x 1024 pixels: a latent of 128 x 128 in patches of 2 x 2."""


def dit_xl_2(batch=8):
    """DiT-XL/2 on images of 256 x 256 pixels."""
    block = BasicTransformerBlock(
        1152, 16, 72, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
        attention_bias=True, norm_type="ada_norm_zero", norm_elementwise_affine=False,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.empty(batch, 16 * 16, 1152, dtype=BF16),
        "timestep": torch.zeros(batch, dtype=torch.int64),
        "class_labels": torch.zeros(batch, dtype=torch.int64),
    }
    return block.to(BF16), inputs


def _streams(batch, width, text):
    return {
        "hidden_states": torch.empty(batch, PATCHES, width, dtype=BF16),
        "encoder_hidden_states": torch.empty(batch, text, width, dtype=BF16),
        "temb": torch.empty(batch, width, dtype=BF16),
    }


def sd3_medium(batch=4):
    """Stable Diffusion 3 medium: image and 333 tokens of text, each with weights of its own."""
    block = JointTransformerBlock(dim=1536, num_attention_heads=24, attention_head_dim=64)
    return block.to(BF16), _streams(batch, 1536, 333)


def _flux(block, batch):
    angles = torch.empty(PATCHES + 512, 128)
    return block.to(BF16), {**_streams(batch, 3072, 512), "image_rotary_emb": (angles, angles)}


def flux_1_dev_double(batch=1):
    """FLUX.1-dev, the first 19 layers: image and 512 tokens of text apart."""
    return _flux(FluxTransformerBlock(3072, 24, 128), batch)


def flux_1_dev_single(batch=1):
    """FLUX.1-dev, the other 38 layers: both as one sequence."""
    return _flux(FluxSingleTransformerBlock(3072, 24, 128), batch)
