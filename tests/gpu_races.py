"""Finds races in a kernel's PTX, on a machine without a GPU.

The integers of a thread block are computed for all of its threads at once: addresses,
masks and branches. What is loaded or computed in floating point has no value here, and
no address may depend on it. So each byte is known that an instruction touches, by which
thread, since when, and until when:

* a copy (`cp.async`) runs until its thread has waited for its group, and one in bulk
  (`cp.async.bulk`) until all threads have for its barrier's phase (`mbarrier`);
* operands of a product (`wgmma`) in shared memory are read until the wait for it, by
  all warps: nothing but a barrier of the block keeps a later write away;
* `ldmatrix` and `stmatrix` belong to a warp, and to no thread of it.

Two that touch a byte, of which one writes, are a race, unless the first has ended and
then comes a barrier of the block; or one of the warp, if one warp does both; or one
thread does both. Threads of one instruction may write a byte together: the compiler has
them write the same.

What else is found: accesses outside of an array or not aligned to their size; shared
memory that is read and was not written; operands of a product that were written with no
`fence.proxy.async` since; its registers touched before the wait, or set with no
`wgmma.fence` since; copies that nobody waits for, and waits for bytes that never come.

What is not: races between thread blocks, and what the assembler makes of the PTX.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

SHARED_BASE = 1 << 10
_ARRAY_BITS = 40
_STATEMENT = re.compile(r"(?:@(?P<not>!?)(?P<guard>%\w+)\s+)?(?P<name>\S+)\s*(.*)")
_ADDRESS = re.compile(r"\[\s*(?P<base>[%\w]+)\s*(?:\+\s*(?P<offset>-?\w+)\s*)?\]")
_REGISTER = re.compile(r"%\w+")
_OPERAND = re.compile(r"(?:\{[^}]*\}|\[[^]]*\]|[^,{[])+")
_TYPE = re.compile(r"[bsuf]\d+|pred")
_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_INTEGERS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda x, y, z: x * y + z,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "min": np.minimum,
    "max": np.maximum,
    "mov": np.copy,
    "cvt": np.copy,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "selp": lambda x, y, chosen: np.where(chosen != 0, x, y),
}
# What else has nothing but a result, which has no value here.
_PURE = {"abs", "bfi", "div", "ex2", "fma", "lg2", "lop3", "mma", "prmt", "rcp"}
_PURE |= {"rem", "rsqrt", "sqrt", "tanh"}


@dataclasses.dataclass(eq=False)
class _Access:
    """What an instruction touches, in pairs of bytes.

    Attributes:
        text: the instruction.
        cells: the pairs, sorted.
        threads: the thread that touches each, -1 for several.
        warps: its warp, -1 for several.
        began: counts of barriers and of warps' barriers before.
        ended: these when it has ended; None while it runs.
    """

    text: str
    is_write: bool
    cells: np.ndarray
    threads: np.ndarray
    warps: np.ndarray
    began: tuple[int, int]
    ended: tuple[int, int] | None

    def is_race_with(self, later: "_Access") -> bool:
        if not (self.is_write or later.is_write):
            return False
        if self.ended and self.ended[0] < later.began[0]:
            return False
        mine, others = self.overlap(later)
        if not self.ended:
            return len(mine) > 0
        thread, warp = self.threads[mine], self.warps[mine]
        is_safe = (thread == later.threads[others]) & (thread >= 0)
        if self.ended[1] < later.began[1]:
            is_safe |= (warp == later.warps[others]) & (warp >= 0)
        return not is_safe.all()

    def overlap(self, other: "_Access") -> tuple[np.ndarray, np.ndarray]:
        if self.cells[0] > other.cells[-1] or self.cells[-1] < other.cells[0]:
            return np.zeros(0, int), np.zeros(0, int)
        both = self.cells, other.cells
        return np.intersect1d(*both, assume_unique=True, return_indices=True)[1:]


class _Products:
    """Groups of products: their accesses, and the registers of sums and operands."""

    def __init__(self):
        self.groups = [([], set(), set())]

    def registers(self, which: int) -> set[str]:
        return set().union(*(group[which] for group in self.groups))


class _Barrier:
    """A barrier in shared memory that counts the bytes of copies, phase by phase.

    Attributes:
        made: count of the block's barriers when it was made.
        phases: how many are over.
        accesses: those of the copies of this phase.
        expected: bytes of this phase; None if nobody has said.
        coming: bytes of its copies.
    """

    def __init__(self, made: int):
        self.made, self.phases = made, 0
        self.start()

    def start(self):
        self.accesses, self.expected, self.coming = [], None, 0

    def finish(self):
        for access in self.accesses:
            # To all threads, for all have waited.
            access.ended = -1, -1
        self.phases += 1
        self.start()


class _Block:
    """A thread block on its way through a program."""

    def __init__(self, ptx, arrays, program, num_threads, shared_bytes):
        self.statements, self.labels = _parse(ptx)
        self.arrays, self.shared_bytes = arrays, shared_bytes
        self.thread = np.arange(num_threads)
        self.values = {
            "%tid.x": self.thread,
            "%laneid": self.thread % 32,
            "%ctaid.x": self.thread * 0 + program,
            "global_smem": self.thread * 0 + SHARED_BASE,
        }
        self.found = []
        self.barriers = self.warp_barriers = self.step = 0
        # What no barrier of the block has come behind, and no fence.
        self.recent, self.unfenced = [], []
        self.is_written = np.zeros(SHARED_BASE + shared_bytes, np.bool_)
        self.copies = [[]]
        self.memory_barriers = collections.defaultdict(lambda: _Barrier(-1))
        self.products = _Products()
        self.product_fence, self.set_at = -1, collections.defaultdict(lambda: -1)

    @property
    def now(self):
        return self.barriers, self.warp_barriers

    def run(self, most_steps=1 << 20):
        at = 0
        for self.step in range(most_steps):
            text = self.statements[at]
            negated, guard, name, rest = _STATEMENT.fullmatch(text).groups()
            operands = [x.strip() for x in _OPERAND.findall(rest)]
            mask = self.thread >= 0
            if guard:
                mask = (self.known(guard, text) != 0) ^ bool(negated)
            at += 1
            if name in ("bra", "bra.uni", "ret"):
                if mask.any() and not mask.all():
                    raise NotImplementedError(f"threads part: {text}")
                if mask.all() and name == "ret":
                    break
                at = self.labels[operands[0]] if mask.all() else at
            else:
                self.look_for_running_products(text, name, operands)
                self.do(text, name, operands, mask)
        else:
            raise NotImplementedError("the program does not end")
        in_bulk = [x.accesses for x in self.memory_barriers.values()]
        for access in itertools.chain(*self.copies, *in_bulk):
            self.report("nobody waits for", access.text)
        return list(dict.fromkeys(self.found))

    def report(self, *what):
        self.found.append(": ".join(what))

    def value(self, operand):
        if operand in self.values or operand.startswith(("%", "{", "0f", "0d")):
            return self.values.get(operand)
        return self.thread * 0 + int(operand, 0)

    def known(self, operand, text):
        value = self.value(operand)
        if value is None:
            raise NotImplementedError(f"{operand} is not known: {text}")
        return value

    def address(self, operand, text):
        found = _ADDRESS.fullmatch(operand)
        return self.known(found["base"], text) + int(found["offset"] or "0", 0)

    def set(self, operand, value=None):
        for register in _REGISTER.findall(operand):
            self.values[register] = value
            self.set_at[register] = self.step

    def look_for_running_products(self, text, name, operands):
        sums, lefts = self.products.registers(1), self.products.registers(2)
        if name.startswith("wgmma") or not sums:
            return
        has_result = not name.startswith(("st", "cp.", "bar", "fence"))
        written = {*_REGISTER.findall(operands[0])} if has_result else set()
        if sums & {*_REGISTER.findall(text)} or lefts & written:
            self.report("touches running products", text)

    def do(self, text, name, operands, mask):
        kind = name.split(".")[0]
        if name.startswith(("ld.shared", "ld.global", "st.shared", "st.global")):
            self.load_or_store(text, name, operands, mask)
        elif name.startswith("ld.param"):
            index = int(re.search(r"_param_(\d+)", operands[1])[1])
            is_array = index < len(self.arrays)
            base = self.thread * 0 + (index + 1 << _ARRAY_BITS)
            self.set(operands[0], base if is_array else None)
        elif kind in ("ldmatrix", "stmatrix"):
            to, at = operands if kind == "ldmatrix" else ("", operands[0])
            rows = self.thread % 32 < 8 * int(re.search(r"\.x(\d)", name)[1])
            at = self.address(at, text)
            self.access(text, at, 16, mask & rows, kind == "stmatrix", is_warps=True)
            self.set(to)
        elif kind == "mbarrier" or name.startswith("cp.async.bulk."):
            self.copy_in_bulk(text, name, operands, mask)
        elif name.startswith("cp.async."):
            self.copy(text, name, operands, mask)
        elif kind == "elect":
            self.set(operands[0], (self.thread % 32 == 0).astype(int))
        elif name == "fence.mbarrier_init.release.cluster":
            pass
        elif kind == "wgmma":
            self.multiply(text, name, operands)
        elif name in ("bar.sync", "bar.warp.sync", "fence.proxy.async.shared::cta"):
            if not mask.all() or operands not in (["0"], ["-1"], []):
                raise NotImplementedError(text)
            self.synchronize(name)
        elif kind in _PURE or kind in _INTEGERS or kind in ("bfe", "setp", "shfl"):
            result = self.compute(name, operands)
            if not mask.all():
                old = self.value(operands[0])
                is_known = result is not None and old is not None
                result = np.where(mask, result, old) if is_known else None
            if not isinstance(result, list):
                self.set(operands[0], result)
                return
            for register, value in zip(
                _REGISTER.findall(operands[0]), result, strict=True
            ):
                self.set(register, value)
        else:
            raise NotImplementedError(text)

    def synchronize(self, name):
        if name.startswith("fence"):
            self.unfenced = [x for x in self.unfenced if not x.ended]
            return
        self.warp_barriers += 1
        if name == "bar.sync":
            self.barriers += 1
            self.recent = [x for x in self.recent if not x.ended]

    def access(
        self,
        text,
        at,
        size,
        mask,
        is_write,
        is_warps=False,
        runs=False,
        alignment=None,
    ):
        """Notes that each thread touches `size` bytes."""
        if not mask.any():
            return []
        at = at[mask]
        index = int(at[0] >> _ARRAY_BITS) - 1
        first, bytes_ = SHARED_BASE, self.shared_bytes
        if index >= 0:
            array = self.arrays[index]
            first = index + 1 << _ARRAY_BITS
            bytes_ = array.nbytes if isinstance(array, np.ndarray) else array
        if at.min() < first or at.max() + size > first + bytes_:
            self.report("outside", text)
        if (at % (alignment or size)).any():
            self.report("not aligned", text)
        cells = at[:, None] // 2 + np.arange(max(size // 2, 1))
        threads = np.broadcast_to(self.thread[mask][:, None], cells.shape)
        return self.note(text, cells, threads, is_write, is_warps, runs)

    def note(self, text, cells, threads, is_write, is_warps, runs):
        cells, place, count = np.unique(cells, return_index=True, return_counts=True)
        threads = threads.ravel()[place]
        warps = np.where((count == 1) | is_warps, threads // 32, -1)
        threads = np.where((count == 1) & (not is_warps), threads, -1)
        ended = None if runs else self.now
        new = _Access(text, is_write, cells, threads, warps, self.now, ended)
        for old in self.recent:
            if old.is_race_with(new):
                self.report("race", old.text, text)
        self.recent.append(new)
        if 2 * cells[-1] < len(self.is_written):
            if not (is_write or self.is_written[cells].all()):
                self.report("reads what nobody wrote", text)
            if is_write:
                self.is_written[cells] = True
                # Copies in bulk go the way of the products.
                if "cp.async.bulk" not in text:
                    self.unfenced.append(new)
        return [new]

    def load_or_store(self, text, name, operands, mask):
        is_load = name.startswith("ld")
        at = self.address(operands[is_load], text)
        width = int(re.search(r"\d+$", name)[0]) // 8
        count = re.search(r"\.v(\d)", name)
        size = width * int(count[1] if count else 1)
        self.access(text, at, size, mask, not is_load)
        if not is_load:
            return
        value, index = None, int(at[0] >> _ARRAY_BITS) - 1
        if mask.all() and index >= 0 and isinstance(self.arrays[index], np.ndarray):
            place = (at & (1 << _ARRAY_BITS) - 1) // width
            value = self.arrays[index].astype(np.int64).take(place, mode="clip")
        self.set(operands[0], value)

    def copy(self, text, name, operands, mask):
        if name == "cp.async.commit_group":
            self.copies.append([])
        elif name == "cp.async.wait_group":
            while len(self.copies) > int(operands[0], 0) + 1:
                for access in self.copies.pop(0):
                    access.ended = self.now
        else:
            to, source = (self.address(x, text) for x in operands[:2])
            # Fewer bytes may come than are written: the rest is 0.
            wanted, size = self.known(operands[-1], text), int(operands[2], 0)
            if (wanted % size).any():
                raise NotImplementedError(text)
            is_read = mask & (wanted > 0)
            group = self.access(text, source, size, is_read, False, runs=True)
            group += self.access(text, to, size, mask, True, runs=True)
            self.copies[-1] += group

    def copy_in_bulk(self, text, name, operands, mask):
        """A copy of one thread, or what is done to the barrier that counts bytes."""
        if name.startswith("mbarrier.try_wait.parity."):
            self.wait_for_bulk(text, operands, mask)
            return
        if mask.sum() > 1:
            raise NotImplementedError(f"more than one thread: {text}")
        if not mask.any():
            return
        (thread,) = np.flatnonzero(mask)
        if name.startswith("mbarrier.init."):
            at = self.address(operands[0], text)
            self.access(text, at, 8, mask, True)
            self.memory_barriers[int(at[thread])] = _Barrier(self.barriers)
        elif name.startswith("mbarrier.arrive.expect_tx."):
            at = self.address(operands[1], text)
            barrier = self.memory_barriers[int(at[thread])]
            if barrier.expected is not None:
                self.report("expected twice", text)
            barrier.expected = int(self.known(operands[2], text)[thread])
        elif name == "cp.async.bulk.prefetch.L2.global":
            at = self.address(operands[0], text)
            size = int(self.known(operands[1], text)[thread])
            self.access(text, at, size, mask, False, alignment=16)
        elif name.startswith("cp.async.bulk.shared::cluster.global."):
            to, source, at = (self.address(operands[i], text) for i in (0, 1, 3))
            size = int(self.known(operands[2], text)[thread])
            if size % 16:
                self.report("not aligned", text)
            barrier = self.memory_barriers[int(at[thread])]
            barrier.coming += size
            for x, is_write in ((source, False), (to, True)):
                barrier.accesses += self.access(
                    text, x, size, mask, is_write, runs=True, alignment=16
                )
        else:
            raise NotImplementedError(text)

    def wait_for_bulk(self, text, operands, mask):
        at, parity = self.address(operands[1], text), self.known(operands[2], text)
        if not mask.all() or (at != at[0]).any() or (parity != parity[0]).any():
            raise NotImplementedError(text)
        barrier = self.memory_barriers[int(at[0])]
        if not 0 <= barrier.made < self.barriers:
            self.report("not all threads see the barrier", text)
        if barrier.phases % 2 == parity[0]:
            if barrier.expected != barrier.coming:
                self.report("never comes", text)
            barrier.finish()
        self.set(operands[0], self.thread * 0 + 1)

    def multiply(self, text, name, operands):
        groups = self.products.groups
        if "fence" in name:
            self.product_fence = self.step
        elif "commit" in name:
            groups.append(([], set(), set()))
        elif "wait" in name:
            while len(groups) > int(operands[0], 0) + 1:
                for access in groups.pop(0)[0]:
                    access.ended = self.now
        else:
            columns = int(re.search(r"m64n(\d+)k", name)[1])
            sums, left = ({*_REGISTER.findall(x)} for x in operands[:2])
            tiles = [(operands[2], columns, operands[-1])]
            if not operands[1].startswith("{"):
                tiles.append((operands[1], 64, operands[-2]))
                left = set()
            running, lefts = self.products.registers(1), self.products.registers(2)
            fresh = {x for x in sums | left if self.set_at[x] > self.product_fence}
            if fresh - running or running & left or lefts & sums:
                self.report("registers of a product with no fence or wait", text)
            groups[-1][1].update(sums)
            groups[-1][2].update(left)
            for register in sums:
                self.values[register] = None
            for tile, rows, is_transposed in tiles:
                cells = [
                    _tile(int(x), rows, is_transposed == "1")
                    for x in {*self.known(tile, text)}
                ]
                cells = np.unique(np.concatenate(cells))
                owner = np.full(cells.shape, -32)
                (new,) = self.note(text, cells, owner, False, False, True)
                groups[-1][0].append(new)
                for old in self.unfenced:
                    if len(old.overlap(new)[0]):
                        self.report("no fence", old.text, text)

    def compute(self, name, operands):
        """Returns a result, a list of those of several registers, or None."""
        kind, *words = name.split(".")
        types = [x for x in words if _TYPE.fullmatch(x)]
        if kind == "mov" and "{" in operands[0] + operands[1]:
            return self.repack(operands, int(types[0][1:]))
        values = [self.value(x) for x in operands[1:]]
        if any(x is None for x in values) or kind in _PURE:
            return None
        if not types or any(x[0] == "f" for x in types) or "bf16" in name:
            return None
        of, to = types[-1], types[0]
        if kind == "setp":
            return _COMPARISONS[words[0]](*(_wrap(x, of) for x in values)).astype(int)
        if kind == "shfl":
            lanes = self.thread // 32 * 32 + values[1] % 32
            return values[0][lanes] if "idx" in words else None
        if kind == "bfe":
            value, first, length = values
            value = _wrap(value, f"u{of[1:]}") >> first & (1 << length) - 1
            sign = value >> np.maximum(length - 1, 0) & 1
            return value - (sign << length) if of[0] == "s" else value
        if of == "pred":
            return _INTEGERS[kind](*values) & 1
        if kind in ("shr", "min", "max", "cvt") or "wide" in words:
            count = 2 if kind in ("min", "max", "mul", "mad") else 1
            values[:count] = [_wrap(x, of) for x in values[:count]]
        if "wide" in words:
            to = f"s{2 * int(of[1:])}"
        elif "hi" in words:
            return None
        return _wrap(_INTEGERS[kind](*values), to)

    def repack(self, operands, bits):
        """Takes a register apart, or puts two together."""
        half = bits // 2
        if operands[0].startswith("{"):
            value = self.value(operands[1])
            return (
                value
                if value is None
                else [_wrap(value >> x, f"s{half}") for x in (0, half)]
            )
        low, high = (self.value(x.strip()) for x in operands[1].strip("{}").split(","))
        if low is None or high is None:
            return None
        return _wrap(_wrap(low, f"u{half}") | high << half, f"s{bits}")


def _wrap(value, kind):
    """Cuts a number to the bits of a type. Registers are signed, and so are 64 bits."""
    bits = int(kind[1:])
    if bits == 64:
        return value
    value = value & (1 << bits) - 1
    return value if kind[0] == "u" else value - (value >> bits - 1 << bits)


def _tile(descriptor, rows, is_transposed):
    """Returns the pairs of bytes of a product's operand, of `rows` by 32 bytes."""
    start, between_columns, between_rows = (
        (descriptor >> x & 0x3FFF) << 4 for x in (0, 16, 32)
    )
    width = {1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    if is_transposed:
        row, byte = np.arange(16)[:, None], np.arange(0, 2 * rows, 2)[None, :]
        at = byte // width * between_columns + byte % width
    else:
        row, at = np.arange(rows)[:, None], np.arange(0, 32, 2)[None, :]
    at = start + row // 8 * between_rows + row % 8 * width + at
    return (at ^ at >> 3 & width - 16).ravel() // 2


def _parse(ptx):
    """Returns the statements of a kernel, and which of them its labels stand before."""
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 :]
    body = re.sub(r"//[^\n]*", "", body[: body.index("\n}")])
    # A statement that goes on in the next line.
    body = re.sub(r"\n\s*\[", " [", body)
    statements, labels = [], {}
    for line in map(str.strip, body.splitlines()):
        if label := re.match(r"(\$?\w+):", line):
            labels[label[1]] = len(statements)
            continue
        for text in map(str.strip, line.split(";")):
            if text.count("{") != text.count("}"):
                text = text.strip("{} \t")
            if text and not text.startswith("."):
                statements.append(text)
    return statements, labels


def races(
    ptx: str,
    arrays: Sequence[np.ndarray | int],
    program: int,
    num_warps: int,
    shared_bytes: int,
) -> list[str]:
    """Takes one thread block through a kernel, and returns what it does wrong.

    Args:
        ptx: of the kernel, as Triton makes it.
        arrays: its arguments: integers that addresses depend on, or the size in bytes.
        program: index of the thread block.
        num_warps: warps of the block.
        shared_bytes: of the block.

    Returns:
        What is wrong, with the instructions.

    Raises:
        NotImplementedError: the kernel does what this module knows nothing of.
    """
    return _Block(ptx, arrays, program, 32 * num_warps, shared_bytes).run()
