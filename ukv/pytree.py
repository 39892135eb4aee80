"""The type of a pytree's array leaves."""

from typing import TYPE_CHECKING, Any

import jax

# A pytree is rebuilt with whatever a tree function put in place of its arrays: shapes,
# shardings, booleans. So the run-time check of annotations must let all of it pass,
# while a type checker sees arrays.
if TYPE_CHECKING:
    Leaf = jax.Array
else:
    Leaf = Any
