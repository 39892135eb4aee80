r"""Times of flash-linear-attention's prefill kernels, on the card that runs ours.

    python scripts/bench_peers.py --json docs/benchmarks/peers_fla_h200.json
    python scripts/bench_kernels.py --op gdn_prefill \
        --against docs/benchmarks/peers_fla_h200.json

Needs torch and fla-core, which the project does not: install them beside it. Their
kernels are tuned on the first call, which takes minutes. The shapes are those of our
own benchmark. Gate, beta and norms of q and k are counted, as they are
in ours; states start from an array and end in a new one, where ours stay in the pool.
"""

import argparse
import importlib
import pathlib
import statistics
import sys

from tqdm import tqdm

from scripts.benchmarking import Result, ceilings, device_facts, finish

CHECKED = 128  # tokens of the first row that are compared
HEAD_DIM = 128
SHAPES = [(8192, 1), (8192, 16), (32768, 1), (32768, 16)]  # tokens, rows


def load(name: str):
    """Return a module of another project.

    Raises:
      SystemExit: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{error}: install torch and fla-core to measure fla's kernels")


def inputs(torch, kind: str, tokens: int, rows: int) -> dict:
    """Return what the op takes, in bfloat16, each row a batch entry of its own."""
    key_heads = 16 if kind == "gdn" else 32

    def draw(*shape):
        shape = (rows, tokens // rows, *shape)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    gates = (32,) if kind == "gdn" else (32, HEAD_DIM)
    return {
        "q": draw(key_heads, HEAD_DIM),
        "k": draw(key_heads, HEAD_DIM),
        "v": draw(32, HEAD_DIM),
        "g": draw(*gates),
        "beta": draw(32),
        "A_log": torch.zeros(32, device="cuda"),
        "dt_bias": torch.zeros(gates, device="cuda").flatten(),
        "initial_state": torch.zeros(rows, 32, HEAD_DIM, HEAD_DIM, device="cuda"),
    }


def expected(torch, given: dict):
    """Return the first outputs of the first row: `[tokens, heads, values]`."""
    row = {
        name: given[name][0, :CHECKED].double() for name in ("q", "k", "v", "g", "beta")
    }
    groups = row["v"].shape[1] // row["q"].shape[1]
    q, k = (
        torch.nn.functional.normalize(row[name], dim=-1).repeat_interleave(groups, 1)
        for name in ("q", "k")
    )
    bias = given["dt_bias"].double().reshape(row["g"].shape[1:])
    a = given["A_log"].double().exp().reshape(-1, *[1] * (row["g"].dim() - 2))
    decay = (-a * torch.nn.functional.softplus(row["g"] + bias)).exp()
    decay = decay.reshape(*decay.shape[:2], -1, 1)
    beta = row["beta"].sigmoid()
    state = given["initial_state"][0].double()
    out = []
    for t in range(CHECKED):
        state = state * decay[t]
        error = row["v"][t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t] * beta[t][:, None], error)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * HEAD_DIM**-0.5)
    return torch.stack(out)


def time_us(torch, call) -> float:
    """Return the median microseconds of a call in a graph of eight."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 8 * 1e3)
    return statistics.median(times)


def measure(torch, kind: str, tokens: int, rows: int) -> Result:
    """Check and time one shape."""
    if kind == "gdn":
        op = load("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    else:
        op = load("fla.ops.kda").chunk_kda
    given = inputs(torch, kind, tokens, rows)
    options = {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }

    def call():
        return op(**given, **options)

    with torch.inference_mode():
        right = expected(torch, given)
        found = call()[0][0, :CHECKED].double()
        error = ((found - right).abs().max() / right.abs().max()).item()
        us = time_us(torch, call)
    shape = {"heads": 32, "head_dim": HEAD_DIM, "tokens": tokens, "rows": rows}
    return Result(
        op=f"{kind}_prefill",
        implementation=f"fla {op.__name__}",
        shape=shape,
        us=round(us, 1),
        error=error,
    )


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--op", choices=("kda_prefill", "gdn_prefill"), help="only this op"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the record here")
    parser.add_argument("--commit", help="commit to record; default: git's HEAD")
    args = parser.parse_args()
    torch = load("torch")
    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU: these kernels run on nothing else")
    torch.manual_seed(0)
    kinds = (args.op.removesuffix("_prefill"),) if args.op else ("gdn", "kda")
    cases = [(kind, *shape) for kind in kinds for shape in SHAPES]
    results = [measure(torch, *case) for case in tqdm(cases, disable=None)]
    facts = device_facts(args.commit)
    for package in ("torch", "fla"):
        facts["versions"][package] = load(package).__version__
    finish(facts, ceilings(), results, args.json)


if __name__ == "__main__":
    main()
