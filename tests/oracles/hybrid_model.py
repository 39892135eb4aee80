"""The three-memory hybrid in NumPy float64: one sequence, all tokens at once, no cache.

`weights` are plain arrays by name, matrices `[out, in]`. Every layer is `x + mixer`,
then `x + mlp`; mixers are Gated DeltaNet, sliding-window or full attention.

Legend:
    T     tokens
    H     query heads, or value heads of a state
    G     key/value heads
    I     key heads of a state; each has H // I value heads
    K, V  key width, value width of a state
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tests.oracles.attention import dense_attention
from tests.oracles.recurrent import gdn_log_decay, gdn_recurrent, l2_normalize
from tests.oracles.short_conv import short_conv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the shapes of the weights do not say.

    Attributes:
        pattern: `full`, `swa` or `state` for each layer.
        head_dim: Elements of an attention head.
        kv_heads: G by kind of attention layer.
        window: Tokens that a query of an `swa` layer sees, its own included.
        theta: Base of the rotary embedding of all elements of a head.
        key_heads: I.
        value_heads: H of a state.
        key_dim: K.
        value_dim: V.
        epsilon: Of every RMS norm.
    """

    pattern: tuple[str, ...]
    head_dim: int
    kv_heads: Mapping[str, int]
    window: int
    theta: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    epsilon: float


def hybrid_logits(weights: dict, tokens: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Returns the logits of every token, `[T, vocab]`.

    Args:
        weights: `embedding`, `norm`, `output`, and a list `layers` of `mixer_norm`,
            `mixer`, `mlp_norm` and `mlp`.
        tokens: `[T]`.
        sizes: The sizes.

    Returns:
        The logits.

    Source: Gated Delta Networks, arXiv:2412.06464; Llama 3, arXiv:2407.21783.
    """
    x = np.asarray(weights["embedding"], np.float64)[tokens]
    for kind, layer in zip(sizes.pattern, weights["layers"], strict=True):
        normed = _rms_norm(x, layer["mixer_norm"], sizes.epsilon)
        mixer = _delta_net if kind == "state" else _attention
        x = x + mixer(layer["mixer"], normed, kind, sizes)
        normed = _rms_norm(x, layer["mlp_norm"], sizes.epsilon)
        gate, up = np.split(_linear(normed, layer["mlp"]["gate_up"]), 2, axis=-1)
        x = x + _linear(_silu(gate) * up, layer["mlp"]["down"])
    return _linear(_rms_norm(x, weights["norm"], sizes.epsilon), weights["output"])


def _attention(layer: dict, x: np.ndarray, kind: str, sizes: Sizes) -> np.ndarray:
    num_tokens = len(x)
    heads = _linear(x, layer["qkv"]).reshape(num_tokens, -1, sizes.head_dim)
    kv_heads = sizes.kv_heads[kind]
    q, k, v = np.split(heads, [-2 * kv_heads, -kv_heads], axis=1)
    out, _ = dense_attention(
        _rotate(q, sizes.theta),
        _rotate(k, sizes.theta),
        v,
        context_len=0,
        softmax_scale=sizes.head_dim**-0.5,
        window=sizes.window if kind == "swa" else None,
        sinks=None,
        soft_cap=None,
        causal=True,
    )
    return _linear(out.reshape(num_tokens, -1), layer["o"])


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Turns element pairs (i, i + D / 2) of token t by `t * theta^(-2 i / D)`."""
    pairs = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(pairs) / pairs)
    turned = (x[..., :pairs] + 1j * x[..., pairs:]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _delta_net(layer: dict, x: np.ndarray, kind: str, sizes: Sizes) -> np.ndarray:
    num_tokens = len(x)
    ratio = sizes.value_heads // sizes.key_heads
    values = ratio * sizes.value_dim
    rows = 2 * sizes.key_dim + 2 * values
    matrix = np.asarray(layer["in"], np.float64)
    channels: dict[str, list] = {name: [] for name in ("q", "k", "v", "z", "b", "a")}
    for i in range(sizes.key_heads):
        own = matrix[i * rows : (i + 1) * rows]
        cuts = [sizes.key_dim, 2 * sizes.key_dim, 2 * sizes.key_dim + values]
        for name, part in zip("qkvz", np.split(own, cuts), strict=True):
            channels[name].append(x @ part.T)
        start = sizes.key_heads * rows + 2 * ratio * i
        channels["b"].append(x @ matrix[start : start + ratio].T)
        channels["a"].append(x @ matrix[start + ratio : start + 2 * ratio].T)
    q, k, v, z, b, a = (np.concatenate(found, axis=1) for found in channels.values())
    mixed = np.concatenate([q, k, v], axis=1)
    taps = layer["conv"].shape[1]
    mixed, _ = short_conv(
        mixed, layer["conv"], np.zeros((taps - 1, mixed.shape[1])), silu=True
    )
    keys = sizes.key_heads * sizes.key_dim
    q, k = (
        l2_normalize(part.reshape(num_tokens, sizes.key_heads, -1), eps=1e-6)
        for part in (mixed[:, :keys], mixed[:, keys : 2 * keys])
    )
    v = mixed[:, 2 * keys :].reshape(num_tokens, sizes.value_heads, -1)
    out, _ = gdn_recurrent(
        q,
        k,
        v,
        gdn_log_decay(a, layer["a_log"], layer["dt_bias"]),
        1 / (1 + np.exp(-b)),
        np.zeros((sizes.value_heads, sizes.value_dim, sizes.key_dim)),
        scale=sizes.key_dim**-0.5,
    )
    out = _rms_norm(out, layer["norm"], sizes.epsilon)
    out = out.reshape(num_tokens, -1) * _silu(z)
    return _linear(out, layer["out"])


def _linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x @ np.asarray(weight, np.float64).T


def _rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
    return x / scale * np.asarray(weight, np.float64)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
