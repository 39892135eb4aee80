"""Which implementation of an op runs: one table, one dispatch rule.

Each op has one list of ``Support`` lines, best first. A combination that no line
covers is refused when it is selected, with a message that says what works; the same
table is the support matrix of the documentation.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Mapping
from typing import Literal

import jax

from ukv.errors import UnsupportedError

_LOGGER = logging.getLogger(__name__)

Implementation = Literal["xla", "mosaic_gpu", "triton"]
"""How an op runs; None anywhere means the best one for the default device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpCase:
    """The facts of one call that decide who can run it.

    Attributes:
      page_size: Tokens per page.
      storage_dtype: Name of the dtype in the pool.
      compute_dtype: Name of the dtype of the queries, or of the values to write.
      widths: Elements per head of a key and of a value; of a latent row and of its
        latent part for MLA, then, where rows are expanded, per head of a key's part
        without position and of a value; of the entry of each part for a write. A
        decode step of a delta rule layer adds the taps of its convolution.
      has_window: Whether a query sees the last few tokens only.
    """

    page_size: int
    storage_dtype: str
    compute_dtype: str
    widths: tuple[int, ...]
    has_window: bool = False

    def __str__(self) -> str:
        """Return the case as a message shows it."""
        return (
            f"page_size={self.page_size}, storage_dtype={self.storage_dtype}, "
            f"compute_dtype={self.compute_dtype}, widths={self.widths}"
            + ", with a window"
            * self.has_window
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where a call will run.

    Attributes:
      platform: JAX platform of the device.
      capability: CUDA compute capability, major times 10 plus minor; 0 if not CUDA.
    """

    platform: str
    capability: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
    """One line of the table: what an implementation of an op can do.

    A set that is None sets no limit.

    Attributes:
      implementation: Who.
      platforms: JAX platforms it runs on.
      min_capability: Smallest CUDA compute capability, major times 10 plus minor.
      max_capability: Largest, for kernels of instructions that later cards dropped.
      page_sizes: Tokens per page.
      storage_dtypes: Names of dtypes in the pool.
      compute_dtypes: Names of dtypes of the queries or values.
      widths: As in ``OpCase``.
      max_width: Largest of the widths.
      windows: Whether it takes calls with a window.
      by_default: Whether it may be chosen when nobody is asked for: not before the
        combination was run on a card.
    """

    implementation: Implementation
    platforms: tuple[str, ...] | None = None
    min_capability: int | None = None
    max_capability: int | None = None
    page_sizes: tuple[int, ...] | None = None
    storage_dtypes: tuple[str, ...] | None = None
    compute_dtypes: tuple[str, ...] | None = None
    widths: tuple[tuple[int, ...], ...] | None = None
    max_width: int | None = None
    windows: bool = True
    by_default: bool = True

    def refusal(self, case: OpCase, target: Target) -> str | None:
        """Return why this line does not cover ``case`` on ``target``, or None."""
        if self.platforms is not None and target.platform not in self.platforms:
            return f"runs on {', '.join(self.platforms)}, not on {target.platform}"
        needed, found = self.min_capability, target.capability
        if needed is not None and found < needed:
            return (
                f"needs compute capability {needed / 10}, the device has {found / 10}"
            )
        latest = self.max_capability
        if latest is not None and found > latest:
            return (
                f"runs up to compute capability {latest / 10}, the device has "
                f"{found / 10}"
            )
        for field in ("page_size", "storage_dtype", "compute_dtype"):
            allowed, asked = getattr(self, f"{field}s"), getattr(case, field)
            if allowed is not None and asked not in allowed:
                return f"has {field} {', '.join(map(str, allowed))}, not {asked}"
        if self.widths is not None and case.widths not in self.widths:
            return f"has widths {', '.join(map(str, self.widths))}, not {case.widths}"
        if self.max_width is not None and max(case.widths) > self.max_width:
            return f"has widths up to {self.max_width}, not {case.widths}"
        if case.has_window and not self.windows:
            return "is for calls without a window"
        if self.implementation == "triton" and not _HAS_TRITON:
            return "needs Triton, which is not installed: install ukv[cuda12]"
        return None


_HAS_TRITON = importlib.util.find_spec("triton") is not None

QUERY_DTYPES = ("float32", "bfloat16", "float16")

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

_GQA = (
    Support(
        implementation="triton",
        platforms=("gpu",),
        min_capability=80,
        storage_dtypes=QUERY_DTYPES,
        compute_dtypes=QUERY_DTYPES,
        max_width=256,
    ),
    Support(
        implementation="triton",
        platforms=("gpu",),
        min_capability=89,
        storage_dtypes=_FLOAT8,
        compute_dtypes=QUERY_DTYPES,
        max_width=256,
    ),
    Support(implementation="xla", compute_dtypes=QUERY_DTYPES),
)

_STATE_REFERENCE = Support(
    implementation="xla",
    storage_dtypes=("float32", "bfloat16"),
    compute_dtypes=QUERY_DTYPES,
)

_HEADS = tuple((k, v) for k in (64, 128) for v in (64, 128))

# As they ran on a card.
_GQA_EXTEND = Support(
    implementation="mosaic_gpu",
    platforms=("gpu",),
    min_capability=90,
    max_capability=90,
    page_sizes=(16, 32, 64, 128),
    storage_dtypes=("bfloat16",),
    compute_dtypes=("bfloat16",),
    widths=((128, 128),),
)
_MLA_EXTEND = dataclasses.replace(
    _GQA_EXTEND,
    page_sizes=(1, 16, 32, 64, 128),
    storage_dtypes=("bfloat16", *_FLOAT8),
    widths=((576, 512, 128, 128),),
)
_MLA_HOPPER = dataclasses.replace(
    _GQA_EXTEND, widths=((576, 512), (320, 256), (192, 128))
)
_MLA_ROWS = (
    _MLA_HOPPER,
    dataclasses.replace(_MLA_HOPPER, page_sizes=(64, 128), widths=((448, 384),)),
    dataclasses.replace(_MLA_HOPPER, by_default=False, widths=((448, 384),)),
    dataclasses.replace(
        _MLA_HOPPER,
        storage_dtypes=("float8_e4m3fn",),
        widths=((576, 512), (320, 256)),
    ),
    # What a program holds of queries and keys takes all of its shared memory.
    Support(
        implementation="triton",
        platforms=("gpu",),
        min_capability=90,
        storage_dtypes=("bfloat16", "float16", *_FLOAT8),
        compute_dtypes=("bfloat16", "float16"),
        max_width=576,
    ),
    Support(
        implementation="triton",
        platforms=("gpu",),
        min_capability=90,
        storage_dtypes=(*QUERY_DTYPES, *_FLOAT8),
        compute_dtypes=QUERY_DTYPES,
        max_width=256,
    ),
    Support(implementation="xla", compute_dtypes=QUERY_DTYPES),
)
_STATE_KERNEL = Support(
    implementation="triton",
    platforms=("gpu",),
    min_capability=90,
    storage_dtypes=("float32", "bfloat16"),
)
_STEP = (
    dataclasses.replace(
        _STATE_KERNEL,
        max_capability=90,
        compute_dtypes=("float32", "bfloat16"),
        widths=((64, 64, 4), (64, 128, 4), (128, 128, 4)),
    ),
    dataclasses.replace(
        _STATE_KERNEL,
        by_default=False,
        compute_dtypes=QUERY_DTYPES,
        widths=tuple((*pair, 4) for pair in _HEADS),
    ),
    _STATE_REFERENCE,
)
_CHUNKS = (
    dataclasses.replace(
        _STATE_KERNEL,
        max_capability=90,
        compute_dtypes=("bfloat16",),
        widths=_HEADS,
    ),
    dataclasses.replace(
        _STATE_KERNEL,
        by_default=False,
        compute_dtypes=("bfloat16",),
        widths=_HEADS,
    ),
    _STATE_REFERENCE,
)
# Best first. A kernel adds its line above the reference.
SUPPORT: Mapping[str, tuple[Support, ...]] = {
    "copy_pages": (
        Support(implementation="mosaic_gpu", platforms=("gpu",), min_capability=90),
        Support(implementation="triton", platforms=("gpu",), min_capability=80),
        Support(implementation="xla"),
    ),
    "write_kv": (
        Support(implementation="triton", platforms=("gpu",), min_capability=80),
        Support(implementation="xla"),
    ),
    "gqa_attention": (
        _GQA_EXTEND,
        # Faster than Triton on an H200, but not with a window of 128 tokens.
        dataclasses.replace(_GQA_EXTEND, windows=False, widths=((64, 64),)),
        dataclasses.replace(_GQA_EXTEND, by_default=False, widths=((64, 64),)),
        *_GQA,
    ),
    "gqa_decode": _GQA,
    "mla_decode": _MLA_ROWS,
    "mla_extend": (
        _MLA_EXTEND,
        # As small as a model of a few million parameters.
        dataclasses.replace(
            _MLA_EXTEND,
            page_sizes=(16, 32, 64, 128),
            storage_dtypes=("bfloat16",),
            widths=((192, 128, 64, 64),),
        ),
        dataclasses.replace(
            _MLA_EXTEND, by_default=False, widths=((192, 128, 64, 64),)
        ),
        # Absorbed: it reads the rows as a decode does.
        dataclasses.replace(
            _MLA_EXTEND,
            implementation="triton",
            max_capability=None,
            page_sizes=None,
            storage_dtypes=("bfloat16", "float8_e4m3fn"),
        ),
        Support(implementation="xla", compute_dtypes=QUERY_DTYPES),
    ),
    "mla_extend_absorbed": _MLA_ROWS,
    "kda_decode_step": _STEP,
    "gdn_decode_step": _STEP,
    "kda_decode": (_STATE_REFERENCE,),
    "kda_prefill": _CHUNKS,
    "gdn_decode": (_STATE_REFERENCE,),
    "gdn_prefill": _CHUNKS,
    "mamba2_decode": (
        dataclasses.replace(
            _STATE_KERNEL,
            max_capability=90,
            compute_dtypes=("float32", "bfloat16"),
            widths=((64, 128),),
        ),
        dataclasses.replace(
            _STATE_KERNEL,
            min_capability=80,
            by_default=False,
            compute_dtypes=QUERY_DTYPES,
            widths=tuple((p, n) for p in (32, 64, 128) for n in (16, 64, 128, 256)),
        ),
        _STATE_REFERENCE,
    ),
    "short_conv_decode": (_STATE_REFERENCE,),
    "short_conv_prefill": (
        *(
            dataclasses.replace(
                _STATE_KERNEL,
                max_capability=90,
                storage_dtypes=(dtype,),
                compute_dtypes=(dtype,),
            )
            for dtype in ("bfloat16", "float32")
        ),
        dataclasses.replace(
            _STATE_KERNEL, by_default=False, compute_dtypes=QUERY_DTYPES
        ),
        _STATE_REFERENCE,
    ),
}


def default_target() -> Target:
    """Return what the default device is."""
    device = jax.devices()[0]
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    is_cuda = major.isdigit() and minor.isdigit()
    capability = 10 * int(major) + int(minor) if is_cuda else 0
    return Target(platform=device.platform, capability=capability)


def resolve(
    op: str,
    implementation: Implementation | None,
    case: OpCase,
    *,
    target: Target | None = None,
) -> Implementation:
    """Return the implementation that runs ``case`` of ``op``.

    What was chosen is logged at the level of debugging.

    Args:
      op: Key of ``SUPPORT``.
      implementation: The one asked for; None takes the first line that covers it
        and may be chosen by default.
      case: The facts of the call.
      target: Where it will run; None means the default device.

    Raises:
      UnsupportedError: The one asked for, or every one, does not cover the case.
    """
    chosen = default_target() if target is None else target
    works: list[Implementation] = []
    defaults: list[Implementation] = []
    refusals: dict[Implementation, str] = {}
    for line in SUPPORT[op]:
        refusal = line.refusal(case, chosen)
        if refusal is None:
            works.append(line.implementation)
            if line.by_default:
                defaults.append(line.implementation)
        else:
            refusals.setdefault(line.implementation, refusal)
    if implementation is None:
        if defaults:
            _LOGGER.debug("%s runs on %s", op, defaults[0])
            return defaults[0]
        reasons = "; ".join(f"{name!r} {why}" for name, why in refusals.items())
        raise UnsupportedError(f"no implementation of {op} covers {case}: {reasons}")
    if implementation in works:
        _LOGGER.debug("%s runs on %s", op, implementation)
        return implementation
    why = refusals.get(implementation, "does not exist")
    alternatives = ", ".join(map(repr, dict.fromkeys(works))) or "nothing"
    raise UnsupportedError(
        f"{op}: implementation {implementation!r} {why}; for {case} works "
        f"{alternatives}"
    )
