"""Kernels that make chunks of KDA and GDN independent, array by array."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta.chunk_kernel import delta_chunk_kernel
from pallas_kernels.delta.fragment_chunk_kernel import delta_fragment_chunk_kernel
from pallas_kernels.delta.head_chunk_kernel import delta_head_chunk_kernel
from pallas_kernels.delta.head_fragment_chunk_kernel import (
    delta_head_fragment_chunk_kernel,
)
from pallas_kernels.triton_launch import compile_kernel
from tests.comparison import assert_matches
from tests.gpu_assembly import (
    PTXAS,
    assemble,
    assemblers,
    from_first_product_to_last_wait,
    listing,
    touched_while_products_run,
)
from tests.gpu_races import races
from tests.oracles import recurrent as oracle
from tests.oracles.delta_chunk import kda_chunk
from tests.recurrent_cases import EPS, KINDS
from tests.state_pools import round_to
from tests.triton_interpreter import (
    IS_INTERPRETING,
    assert_passes_in_the_interpreter,
    faulty_kernel,
    interpreted_launch,
)

H, C = 2, 64
SIZES = (C, 37, 0, 16)
MOST_LOG2_DECAY = 15
IN_GLUON = {
    "kda": delta_fragment_chunk_kernel,
    "gdn": delta_head_fragment_chunk_kernel,
}
IN_TRITON = {"kda": delta_chunk_kernel, "gdn": delta_head_chunk_kernel}

compiles = pytest.mark.skipif(
    IS_INTERPRETING or not PTXAS.is_file(), reason="nothing is compiled there"
)


def in_the_interpreter(test):
    interpreted = pytest.mark.skipif(not IS_INTERPRETING, reason="needs its process")
    return pytest.mark.triton(interpreted(test))


@compiles
def test_the_kernels_pass_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Chunks of different sizes, one after the other, and a gate.

    The gate of GDN has one channel.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    logits: np.ndarray
    beta_logits: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    lower_bound: float | None

    @property
    def dims(self):
        return self.k.shape[-1], self.v.shape[-1]

    @property
    def kind(self):
        return "gdn" if self.logits.shape[-1] == 1 else "kda"

    def expected(self, start, size, head):
        part = slice(start, start + size)
        of_keys = part, head // (H // self.k.shape[1])
        q, k = (oracle.l2_normalize(x[of_keys], eps=EPS) for x in (self.q, self.k))
        gate = self.logits[part], self.a_log, self.dt_bias
        if self.lower_bound is None:
            log_decay = oracle.kda_log_decay(*gate)[:, head]
        else:
            bound = {"lower_bound": self.lower_bound}
            log_decay = oracle.kda_log_decay_bounded(*gate, **bound)[:, head]
        return kda_chunk(
            q,
            k,
            np.asarray(self.v[part, head], np.float64),
            np.maximum(log_decay / np.log(2), -MOST_LOG2_DECAY) + 0.0 * k,
            1 / (1 + np.exp(-np.asarray(self.beta_logits[part, head], np.float64))),
            scale=k.shape[-1] ** -0.5,
        )


def draw(kind, gates, K=128, V=128, lower_bound=None, key_heads=H):
    rng, n = np.random.default_rng(0), sum(SIZES)
    channels = K if kind == "kda" else 1
    shapes = [(n, key_heads, K)] * 2 + [(n, H, V), (n, H, channels), (n, H)]
    q, k, v, logits, beta_logits = (
        round_to(rng.standard_normal(shape), "bfloat16") for shape in shapes
    )
    # By place in the chunk: those of a block whose neighbour decays otherwise, and a
    # token that alone keeps what came before.
    place = np.concatenate([np.arange(size) for size in SIZES])[:, None, None]
    logits = {
        "mild": lambda: logits,
        "strong": lambda: np.abs(logits) * 20,
        "mixed": lambda: np.where(logits > 0, 30, -30),
        "none": lambda: logits * 0 - 60,
        "repeated": lambda: logits * 0 - 60,
        "huge": lambda: logits * 0 + 87,
        "late": lambda: np.where(place % 32 < 16, -60, 60) + logits * 0,
        "early": lambda: np.where(place % 32 < 16, 60, -60) + logits * 0,
        "rare": lambda: np.where(place % 17 == 0, -60, 60) + logits * 0,
    }[gates]()
    if gates == "repeated":
        k[...] = k[:1]
        beta_logits[...] = 6
    a_log = np.log(rng.uniform(0.5, 4, H)).astype(np.float32)
    dt_bias = (rng.standard_normal((H, channels)) - 2).astype(np.float32)
    logits = round_to(logits, "bfloat16")
    return Tokens(q, k, v, logits, beta_logits, a_log, dt_bias, lower_bound)


def from_tiles(x):
    """`[..., rows, columns]` of what lies there in tiles as products read them."""
    *outer, rows, columns = x.shape
    pieces = np.reshape(x, (*outer, columns // 64, rows, 8, 8))
    row, piece = np.ogrid[:rows, :8]
    pieces = pieces[..., row, piece ^ row % 8, :]
    return np.moveaxis(pieces, -4, -3).reshape(x.shape)


def run(kernel, tokens):
    """What the kernel writes, by name, `[chunks, H, ...]`."""
    K, V = tokens.dims
    name = kernel.fn.__name__
    is_tiled = name not in {x.fn.__name__ for x in IN_TRITON.values()}
    of_keys = [] if is_tiled else [((C, K), jnp.bfloat16)]
    shapes = [((3 * C if is_tiled else 2 * C, K), jnp.bfloat16)]
    shapes += [((V, C), jnp.bfloat16), *of_keys]
    shapes += [((K,), jnp.float32), ((C, C), jnp.bfloat16)]
    constants = {"H": H, "K": K, "V": V, "LOWER_BOUND": tokens.lower_bound}
    constants |= {"KEY_HEADS": tokens.k.shape[1]}
    if not is_tiled:
        constants |= {"PART": 32}
        if tokens.kind == "kda":
            shapes += [((rows, K), jnp.float32) for rows in (C, 15)]
            shapes += [((3, C), jnp.float32)]
    made = interpreted_launch(
        kernel,
        *(tokens.q, tokens.k, tokens.v, tokens.logits.reshape(len(tokens.logits), -1)),
        *(tokens.beta_logits, tokens.a_log, tokens.dt_bias.reshape(-1)),
        np.cumsum([0, *SIZES[:-1]], dtype=np.int32),
        np.asarray(SIZES, np.int32),
        np.zeros(1, np.int32),
        outputs=[
            jax.ShapeDtypeStruct((len(SIZES), H, *shape), dtype)
            for shape, dtype in shapes
        ],
        grid=(len(SIZES) * H,),
        **constants,
    )
    keys, u, *k, decay, P = map(np.asarray, made[: len(of_keys) + 4])
    arrays = [keys[:, :, :C], keys[:, :, C : 2 * C], *k, keys[:, :, 2 * C :]][:3]
    w, q, k, u, P = (from_tiles(x) if is_tiled else x for x in (*arrays, u, P))
    u = np.swapaxes(u, -1, -2)
    return {"w": w, "q": q, "u": u, "k": k, "decay": decay, "P": P}


def check(kernel, tokens):
    starts = np.cumsum([0, *SIZES])
    for name, array in run(kernel, tokens).items():
        # A chunk without tokens is left as it was.
        truth = np.full(array.shape, np.nan)
        for chunk, head in np.ndindex(truth.shape[:2]):
            size = SIZES[chunk]
            if not size:
                continue
            part = tokens.expected(starts[chunk], size, head)[name]
            truth[chunk, head] = 0
            if name in "qkP":
                # Behind the last token is what meets the zeros of u and of w.
                rest = array[chunk, head, size:]
                assert np.isfinite(rest.astype(np.float32)).all()
                truth[chunk, head, size:] = rest
            truth[(chunk, head, *map(slice, part.shape))] = part
        of_type = {"dtype": "bfloat16", "accumulate_dtype": "tensorfloat32"}
        assert_matches(
            array,
            truth,
            reduced_len=C + tokens.dims[0],
            row_axes=(1,),
            **({"dtype": "float32"} if name == "decay" else of_type),
        )


GATES = ("mild", "strong", "mixed", "none", "repeated", "huge", "late", "early", "rare")


of_both_kinds = pytest.mark.parametrize("kind", ["kda", "gdn"])


@in_the_interpreter
@of_both_kinds
@pytest.mark.parametrize("gates", GATES)
def test_chunks_match_the_oracle(gates, kind):
    check(IN_GLUON[kind], draw(kind, gates))


@in_the_interpreter
@of_both_kinds
@pytest.mark.parametrize("lower_bound", [-5.0, -15.0, -40.0])
def test_bounded_gates_match_the_oracle(lower_bound, kind):
    check(IN_GLUON[kind], draw(kind, "mild", lower_bound=lower_bound))


@in_the_interpreter
@of_both_kinds
def test_a_gate_that_hears_no_logit_leaves_tokens_that_are_not_there_without_decay(
    kind,
):
    tokens = draw(kind, "mild", lower_bound=-0.1)
    a_log = np.full(H, -75, np.float32)
    check(IN_GLUON[kind], dataclasses.replace(tokens, a_log=a_log))


@in_the_interpreter
@of_both_kinds
@pytest.mark.parametrize("gates", ["mild", "repeated", "rare"])
def test_chunks_of_the_kernels_in_triton_match_the_oracle(gates, kind):
    check(IN_TRITON[kind], draw(kind, gates))


@in_the_interpreter
@of_both_kinds
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64)])
def test_other_widths_match_the_oracle(K, V, kind):
    check(IN_GLUON[kind], draw(kind, "mild", K, V))


@in_the_interpreter
@of_both_kinds
@pytest.mark.parametrize("kernels", [IN_GLUON, IN_TRITON], ids=["gluon", "triton"])
def test_heads_that_share_keys_match_the_oracle(kernels, kind):
    check(kernels[kind], draw(kind, "mild", 64, 64, key_heads=1))


FAULTS = {
    ("kda", "decay of a block left out"): ("steps[1] + steps[2]))", "steps[1]))"),
    ("kda", "blocks above the diagonal"): (
        "stack((none, zero, steps[1],",
        "stack((zero, zero, steps[1],",
    ),
    ("kda", "rest of a border lost"): ("total = end - step", "total = end - end"),
    ("kda", "column of the last block"): (
        "of_block(columns[n], 2, TOKENS)",
        "of_block(columns[n], 3, TOKENS)",
    ),
    ("kda", "betas of other rows"): ("A2, row_betas,", "A2, 1.0,"),
    ("kda", "product read too early"): (
        "2 if n + 1 < PRODUCTS else 0",
        "3 if n + 1 < PRODUCTS else 1",
    ),
    ("kda", "logits behind the end"): (
        "mask=t + 32 < size, other=-3e38",
        "mask=t + 32 < size, other=0.0",
    ),
    ("gdn", "products above the diagonal"): (
        "gl.where(token >= before, pairs, 0.0)",
        "gl.where(token >= 0, pairs, 0.0)",
    ),
    ("gdn", "block on the diagonal twice"): ("i > 1, A1, 0.0", "i > 0, A1, 0.0"),
    ("gdn", "keys of another length"): ("log2(k_scale) - G", "-G"),
    ("gdn", "decay behind the end"): (
        "decays = gl.where(is_token,",
        "decays = gl.where(token < 64,",
    ),
    ("gdn", "beta behind the end"): (
        "betas.store(gl.where(is_token,",
        "betas.store(gl.where(token < 64,",
    ),
    ("gdn", "keys read too early"): ("wait(0, deps=[kk])", "wait(1, deps=[kk])"),
    ("gdn", "values read too early"): (
        "wait(2 * (V // 64 - 1 - n)",
        "wait(2 * (V // 64 - 1 - n) + 1",
    ),
}


@in_the_interpreter
@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_faults_are_found(kind, fault, tmp_path):
    kernel = faulty_kernel(tmp_path, IN_GLUON[kind], *FAULTS[kind, fault])
    with pytest.raises(AssertionError):
        check(kernel, draw(kind, "mild"))


def error_beyond_rounding(kernel, tokens):
    """The largest error of w and u that is not their rounding; 1 is their largest."""
    found, starts = run(kernel, tokens), np.cumsum([0, *SIZES])
    errors = []
    for chunk, head in np.ndindex(len(SIZES), H):
        if size := SIZES[chunk]:
            truth = tokens.expected(starts[chunk], size, head)
            for name in "wu":
                part = np.asarray(found[name][chunk, head, :size], np.float64)
                error = np.abs(part - truth[name]) - 2**-8 * np.abs(truth[name])
                errors.append(error.max() / np.abs(truth[name]).max())
    return max(errors)


@in_the_interpreter
@of_both_kinds
def test_where_a_key_repeats_the_inverse_is_two_numbers(kind):
    assert error_beyond_rounding(IN_GLUON[kind], draw(kind, "repeated")) < 2**-9


@in_the_interpreter
def test_an_inverse_of_one_number_is_found(tmp_path):
    fault = "start_w(high, low,", "start_w(high, low * 0.0,"
    kernel = faulty_kernel(tmp_path, IN_GLUON["gdn"], *fault)
    assert error_beyond_rounding(kernel, draw("gdn", "repeated")) > 2**-9


def test_the_arrays_of_a_chunk_make_the_recurrence():
    kind, rng, size = KINDS["kda"], np.random.default_rng(2), 21
    tokens = kind.tokens(rng, size)
    gate, state = kind.gate(rng), rng.standard_normal((kind.H, kind.V, kind.K))
    q, k = (oracle.l2_normalize(tokens[name], eps=EPS) for name in "qk")
    log_decay = oracle.kda_log_decay(tokens["gate_logits"], gate.a_log, gate.dt_bias)
    beta = 1 / (1 + np.exp(-np.asarray(tokens["beta_logits"], np.float64)))
    truth, last = kind.expected(tokens, gate, state)
    for head in range(kind.H):
        v = np.asarray(tokens["v"][:, head], np.float64)
        x = kda_chunk(
            *(q[:, head], k[:, head], v, log_decay[:, head] / np.log(2)),
            *(beta[:, head],),
            scale=kind.K**-0.5,
        )
        new = x["u"] - x["w"] @ state[head].T
        out = x["q"] @ state[head].T + x["P"] @ new
        after = state[head] * x["decay"] + new.T @ x["k"]
        np.testing.assert_allclose(out, truth[:, head], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(after, last[head], rtol=1e-9, atol=1e-12)


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel for sizes and a gate.

    What is spilled, at most, no model has.
    """

    kind: str
    K: int
    V: int
    lower_bound: float | None
    spilled: int = 0

    def __str__(self):
        return f"{self.kind}-{self.K}-{self.V}-{self.lower_bound}"

    @property
    def key_heads(self):
        return 32 if self.kind == "kda" else 16

    @property
    def gates(self):
        return self.K if self.kind == "kda" else 1

    @property
    def registers(self):
        return 168 if self.kind == "kda" else 128

    @functools.cached_property
    def compiled(self):
        dtypes = ("bfloat16",) * 5 + ("float32",) * 2 + ("int32",) * 3
        dtypes += ("bfloat16",) * 2 + ("float32", "bfloat16")
        constants = {"H": 32, "KEY_HEADS": self.key_heads, "K": self.K, "V": self.V}
        constants |= {"LOWER_BOUND": self.lower_bound}
        key = tuple(sorted(constants.items()))
        options = {"num_warps": 4, "num_stages": 1, "capability": 90}
        options |= {"max_registers": self.registers}
        return compile_kernel(IN_GLUON[self.kind], dtypes, key, **options)


