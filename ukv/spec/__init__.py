"""Specs: what one sub-pool stores. Frozen, hashable, free of bytes and addresses.

One class per kind of memory, not per model:

    AttentionSpec       K and V rows that grow with every token (MHA, GQA)
    SlidingWindowSpec   K and V rows whose pages are released behind a window
    MLASpec             one latent row per token (multi-head latent attention)
    StateSpec           a fixed set of arrays per request (KDA, GDN, Mamba2)

All layers of a kind share one spec: a page holds its tokens for all these layers.
"""

from ukv.spec.kinds import AttentionSpec as AttentionSpec
from ukv.spec.kinds import MLASpec as MLASpec
from ukv.spec.kinds import SlidingWindowSpec as SlidingWindowSpec
from ukv.spec.kinds import StateSpec as StateSpec
from ukv.spec.kinds import SubPoolSpec as SubPoolSpec
from ukv.spec.part import STORAGE_DTYPES as STORAGE_DTYPES
from ukv.spec.part import Part as Part
from ukv.spec.part import StorageDtype as StorageDtype
from ukv.spec.part import storage_dtype as storage_dtype
from ukv.spec.states import gdn_state_spec as gdn_state_spec
from ukv.spec.states import kda_state_spec as kda_state_spec
from ukv.spec.states import mamba2_state_spec as mamba2_state_spec
