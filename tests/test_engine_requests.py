"""What a request, and an engine's sizes, may be; and what is said of others."""

import jax.numpy as jnp
import numpy as np
import pytest

from ukv.engine import EngineConfig, Request, RequestError, SamplingParams
from ukv.errors import SpecError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be a finite"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite"),
        ({"temperature": "hot"}, "temperature='hot' must be a finite"),
        ({"top_k": 0}, "top_k=0 must be an integer of 1 or more, or None"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"top_p": None}, r"top_p=None must be in \(0, 1\]"),
        ({"min_p": 1.5}, r"min_p=1.5 must be in \[0, 1\]"),
        ({"seed": 2**31}, r"seed=2147483648 must be an integer in \[0, 2\^31\)"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer of 1 or more"),
        ({"max_new_tokens": 5.0}, "max_new_tokens=5.0 must be an integer"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a tuple"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids=\(-1,\) must be integers"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_parameters_out_of_bounds(fields, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "request 'a' has an empty prompt"),
        ("What", "a prompt is token ids, integers: 'str'"),
        ([1.5, 2.0], "a prompt is token ids, integers: 'float'"),
        (5, "a prompt is token ids, integers: 'int' object is not iterable"),
    ],
)
def test_a_prompt_is_token_ids(prompt, message):
    with pytest.raises(RequestError, match=message):
        Request(request_id="a", prompt=prompt, params=SamplingParams())


@pytest.mark.usefixtures("unchecked")
def test_a_prompt_may_be_any_integers():
    for prompt in (np.arange(3, dtype=np.int32), iter([0, 1, 2]), jnp.arange(3)):
        request = Request(request_id="a", prompt=prompt, params=SamplingParams())
        assert request.prompt == (0, 1, 2)
        assert {type(token) for token in request.prompt} == {int}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 0}, "EngineConfig: page_size=0 must be a positive integer"),
        ({"page_size": 16.0}, r"page_size=16\.0 must be a positive integer"),
        ({"max_rows": "8"}, "max_rows='8' must be a positive integer"),
        ({"decode_steps": True}, "decode_steps=True must be a positive integer"),
        ({"max_stop_tokens": -1}, "max_stop_tokens=-1 must be an integer of 0"),
        ({"max_rows": 8, "max_step_tokens": 8}, "must be more than max_rows=8"),
        ({"dtype": "float7"}, "EngineConfig: 'float7' is no dtype; allowed: float32"),
        ({"dtype": "int8"}, "EngineConfig: dtype int8 cannot be stored"),
        ({"decode_buckets": 64}, "decode_buckets=64 must be positive integers that"),
        ({"decode_buckets": ()}, r"decode_buckets=\(\) must be positive integers"),
        ({"decode_buckets": (1.5, 64)}, r"decode_buckets=\(1\.5, 64\) must be"),
        ({"decode_buckets": (8, 4, 64)}, "that ascend and end with 64"),
        ({"prefill_buckets": (0, 2048)}, r"prefill_buckets=\(0, 2048\) must be"),
        ({"prefill_buckets": (64, 128)}, "that ascend and end with 2048"),
        ({"prefill_buckets": (1, 2048)}, r"prefill_buckets=\(1, 2048\) must be 2"),
        ({"static_pages": (("mla", 4),)}, "static_pages are for is_unified=False"),
    ],
)
def test_a_config_that_cannot_be_built(fields, message):
    with pytest.raises(SpecError, match=message):
        EngineConfig(**fields)
