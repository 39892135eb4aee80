"""The one way in which a result is compared with its float64 oracle.

A result is cut into ROWS, one vector per entry of `row_axes`: for an output
`[tokens, heads, width]` with `row_axes=(0, 1)`, one row per (token, head). With
`rms(row)` the root mean square of the oracle's row, two things are asked:

    row      rms(actual - oracle)          <=     tolerance * rms(row)
    element  abs(actual - oracle)          <= 4 * tolerance * max(abs(oracle), rms(row))

The worst row decides, never a mean over rows, so one wrong head vector among
thousands is found; and errors are measured against the row itself, so a result of
small numbers is held to the same accuracy as one of large numbers.

A small number that is the sum of larger ones of both signs has only their accuracy:
its last place may be what is left of their first. An oracle that knows them gives their
`sizes`, and `max(abs(oracle), sizes)` then takes the place of `abs(oracle)` above.

    tolerance = TOLERANCES[dtype] + TOLERANCES[accumulate_dtype] * sqrt(reduced_len)

The first term is the rounding of the result when stored, the second the rounding in
its sum over `reduced_len` terms. Example: a bfloat16 attention output over 1024 keys
gets `2**-7 + 2**-19 * 32 = 0.0079`, a float32 one `2**-19 * 33 = 6.3e-5`.

Nothing but the arguments decides: no environment variable, no platform.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

# Largest relative error of a row, per dtype, before it is scaled with the length of
# the sum: 32 roundings of a float32 (whose exp and division are approximate on a GPU),
# 4 of the short types.
TOLERANCES = {
    "float64": 2.0**-44,
    "float32": 2.0**-19,
    "tensorfloat32": 2.0**-9,
    "float16": 2.0**-9,
    "bfloat16": 2.0**-7,
}

# Results below the smallest normal number of a type may be flushed to zero.
SMALLEST_NORMAL = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "float16": 2.0**-14,
    "bfloat16": 2.0**-126,
}

# A single element may be off by this many times what the row may be off in the mean.
ELEMENT_FACTOR = 4.0

# Beyond this, a comparison no longer tells a wrong result from a right one.
MAX_TOLERANCE = 0.25


def tolerance_of(
    *, dtype: DTypeLike, reduced_len: int, accumulate_dtype: DTypeLike | None = None
) -> float:
    """Largest relative error of a row.

    Args:
        dtype: Type in which the result is stored, a name or anything `numpy.dtype`
            takes.
        reduced_len: Terms of the longest sum behind one element, at least 1: visible
            keys of an attention, tokens since the start of a recurrence, taps of a
            convolution.
        accumulate_dtype: Least precise type that an operand or a running sum takes on
            the way, when that is not float32 (float64 for a float64 result):
            `"tensorfloat32"` for such products, `"bfloat16"` for a state that is
            carried in it.

    Returns:
        The tolerance of the module's docstring.

    Raises:
        ValueError: If a type has no tolerance, if `reduced_len` is below 1, or if the
            tolerance would be so large that the comparison means nothing.
    """
    stored = _name_of(dtype)
    if accumulate_dtype is None:
        accumulated = "float64" if stored == "float64" else "float32"
    else:
        accumulated = _name_of(accumulate_dtype)
    for name in (stored, accumulated):
        if name not in TOLERANCES:
            raise ValueError(f"no tolerance for dtype {name}; have {list(TOLERANCES)}")
    if reduced_len < 1:
        raise ValueError(f"{reduced_len=} must be at least 1")
    tolerance = TOLERANCES[stored] + TOLERANCES[accumulated] * math.sqrt(reduced_len)
    if tolerance > MAX_TOLERANCE:
        raise ValueError(
            f"{tolerance=:.3g} exceeds {MAX_TOLERANCE} for {stored=}, {accumulated=}, "
            f"{reduced_len=}: compare a shorter case"
        )
    return tolerance


def assert_matches(
    actual: ArrayLike,
    oracle: np.ndarray,
    *,
    dtype: DTypeLike,
    reduced_len: int,
    row_axes: tuple[int, ...],
    accumulate_dtype: DTypeLike | None = None,
    sizes: np.ndarray | None = None,
) -> None:
    """Asserts that a result equals its oracle up to the rounding of its type.

    Checked in this order: dtype, shape, positions of NaN and of each infinity, then
    the element and row criteria over the finite elements. An oracle row of zeros
    must be met by zeros.

    Args:
        actual: The result, any array that NumPy can read.
        oracle: What it should be, float64.
        dtype: Type that `actual` must have.
        reduced_len: As in `tolerance_of`.
        row_axes: Axes that number the rows, usually (token or sequence, head). At
            least one axis must be left, as a row of a single number has no size of
            its own to compare with: for an lse `[tokens, heads]` give `(0,)`.
        accumulate_dtype: As in `tolerance_of`.
        sizes: Size of what each element is the sum of, in the oracle's shape, float64;
            None where no element is much smaller than that.

    Raises:
        AssertionError: If they differ; the message names the worst row and element.
        ValueError: If the comparison itself makes no sense.
    """
    tolerance = tolerance_of(
        dtype=dtype, reduced_len=reduced_len, accumulate_dtype=accumulate_dtype
    )
    actual = np.asarray(actual)
    if not isinstance(oracle, np.ndarray) or oracle.dtype != np.float64:
        raise ValueError("the oracle must be a float64 NumPy array")
    if oracle.size == 0:
        raise ValueError(f"nothing to compare: {oracle.shape=}")
    if sizes is not None and sizes.shape != oracle.shape:
        raise ValueError(f"{sizes.shape=} must be {oracle.shape=}")
    rows = sorted(axis % oracle.ndim for axis in row_axes) if oracle.ndim else []
    if len(set(rows)) != len(row_axes) or len(rows) >= oracle.ndim:
        raise ValueError(f"{row_axes=} must be distinct and leave an axis")

    if actual.dtype.name != _name_of(dtype):
        raise AssertionError(f"dtype {actual.dtype.name}, expected {_name_of(dtype)}")
    if actual.shape != oracle.shape:
        raise AssertionError(f"shape {actual.shape}, expected {oracle.shape}")
    actual = actual.astype(np.float64)
    for kind, is_kind in (
        ("NaN", np.isnan),
        ("+inf", np.isposinf),
        ("-inf", np.isneginf),
    ):
        wrong = is_kind(actual) != is_kind(oracle)
        if wrong.any():
            at = _index_of_max(wrong)
            raise AssertionError(
                f"{kind} at different places, {wrong.sum()} of {wrong.size} elements; "
                f"first at {at}: actual {actual[at]}, oracle {oracle[at]}"
            )

    finite = np.isfinite(oracle)
    expected = np.where(finite, oracle, 0.0)
    error = np.abs(np.where(finite, actual, 0.0) - expected)
    size = np.abs(expected)
    if sizes is not None:
        size = np.maximum(size, np.where(finite, sizes, 0.0))
    if not np.isfinite(size).all():
        raise ValueError("sizes must be finite wherever the oracle is")
    inner = tuple(axis for axis in range(oracle.ndim) if axis not in rows)
    num_finite = np.maximum(finite.sum(axis=inner, keepdims=True), 1)
    row_size = _rms(size, inner, num_finite)
    row_error = _rms(error, inner, num_finite)
    flushed = SMALLEST_NORMAL[_name_of(dtype)]
    row_allowed = tolerance * row_size + flushed
    allowed = ELEMENT_FACTOR * tolerance * np.maximum(size, row_size) + flushed
    bad_elements, bad_rows = error > allowed, row_error > row_allowed
    if not bad_elements.any() and not bad_rows.any():
        return

    with np.errstate(over="ignore"):
        at = _index_of_max(error / allowed)
        row = _index_of_max(row_error / row_allowed)
    raise AssertionError(
        f"{bad_rows.sum()} of {bad_rows.size} rows and "
        f"{bad_elements.sum()} of {bad_elements.size} elements differ\n"
        f"  worst row {tuple(row[axis] for axis in rows)} of axes {tuple(rows)}: "
        f"rms error {row_error[row]:.6g}, allowed {row_allowed[row]:.6g}, "
        f"rms of the {'oracle' if sizes is None else 'sizes'} {row_size[row]:.6g}\n"
        f"  worst element {at}: actual {actual[at]:.9g}, oracle {oracle[at]:.9g}, "
        f"error {error[at]:.6g}, allowed {allowed[at]:.6g}\n"
        f"  {tolerance=:.6g} for {_name_of(dtype)} and {reduced_len=}"
    )


def _name_of(dtype: DTypeLike) -> str:
    """Name of a dtype, where a name may be one that NumPy does not know."""
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name


def _rms(x: np.ndarray, axes: tuple[int, ...], count: np.ndarray) -> np.ndarray:
    """Root mean square over `axes`, scaled so that tiny values do not underflow."""
    largest = np.abs(x).max(axis=axes, keepdims=True)
    unit = np.where(largest > 0, largest, 1.0)
    return unit * np.sqrt(((x / unit) ** 2).sum(axis=axes, keepdims=True) / count)


def _index_of_max(x: np.ndarray) -> tuple[int, ...]:
    """Index of the largest entry, as plain ints."""
    return tuple(int(i) for i in np.unravel_index(np.argmax(x), x.shape))
