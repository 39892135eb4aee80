"""What Gluon adds to Triton's language, on NumPy: shared memory and what is in flight.

Layouts are dropped: whether they fit is the compiler's to say. What a kernel must not
see shows as NaN, all bits set:

* shared memory before something is stored;
* the destination of a copy until a wait covers its group, or its barrier's phase;
* a product until its wait, and a product whose operands in shared memory changed in
  the meantime: they came too late, or were overwritten too early.

A warpgroup's product reads shared memory by another way than stores and copies write
it: without `fence_async_shared` between them it is an error. The compiler adds none.

Threads are not modelled, so a missing barrier does not show. Of the tensor core there
is what its inputs keep (float32 is cut to the bits of tf32), and sums in float32.
"""

import collections
import ctypes
import operator
import types

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

from pallas_kernels import bulk_copies
from tests.numpy_builder import BUILDER, as_float32, poison, stored_dtype, tensor_of

_TF32_BITS = np.uint32(0xFFFFE000)


def unwrap(x):
    """The value of a constant, or the list of those of a sequence."""
    if isinstance(x, tl.constexpr):
        return unwrap(x.value)
    if isinstance(x, (tuple, list, tl.tuple)):
        return [unwrap(y) for y in x]
    return x


def _shape(x) -> list[int]:
    return unwrap(list(x.shape))


class Semantic(TritonSemantic):
    """Triton's rules, with tensors of different ranks refused, as Gluon does."""

    def broadcast_impl_value(self, lhs, rhs):
        ranks = [len(x.shape) for x in (lhs, rhs) if x.type.is_block()]
        if len({*ranks}) > 1:
            raise ValueError(f"cannot broadcast {_shape(lhs)} with {_shape(rhs)}")
        return super().broadcast_impl_value(lhs, rhs)


class Shared:
    """A view of shared memory, `gl.shared_memory_descriptor`."""

    def __init__(self, data: np.ndarray, dtype: tl.dtype, layout, unfenced: list):
        self.data = data
        self.dtype = dtype
        self.layout = layout
        self._unfenced = unfenced

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.ndim

    @property
    def numel(self) -> int:
        return self.data.size

    @property
    def type(self):
        return types.SimpleNamespace(
            element_ty=self.dtype, shape=self.shape, layout=self.layout
        )

    def load(self, layout):
        del layout
        return tensor_of(self.data.copy(), self.dtype)

    def store(self, value):
        if not isinstance(value, tl.tensor):
            raise TypeError(f"shared memory takes tensors, not {value!r}")
        if _shape(value) != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f"a store of {value.dtype} {_shape(value)} to shared memory of "
                f"{self.dtype} {self.shape}"
            )
        self.data[...] = value.handle.data
        self._unfenced.append(self.data)

    def index(self, index):
        index = operator.index(unwrap(index))
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"index {index} of shared memory of {self.shape}")
        return self._view(self.data[index])

    def slice(self, start, length, dim=0):
        start, length, dim = unwrap([start, length, dim])
        if not all(isinstance(x, int) for x in (start, length, dim)):
            raise TypeError(f"slice of {start}, {length}, {dim}: not constants")
        if start < 0 or start + length > self.shape[dim]:
            raise IndexError(f"slice {start}+{length} of {self.shape}, {dim=}")
        where = [slice(None)] * self.rank
        where[dim] = slice(start, start + length)
        return self._view(self.data[tuple(where)])

    def permute(self, order):
        return self._view(self.data.transpose(unwrap(order)))

    def reshape(self, shape):
        return self._view(np.reshape(self.data, unwrap(shape), copy=False))

    def _reinterpret(self, dtype, shape, layout):
        dtype, shape = unwrap(dtype), unwrap(shape)
        raw = np.reshape(self.data, -1, copy=False).view(np.uint8)
        num_bytes = int(np.prod(shape)) * stored_dtype(dtype).itemsize
        if num_bytes > raw.size:
            raise ValueError(f"{dtype} {shape} in {raw.size} bytes of shared memory")
        data = raw[:num_bytes].view(stored_dtype(dtype)).reshape(shape)
        return Shared(data, dtype, layout, self._unfenced)

    def _keep_alive(self):
        pass

    def _view(self, data):
        return Shared(data, self.dtype, self.layout, self._unfenced)