PROGRAMS = (
    Program("kda", 128, 128, None),
    Program("kda", 128, 128, -5.0),
    Program("kda", 64, 64, None),
    Program("kda", 64, 128, -5.0),
    Program("kda", 128, 64, None, spilled=8),
    Program("kda", 128, 64, -5.0, spilled=40),
    Program("gdn", 128, 128, None),
    Program("gdn", 64, 64, None),
    Program("gdn", 64, 128, -5.0),
    Program("gdn", 128, 64, None),
)
# Barriers; waits for copies, fences, and waits for products.
WAITS = {"kda": (6, 1 + 1 + 4), "gdn": (7, 1 + 2 + 2 + 4)}
by_program = pytest.mark.parametrize("program", PROGRAMS, ids=str)


@compiles
@by_program
def test_no_thread_comes_too_soon(program):
    for size in (0, 1, 37, C):
        assert faults(program, program.compiled.ptx, size) == []


@compiles
@of_both_kinds
def test_a_thread_that_comes_too_soon_is_found(kind):
    program = next(program for program in PROGRAMS if program.kind == kind)
    lines = program.compiled.ptx.splitlines()
    waits = re.compile(r"\s*(bar\.sync|cp\.async\.wait|fence\.proxy|wgmma\.wait)")
    places = [i for i, line in enumerate(lines) if waits.match(line)]
    assert len(places) == sum(WAITS[kind])
    for place in places:
        ptx = "\n".join([*lines[:place], *lines[place + 1 :]])
        assert faults(program, ptx, C)


