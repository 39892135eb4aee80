"""Inline assembly of Triton kernels on NumPy: the instructions that kernels here use.

A register is an array of bits, with one number for each run of the text. What is not
listed raises `NotImplementedError` with its text.
"""

import re

import ml_dtypes
import numpy as np

# Types of elements, and how many of them share a register.
_FLOATS = {
    "bf16": (ml_dtypes.bfloat16, 1),
    "bf16x2": (ml_dtypes.bfloat16, 2),
    "f16": (np.float16, 1),
    "f16x2": (np.float16, 2),
    "f32": (np.float32, 1),
}
_BITS = {
    "b16": (np.uint16, 1),
    "b32": (np.uint32, 1),
    "s32": (np.int32, 1),
    "u32": (np.uint32, 1),
}
_OF_FLOATS = {
    "abs": np.abs,
    "add": np.add,
    "ex2": np.exp2,
    "fma": lambda a, b, c: a * b + c,
    "lg2": np.log2,
    "max": np.fmax,
    "min": np.fmin,
    "mul": np.multiply,
    "neg": np.negative,
    "rcp": np.reciprocal,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "sub": np.subtract,
}
_OF_BITS = {
    "and": np.bitwise_and,
    "mov": np.positive,
    "not": np.bitwise_not,
    "or": np.bitwise_or,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "xor": np.bitwise_xor,
}
_MODIFIERS = {"approx", "ftz", "rn"}
# A cluster of more than one program is refused before it runs.
_WITHOUT_EFFECT = {"barrier.cluster.arrive.relaxed", "barrier.cluster.wait.acquire"}


def run(
    asm: str,
    constraints: str,
    inputs: list[np.ndarray],
    dtypes: list[np.dtype],
    pack: int,
) -> list[np.ndarray]:
    """Runs assembly on all elements.

    Args:
        asm: the text.
        constraints: as the compiler takes them, outputs first.
        inputs: arrays of one shape.
        dtypes: of the elements of the outputs.
        pack: elements for each run of the text. Neighbours of the flattened arrays
            are taken together; small ones share a register of 32 bits.

    Returns:
        The outputs, in the shape of the inputs.

    Raises:
        NotImplementedError: an instruction is not known here.
    """
    registers = {}
    number = constraints.count("=")
    for array in inputs:
        for register in _to_registers(array, pack):
            registers[f"${number}"] = register
            number += 1
    for statement in re.sub(r"//.*", "", asm).split(";"):
        # A brace in front opens or closes a scope.
        statement = statement.lstrip("{} \n\t").rstrip()
        if statement and not statement.startswith(".reg"):
            _execute(statement, registers)
    shape, size = inputs[0].shape, inputs[0].size
    number, outputs = 0, []
    for dtype in dtypes:
        count = _registers_of(np.dtype(dtype), pack)
        columns = [registers[f"${number + i}"] for i in range(count)]
        number += count
        rows = np.zeros((-(-size // pack), count), columns[0].dtype)
        rows[...] = np.stack(columns, axis=1)
        outputs.append(rows.reshape(-1).view(dtype)[:size].reshape(shape))
    return outputs


def _registers_of(dtype: np.dtype, pack: int) -> int:
    return max(1, pack * dtype.itemsize // 4) if dtype.itemsize < 4 else pack


def _to_registers(array: np.ndarray, pack: int) -> list[np.ndarray]:
    flat = np.zeros(-(-array.size // pack) * pack, array.dtype)
    flat[: array.size] = array.reshape(-1)
    count = _registers_of(array.dtype, pack)
    bits = 8 * pack * array.itemsize // count
    return list(flat.view(f"uint{bits}").reshape(-1, count).T.copy())


def _execute(statement: str, registers: dict[str, np.ndarray]) -> None:
    instruction, _, rest = statement.partition(" ")
    if instruction in _WITHOUT_EFFECT:
        return
    # Commas inside braces separate the halves of a register.
    target, *sources = (x.strip() for x in re.split(r",(?![^{]*})", rest))
    name, *modifiers = instruction.split(".")
    kinds = [x for x in modifiers if x in _FLOATS or x in _BITS]
    others = {*modifiers} - {*kinds}
    is_of_floats = all(x in _FLOATS for x in kinds)
    if others <= _MODIFIERS and name == "cvt" and len(kinds) == 2 and is_of_floats:
        values = [_read(x, registers, *_FLOATS[kinds[1]]) for x in sources]
        # The first source is the upper half.
        found = np.concatenate(values[::-1], axis=1).astype(np.float32)
        found = found.astype(_FLOATS[kinds[0]][0])
    elif others <= _MODIFIERS and name in _OF_FLOATS and len(kinds) == is_of_floats:
        dtype, count = _FLOATS[kinds[0]]
        values = [_read(x, registers, dtype, count) for x in sources]
        if "ftz" in others:
            values = [_flush(x) for x in values]
        exact = _OF_FLOATS[name](*(x.astype(np.float64) for x in values))
        found = exact.astype(np.float32).astype(dtype)
        if "ftz" in others:
            found = _flush(found)
    elif not others and name in _OF_BITS and len(kinds) == 1:
        # A move of floats is one of their bits.
        dtype, count = _BITS.get(kinds[0], (np.uint32, 1))
        found = _OF_BITS[name](*(_read(x, registers, dtype, count) for x in sources))
    else:
        raise NotImplementedError(f"the interpreter has no {statement}")
    if target.startswith("{"):
        halves = np.ascontiguousarray(found).view(np.uint16)
        registers.update(zip(_names(target), halves.T.copy(), strict=True))
    else:
        registers[target] = _join(found)


def _names(vector: str) -> list[str]:
    return [x.strip() for x in vector.strip("{}").split(",")]


def _read(text: str, registers, dtype, count: int) -> np.ndarray:
    """`count` elements from each number of a register, or from a constant."""
    if text.startswith("{"):
        register = _join(np.stack([registers[x] for x in _names(text)], axis=1))
    elif text in registers:
        register = registers[text]
    else:
        bits = int(text[2:], 16) if text[:2] in ("0f", "0F") else int(text, 0)
        register = np.array([bits], f"uint{8 * count * np.dtype(dtype).itemsize}")
    return register.view(dtype).reshape(-1, count)


def _join(columns: np.ndarray) -> np.ndarray:
    """One register of what stands side by side."""
    bits = 8 * columns.itemsize * columns.shape[1]
    return np.ascontiguousarray(columns).view(f"uint{bits}").reshape(-1)


def _flush(x: np.ndarray) -> np.ndarray:
    is_small = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(is_small, np.copysign(x.dtype.type(0), x), x)