class Accumulator:
    """What an asynchronous product returns: to be waited for, not to be read."""

    def __init__(self, source, dtype: tl.dtype, shape: list[int]):
        self.source = source
        self.dtype = dtype
        self.shape = shape


class _Product:
    """A product in flight, of operands and of the sum before it."""

    def __init__(self, a, b, acc, precision: str):
        self._operands = a, b, acc, precision
        self._at_first = [x.copy() for x in self._shared()]
        self.value = None

    def finish(self):
        a, b, acc, precision = self._operands
        acc = acc.value if isinstance(acc, _Product) else acc
        self.value = _multiply(a, b, acc, precision)
        if not all(map(np.array_equal, self._at_first, self._shared())):
            self.value = np.full_like(self.value, np.nan)

    def _shared(self) -> list[np.ndarray]:
        """Bits of the operands in shared memory, which are read at any time."""
        operands = [x for x in self._operands[:2] if isinstance(x, Shared)]
        return [x.data.view(f"u{x.data.itemsize}") for x in operands]


def _multiply(a, b, acc, precision: str) -> np.ndarray:
    product = np.matmul(_factor(a, precision), _factor(b, precision))
    return product if acc is None else acc + product


def _factor(x, precision: str) -> np.ndarray:
    stored = x.data if isinstance(x, Shared) else x.handle.data
    values = as_float32(stored, x.dtype)
    if x.dtype != tl.float32:
        return values
    if precision != "tf32":
        raise NotImplementedError(f"the interpreter has no products in {precision}")
    # The tensor core ignores the other bits.
    return (values.view(np.uint32) & _TF32_BITS).view(np.float32)


def _check_product(a, b, acc):
    if a.dtype != b.dtype or not a.dtype.is_floating():
        raise TypeError(f"a product of {a.dtype} and {b.dtype}")
    if acc.dtype != tl.float32:
        raise NotImplementedError(f"the interpreter has no sums in {acc.dtype}")
    (*batch, m, k), (*other, depth, n) = _shape(a), _shape(b)
    if k != depth or batch != other or _shape(acc) != [*batch, m, n]:
        raise ValueError(f"a product {_shape(a)} x {_shape(b)} -> {_shape(acc)}")


class _Barrier:
    """Counts the bytes of copies of `pallas_kernels.bulk_copies`, phase by phase."""

    def __init__(self):
        self.phases = -1
        self.start()

    def start(self):
        self.phases += 1
        self.copies, self.expected = [], None

    def finish(self):
        coming = sum(target.nbytes for target, _ in self.copies)
        if self.expected != coming:
            raise RuntimeError(f"{coming} bytes are copied of {self.expected} expected")
        for target, data in self.copies:
            target[...] = data
        self.start()


