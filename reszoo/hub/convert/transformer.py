"""BERT and the networks of its form, such as MiniLM, as transformers names them."""

import re
from typing import Any

from reszoo.hub.adopt import Weights
from reszoo.hub.convert._layout import Layout, Name, ending

INVISIBLE = ("norm_eps", "activation", "num_heads", "positions")

TRANSFORMERS: dict[str, Name] = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.positions": "embeddings.position_embeddings",
    "embedding.segments": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "blocks.{b}.attention.residual.0.qkv": (
        "encoder.layer.{b}.attention.self.query",
        "encoder.layer.{b}.attention.self.key",
        "encoder.layer.{b}.attention.self.value",
    ),
    "blocks.{b}.attention.residual.0.out": "encoder.layer.{b}.attention.output.dense",
    "blocks.{b}.attention.norm": "encoder.layer.{b}.attention.output.LayerNorm",
    "blocks.{b}.mlp.residual.0": "encoder.layer.{b}.intermediate.dense",
    "blocks.{b}.mlp.residual.3": "encoder.layer.{b}.output.dense",
    "blocks.{b}.mlp.norm": "encoder.layer.{b}.output.LayerNorm",
    "pooler.0": "pooler.dense",
    "head": "classifier",
}


def sizes(weights: Weights) -> dict[str, Any]:
    """The sizes that the stored shapes show: all but the number of heads."""
    tokens = ending(weights, "embeddings.word_embeddings.weight")
    positions = ending(weights, "embeddings.position_embeddings.weight")
    segments = ending(weights, "embeddings.token_type_embeddings.weight")
    inner = ending(weights, "encoder.layer.0.intermediate.dense.weight")
    if None in (tokens, positions, segments, inner):
        return {}
    vocabulary, width = weights.shape(str(tokens))
    layers = {found[1] for name in weights.names() if (found := re.search(r"encoder\.layer\.(\d+)\.", name))}
    return {
        "vocab_size": vocabulary,
        "embed_dim": width,
        "depth": len(layers),
        "mlp_dim": weights.shape(str(inner))[0],
        "max_length": weights.shape(str(positions))[0],
        "num_segments": weights.shape(str(segments))[0],
    }


LAYOUTS = (
    Layout(
        libraries=("transformers",),
        table=TRANSFORMERS,
        fixed={"norm_eps": 1e-12, "activation": "gelu", "positions": "learned", "embed_norm": True},
        implied=sizes,
        wrappers=("bert",),
        base="bert.",
        legacy=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
        # Position ids count from 0; the pooler is read by classifiers alone.
        unused=(r"embeddings\.position_ids", r"pooler\.dense\.(weight|bias)"),
        heads_from="embed_dim",
    ),
)
