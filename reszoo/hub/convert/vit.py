"""ViT as timm, torchvision and transformers name it."""

import math
from typing import Any

from reszoo.errors import ReszooError
from reszoo.hub.adopt import Weights
from reszoo.hub.convert._layout import Layout, Name, ending

INVISIBLE = ("norm_eps", "activation", "num_heads")

TIMM: dict[str, Name] = {
    "stem": "patch_embed.proj",
    "class_token": "cls_token",
    "positions": "pos_embed",
    "blocks.{b}.attention.residual.0": "blocks.{b}.norm1",
    "blocks.{b}.attention.residual.1.qkv": "blocks.{b}.attn.qkv",
    "blocks.{b}.attention.residual.1.out": "blocks.{b}.attn.proj",
    "blocks.{b}.mlp.residual.0": "blocks.{b}.norm2",
    "blocks.{b}.mlp.residual.1": "blocks.{b}.mlp.fc1",
    "blocks.{b}.mlp.residual.4": "blocks.{b}.mlp.fc2",
    "norm": "norm",
    "head": "head",
}
TORCHVISION: dict[str, Name] = {
    "stem": "conv_proj",
    "class_token": "class_token",
    "positions": "encoder.pos_embedding",
    "blocks.{b}.attention.residual.0": "encoder.layers.encoder_layer_{b}.ln_1",
    "blocks.{b}.attention.residual.1.qkv.weight": "encoder.layers.encoder_layer_{b}.self_attention.in_proj_weight",
    "blocks.{b}.attention.residual.1.qkv.bias": "encoder.layers.encoder_layer_{b}.self_attention.in_proj_bias",
    "blocks.{b}.attention.residual.1.out": "encoder.layers.encoder_layer_{b}.self_attention.out_proj",
    "blocks.{b}.mlp.residual.0": "encoder.layers.encoder_layer_{b}.ln_2",
    "blocks.{b}.mlp.residual.1": "encoder.layers.encoder_layer_{b}.mlp.0",
    "blocks.{b}.mlp.residual.4": "encoder.layers.encoder_layer_{b}.mlp.3",
    "norm": "encoder.ln",
    "head": "heads.head",
}
TRANSFORMERS: dict[str, Name] = {
    "stem": "embeddings.patch_embeddings.projection",
    "class_token": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "blocks.{b}.attention.residual.0": "layers.{b}.layernorm_before",
    "blocks.{b}.attention.residual.1.qkv": (
        "layers.{b}.attention.q_proj",
        "layers.{b}.attention.k_proj",
        "layers.{b}.attention.v_proj",
    ),
    "blocks.{b}.attention.residual.1.out": "layers.{b}.attention.o_proj",
    "blocks.{b}.mlp.residual.0": "layers.{b}.layernorm_after",
    "blocks.{b}.mlp.residual.1": "layers.{b}.mlp.fc1",
    "blocks.{b}.mlp.residual.4": "layers.{b}.mlp.fc2",
    "norm": "layernorm",
    "head": "classifier",
}
# The files on the Hub were written before transformers 5.
TRANSFORMERS_4 = (
    (r"encoder\.layer\.(\d+)\.attention\.attention\.query\.", r"layers.\1.attention.q_proj."),
    (r"encoder\.layer\.(\d+)\.attention\.attention\.key\.", r"layers.\1.attention.k_proj."),
    (r"encoder\.layer\.(\d+)\.attention\.attention\.value\.", r"layers.\1.attention.v_proj."),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"layers.\1.attention.o_proj."),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense\.", r"layers.\1.mlp.fc1."),
    (r"encoder\.layer\.(\d+)\.output\.dense\.", r"layers.\1.mlp.fc2."),
    (r"encoder\.layer\.(\d+)\.layernorm_", r"layers.\1.layernorm_"),
)


def image_size_of(weights: Weights) -> dict[str, Any]:
    """The size of the square images that the stored position table was learned for."""
    table = ending(weights, "positions", "pos_embed", "encoder.pos_embedding", "embeddings.position_embeddings")
    patch = ending(weights, "stem.weight", "patch_embed.proj.weight", "conv_proj.weight", "projection.weight")
    if table is None or patch is None:
        return {}
    patches = weights.shape(table)[1] - 1
    side = math.isqrt(patches)
    if side * side != patches:
        raise ReszooError(
            f"the position table {table} has {patches} patches behind the class token, which is not a square; "
            "such tables, of oblong images or with more tokens in front, are not supported"
        )
    return {"image_size": side * weights.shape(patch)[-1]}


LAYOUTS = tuple(
    Layout(
        libraries=(library,),
        table=table,
        fixed={"norm_eps": epsilon, "activation": "gelu"},
        implied=image_size_of,
        wrappers=("vit",) if library == "transformers" else (),
        base="vit." if library == "transformers" else "",
        legacy=TRANSFORMERS_4 if library == "transformers" else (),
        # BERT's pooler was kept in ViTModel; no classifier reads it.
        unused=(r"pooler\.dense\.(weight|bias)",) if library == "transformers" else (),
        first="stem.weight",
    )
    for library, table, epsilon in (
        ("timm", TIMM, 1e-6),
        ("torchvision", TORCHVISION, 1e-6),
        ("transformers", TRANSFORMERS, 1e-12),
    )
)