def _from_order(data: np.ndarray, layout) -> np.ndarray:
    """Elements that lie in the order of a layout, in that of their indices."""
    if not isinstance(layout, gl.NVMMASharedLayout):
        return data
    *outer, rows, columns = data.shape
    if layout.swizzle_byte_width != 128 or data.itemsize != 2 or columns % 64:
        raise NotImplementedError(f"copies in bulk to {data.shape} in {layout}")
    # Tiles of 64 columns, one behind the other.
    pieces = data.reshape(*outer, columns // 64, rows, 8, 8)
    row, piece = np.ogrid[:rows, :8]
    pieces = pieces[..., row, piece ^ row % 8, :]
    return np.moveaxis(pieces, -4, -3).reshape(data.shape)


class GluonProgram:
    """The shared memory of a running program, its copies and its products."""

    def __init__(self, num_warps: int):
        self.semantic = Semantic(BUILDER)
        self._num_warps = num_warps
        self.start()

    def start(self):
        """Begins a program, with nothing in flight."""
        self._copies = []
        self._groups = collections.deque()
        self._products = collections.deque()
        self._unfenced = []
        self._barriers = {}

    def functions(self) -> dict:
        """The functions of Gluon alone, and what runs in their place."""
        async_copy = ampere.async_copy
        return {
            gl.allocate_shared_memory: self.allocate,
            gl.arange: self.arange,
            gl.convert_layout: self.convert_layout,
            gl.full: self.full,
            gl.num_ctas: lambda: tl.constexpr(1),
            gl.num_warps: lambda: tl.constexpr(self._num_warps),
            gl.set_auto_layout: self.convert_layout,
            gl.thread_barrier: lambda: None,
            async_copy.async_copy_global_to_shared: self.copy,
            async_copy.commit_group: self.commit_group,
            async_copy.wait_group: self.wait_group,
            ampere.mma_v2: self.mma_v2,
            hopper.fence_async_shared: self.fence,
            hopper.warpgroup_mma: self.warpgroup_mma,
            hopper.warpgroup_mma_init: self.warpgroup_mma_init,
            hopper.warpgroup_mma_wait: self.warpgroup_mma_wait,
            bulk_copies.copy.fn: self.copy_in_bulk,
            bulk_copies.expect.fn: self.expect,
            bulk_copies.prefetch.fn: lambda *_: None,
            bulk_copies.start_barriers.fn: self.start_barriers,
            bulk_copies.wait.fn: self.wait,
        }

    def arange(self, start, end, layout=None):
        del layout
        return tensor_of(np.arange(*unwrap([start, end]), dtype=np.int32), tl.int32)

    def full(self, shape, value, dtype, layout=None):
        del layout
        return self.semantic.full(unwrap(shape), unwrap(value), unwrap(dtype))

    def convert_layout(self, value, layout, assert_trivial=False):
        del layout, assert_trivial
        if not isinstance(value, tl.tensor):
            raise TypeError(f"{value!r} has no layout to convert")
        return value

    def allocate(self, element_ty, shape, layout, value=None):
        dtype = unwrap(element_ty)
        data = np.empty(unwrap(shape), stored_dtype(dtype))
        poison(data)
        shared = Shared(data, dtype, layout, self._unfenced)
        if value is not None:
            shared.store(value)
        return shared

    def copy(self, smem, pointer, mask=None, **hints):
        del hints
        mask = self.semantic.to_tensor(True if unwrap(mask) is None else mask)
        pointer, mask = self.semantic.broadcast_impl_value(pointer, mask)
        source = pointer.dtype.element_ty, _shape(pointer)
        if source != (smem.dtype, smem.shape):
            raise ValueError(f"a copy of {source} to {smem.dtype} {smem.shape}")
        # Where the mask is off, zeros are written.
        mask = TensorHandle(mask.handle.data.astype(bool), tl.int1)
        loaded = BUILDER.create_masked_load(
            pointer.handle, mask, None, None, None, False
        )
        poison(smem.data)
        self._copies.append((smem.data, loaded.data))

    def commit_group(self):
        self._groups.append(self._copies)
        self._copies = []

    def wait_group(self, num_outstanding=0):
        while len(self._groups) > unwrap(num_outstanding):
            for target, data in self._groups.popleft():
                target[...] = data
                self._unfenced.append(target)

    def start_barriers(self, first, COUNT):
        for n in range(unwrap(COUNT)):
            self._barriers[operator.index(unwrap(first)) + n] = _Barrier()

    def expect(self, barrier, num_bytes, is_wanted):
        if unwrap(is_wanted):
            barrier = self._barriers[operator.index(unwrap(barrier))]
            if barrier.expected is not None:
                raise RuntimeError("a barrier's phase is expected twice")
            barrier.expected = operator.index(unwrap(num_bytes))

    def copy_in_bulk(self, array, first, COUNT, from_ptr, barrier, is_wanted):
        if not unwrap(is_wanted):
            return
        if from_ptr.dtype.element_ty != array.dtype:
            raise ValueError(f"a copy of {from_ptr.dtype} to {array.dtype}")
        first = operator.index(unwrap(first))
        if not 0 <= first <= first + unwrap(COUNT) <= array.shape[0]:
            raise IndexError(f"{first}+{COUNT} of shared memory of {array.shape}")
        target = array.data[first : first + unwrap(COUNT)]
        at = from_ptr.handle.data.item()
        loaded = (ctypes.c_char * target.nbytes).from_address(at)
        data = np.frombuffer(bytearray(loaded), target.dtype).reshape(target.shape)
        data = _from_order(data, unwrap(array.layout))
        poison(target)
        barrier = self._barriers[operator.index(unwrap(barrier))]
        barrier.copies.append((target, data))

    def wait(self, barrier, phase):
        barrier = self._barriers[operator.index(unwrap(barrier))]
        if barrier.phases % 2 == operator.index(unwrap(phase)):
            barrier.finish()

    def mma_v2(self, a, b, acc, input_precision=None):
        if not all(isinstance(x, tl.tensor) for x in (a, b, acc)):
            raise TypeError(f"mma_v2 of {a!r}, {b!r} and {acc!r}: not tensors")
        _check_product(a, b, acc)
        precision = unwrap(input_precision) or "tf32"
        return tensor_of(_multiply(a, b, acc.handle.data, precision), acc.dtype)

    def fence(self, cluster=False):
        del cluster
        self._unfenced.clear()

    def warpgroup_mma_init(self, value):
        return Accumulator(value.handle.data, value.dtype, _shape(value))

    def warpgroup_mma(
        self,
        a,
        b,
        acc,
        *,
        use_acc=True,
        precision=None,
        max_num_imprecise_acc=None,
        is_async=False,
    ):
        if unwrap(max_num_imprecise_acc) is not None:
            raise NotImplementedError("the interpreter has no max_num_imprecise_acc")
        if not isinstance(b, Shared) or not isinstance(a, (Shared, tl.tensor)):
            raise TypeError(f"warpgroup_mma of {a!r} and {b!r}")
        _check_product(a, b, acc)
        for x in (a, b):
            if isinstance(x, Shared) and any(
                np.shares_memory(x.data, written) for written in self._unfenced
            ):
                raise RuntimeError("no fence_async_shared since a write to an operand")
        if isinstance(acc, Accumulator):
            before = acc.source
        else:
            before = acc.handle.attr.get("product", acc.handle.data)
        if not unwrap(use_acc):
            before = None
        product = _Product(a, b, before, unwrap(precision) or "tf32")
        self._products.append(product)
        result = Accumulator(product, acc.dtype, _shape(acc))
        return result if unwrap(is_async) else self.warpgroup_mma_wait(0, [result])

    def warpgroup_mma_wait(self, num_outstanding=0, deps=None):
        if deps is None:
            raise ValueError("warpgroup_mma_wait deps must be given")
        while len(self._products) > unwrap(num_outstanding):
            self._products.popleft().finish()
        found = [_read(x) if isinstance(x, Accumulator) else x for x in deps]
        return found[0] if len(found) == 1 else tuple(found)


def _read(acc: Accumulator) -> tl.tensor:
    """A sum that was waited for; while in flight it can be added to, not read."""
    if not isinstance(acc.source, _Product):
        return tensor_of(acc.source, acc.dtype)
    if acc.source.value is not None:
        return tensor_of(acc.source.value, acc.dtype)
    data = np.empty(acc.shape, np.float32)
    poison(data)
    found = tensor_of(data, acc.dtype)
    found.handle.set_attr("product", acc.source)
    return found
