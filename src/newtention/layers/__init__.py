"""Parametrisations: how the unknowns become queries, keys, values and the output."""

from newtention.layers.attention_map import AttentionMap
from newtention.layers.base import Block, Heads, Parametrisation, Projection
from newtention.layers.bilinear import Bilinear
from newtention.layers.evaluation import Evaluation, evaluate, weights_of_heads
from newtention.layers.factored import Factored
from newtention.layers.rotary import Rotary
from newtention.layers.values import (
    AttentionLayer,
    BilinearAttention,
    FactoredAttention,
    MapAttention,
)

__all__ = [
    "AttentionLayer",
    "AttentionMap",
    "Bilinear",
    "BilinearAttention",
    "Block",
    "Evaluation",
    "Factored",
    "FactoredAttention",
    "Heads",
    "MapAttention",
    "Parametrisation",
    "Projection",
    "Rotary",
    "evaluate",
    "weights_of_heads",
]
