"""What kernels ask about the card they will run on.

Where there is none, as in a compilation for another machine, an H200 answers.
"""

import jax

# Compute capabilities whose multiprocessors have 160 KB of shared memory and more;
# others have about 100.
_LARGE_SHARED_MEMORY = ("8.0", "9.0", "10.0", "10.3")


_HOPPER = "9.0"


def num_multiprocessors() -> int:
    """Returns the multiprocessors of the first device."""
    return getattr(jax.devices()[0], "core_count", 132)


def has_large_shared_memory(capability: str | None = None) -> bool:
    """Returns whether a multiprocessor has 160 KB of shared memory or more.

    Args:
        capability: compute capability such as "9.0"; None means the first device's.
    """
    if capability is None:
        capability = _compute_capability()
    return capability in _LARGE_SHARED_MEMORY


def is_hopper() -> bool:
    """Returns whether the first device has `wgmma`: compute capability 9.0 alone."""
    return _compute_capability() == _HOPPER


def _compute_capability() -> str:
    return getattr(jax.devices()[0], "compute_capability", _HOPPER)
