"""Depthwise causal short convolution in NumPy float64.

Handles ONE sequence; a ragged batch is a loop over its sequences.

Legend:
    T  tokens
    C  channels
    W  taps (`conv_width`); tap `W - 1` multiplies the current token
"""

import numpy as np


def short_conv(
    x: np.ndarray,
    weight: np.ndarray,
    conv_state: np.ndarray,
    *,
    silu: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Convolves token by token with a window that shifts.

        y[t, c] = act(sum_j weight[c, j] * u[t - (W - 1) + j, c])

    where `u` is the state followed by `x`, and `act` is silu or the identity.

    Args:
        x: Raw inputs, `[T, C]`; `T` may be smaller than `W - 1`, or 0.
        weight: Taps, `[C, W]`, oldest first.
        conv_state: The `W - 1` raw inputs before `x`, `[W - 1, C]`, oldest first;
            zeros where the sequence starts.
        silu: Whether `act` is `a * sigmoid(a)`.

    Returns:
        `y [T, C]` and the state after the last token, `[W - 1, C]`.

    Raises:
        ValueError: If the state does not hold `W - 1` inputs.

    Source: Dao-AILab/causal-conv1d, causal_conv1d/causal_conv1d_interface.py,
        `causal_conv1d_ref` and `causal_conv1d_update_ref`.
    """
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    state = np.array(conv_state, np.float64)
    if state.shape != (weight.shape[1] - 1, weight.shape[0]):
        raise ValueError(f"{state.shape=} does not fit {weight.shape=}")
    y = np.zeros(x.shape)
    for t in range(x.shape[0]):
        u = np.concatenate([state, x[t : t + 1]])
        a = np.zeros(x.shape[1])
        for j in range(weight.shape[1]):
            a = a + weight[:, j] * u[j]
        y[t] = a * _sigmoid(a) if silu else a
        state = u[1:]
    return y, state


def short_conv_convolve(
    x: np.ndarray,
    weight: np.ndarray,
    conv_state: np.ndarray,
    *,
    silu: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The same as `short_conv`, one channel at a time with `numpy.convolve`.

    Args:
        x: As in `short_conv`.
        weight: As in `short_conv`.
        conv_state: As in `short_conv`.
        silu: As in `short_conv`.

    Returns:
        As `short_conv`.

    Source: the definition of a convolution; `numpy.convolve` reverses its second
        argument, so the taps are given newest first.
    """
    u = np.concatenate([np.asarray(z, np.float64) for z in (conv_state, x)])
    num_tokens, num_channels = x.shape
    a = np.zeros((num_tokens, num_channels))
    if num_tokens:
        for c in range(num_channels):
            taps = np.asarray(weight[c], np.float64)
            a[:, c] = np.convolve(u[:, c], taps[::-1], mode="valid")
    return (a * _sigmoid(a) if silu else a), u[num_tokens:]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """Logistic function that neither overflows nor loses small values."""
    return np.exp(-np.logaddexp(0.0, -x))
