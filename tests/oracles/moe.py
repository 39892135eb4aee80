"""Mixture of experts in NumPy float64: choosing, and two ways of computing.

Legend:
    T  tokens
    E  experts
    C  experts that a token gets
    D  elements that go in and out of an expert
    F  elements between
"""

from collections.abc import Callable

import numpy as np

Activation = Callable[[np.ndarray, np.ndarray], np.ndarray]


def choose_experts(
    logits: np.ndarray,
    correction: np.ndarray,
    *,
    scoring: str,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    best_per_group: int,
    renormalize: bool,
    scaling: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses and weighs the experts of each token, one token at a time.

    Args:
        logits: `[T, E]`.
        correction: Added to the scores for choosing only, `[E]`.
        scoring: `"sigmoid"` or `"softmax"`.
        num_chosen: C.
        num_groups: Equal runs of experts.
        num_chosen_groups: Groups whose experts can be chosen.
        best_per_group: Experts whose corrected scores, added, rank a group.
        renormalize: Whether the chosen scores are divided by their sum.
        scaling: Factor of every weight.

    Returns:
        Expert ids `[T, C]`, ascending, and their weights `[T, C]`.

    Raises:
        ValueError: If `scoring` is neither.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.2.1; DeepSeek-V3
        (arXiv:2412.19437), equations 12 to 16.
    """
    num_experts = logits.shape[1]
    group_of = np.arange(num_experts) // (num_experts // num_groups)
    all_ids, all_weights = [], []
    for row in np.asarray(logits, np.float64):
        if scoring == "sigmoid":
            scores = 1.0 / (1.0 + np.exp(-row))
        elif scoring == "softmax":
            scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        else:
            raise ValueError(f"{scoring=} must be 'sigmoid' or 'softmax'")
        ranked = scores + correction
        group_scores = [
            np.sort(ranked[group_of == group])[-best_per_group:].sum()
            for group in range(num_groups)
        ]
        groups = np.argsort(group_scores)[num_groups - num_chosen_groups :]
        candidates = np.flatnonzero(np.isin(group_of, groups))
        ids = np.sort(candidates[np.argsort(ranked[candidates])[-num_chosen:]])
        weights = scores[ids]
        if renormalize:
            weights = weights / (weights.sum() + 1e-20)
        all_ids.append(ids)
        all_weights.append(weights * scaling)
    return np.array(all_ids), np.array(all_weights)


def experts_by_token(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    gate_up_bias: np.ndarray,
    down_bias: np.ndarray,
    activation: Activation,
) -> np.ndarray:
    """Adds the weighted outputs of each token's experts, one token at a time.

    Args:
        x: `[T, D]`.
        ids: `[T, C]`.
        weights: `[T, C]`.
        gate_up: `[E, 2 F, D]`, the rows of gate before those of up.
        down: `[E, D, F]`.
        gate_up_bias: `[E, 2 F]`.
        down_bias: `[E, D]`.
        activation: Of gate and up.

    Returns:
        `[T, D]`.
    """
    out = np.zeros(x.shape)
    for t, token in enumerate(np.asarray(x, np.float64)):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            gate, up = np.split(gate_up[expert] @ token + gate_up_bias[expert], 2)
            y = down[expert] @ activation(gate, up) + down_bias[expert]
            out[t] += weight * y
    return out


def experts_by_mask(
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    gate_up_bias: np.ndarray,
    down_bias: np.ndarray,
    activation: Activation,
) -> np.ndarray:
    """The same with every expert on every token, and weights of 0 for most.

    Args:
        x: As in `experts_by_token`.
        ids: As in `experts_by_token`.
        weights: As in `experts_by_token`.
        gate_up: As in `experts_by_token`.
        down: As in `experts_by_token`.
        gate_up_bias: As in `experts_by_token`.
        down_bias: As in `experts_by_token`.
        activation: As in `experts_by_token`.

    Returns:
        As `experts_by_token`.
    """
    tokens = np.asarray(x, np.float64)
    dense = np.zeros((len(tokens), len(gate_up)))
    np.put_along_axis(dense, ids, weights, axis=1)
    gate, up = np.split(
        np.einsum("td,efd->tef", tokens, gate_up) + gate_up_bias, 2, axis=-1
    )
    y = np.einsum("tef,edf->ted", activation(gate, up), down) + down_bias
    return np.einsum("te,ted->td", dense, y)