def faults(program, ptx, size):
    """Takes the last program through the kernel, at the end of a million tokens."""
    K, V, key_heads, gates = program.K, program.V, program.key_heads, program.gates
    heads, chunks, tokens = 32, 2048, 1 << 20
    tiles = heads * chunks
    starts = np.full(chunks, tokens - size, np.int32)
    arrays = [
        *(2 * tokens * key_heads * K, 2 * tokens * key_heads * K),
        *(2 * tokens * heads * V, 2 * tokens * heads * gates, 2 * tokens * heads),
        *(4 * heads, 4 * heads * gates),
        *(starts, np.full(chunks, size, np.int32), np.zeros(1, np.int32)),
        *(6 * C * K * tiles, 2 * C * V * tiles),
        *(4 * K * tiles, 2 * C * C * tiles),
    ]
    return races(ptx, arrays, tiles - 1, 4, program.compiled.shared_bytes)


@compiles
@pytest.mark.parametrize("assembler", assemblers())
@by_program
def test_programs_fit_a_multiprocessor(program, assembler):
    K, V, kind = program.K, program.V, program.kind
    # Of 228 KB, 1 KB of which each program takes for itself.
    programs = {"kda": 3, "gdn": 4}[kind]
    assert programs * (program.compiled.shared_bytes + 1024) <= 228 * 1024
    assert programs * 128 * program.registers <= 1 << 16
    assembled = assemble(program.compiled.ptx, assemblers()[assembler])
    assert assembled.spilled_bytes <= program.spilled
    (registers,) = re.findall(r"Used (\d+) registers", assembled.log)
    assert int(registers) <= program.registers
    # Else it makes each product wait for the one before, and says so.
    assert "serialized" not in assembled.log
    lines = listing(assembled.cubin)
    products = from_first_product_to_last_wait(lines)
    # Of w and of u 64 columns each, of the inverse and its rest, in steps of 16 tokens;
    # and those of GDN's keys with queries and keys, in steps of 16 channels.
    wanted = (K + V) // 64 * 2 * 4 + (2 * K // 16 if kind == "gdn" else 0)
    assert sum(x.startswith("HGMMA") for x in products) == wanted
    assert touched_while_products_run(products) == []
    assert [x for x in products if x.startswith(("BRA", "BSYNC", ".L"))] == []
    assert sum(line.startswith("BAR.SYNC") for line in lines) == WAITS[kind][0]
    # Two sums over four lanes, of two rows, and GDN's sums of the decays: nothing else
    # goes from lane to lane.
    shuffles = {"kda": 8, "gdn": 8 + 6}[kind]
    assert sum(line.startswith("SHFL") for line in lines) == shuffles
