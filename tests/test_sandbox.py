"""Messages between the grader and the process of a submission: plain values arrive, and nothing else happens."""

from __future__ import annotations

import collections
import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dlscale.course import sandbox


def no_function(*_):
    raise AssertionError


def there(value: object) -> object:
    return sandbox.unpack(sandbox.pack(value, no_function), no_function)


PLAIN = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text() | st.just(...)
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(NESTED)
def test_plain_values_arrive_as_they_were(value):
    assert there(value) == value and type(there(value)) is type(value)


@given(
    arrays.arrays(st.sampled_from(["?", "i4", "u1", "f2", "f4", ">f8", "c8", "U3"]), arrays.array_shapes(min_dims=0))
)
def test_arrays_arrive_as_they_were(array):
    arrived = there(array)
    assert isinstance(arrived, np.ndarray) and arrived.dtype == array.dtype
    assert arrived.shape == array.shape and arrived.tobytes() == array.tobytes() and arrived.flags.writeable


def test_other_values():
    assert math.isnan(there(float("nan"))) and there(np.float32(2)) == 2 and type(there(np.float32(2))) is np.float32
    assert there(np.ones(2, ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    assert there({1, 2}) == there(frozenset({1, 2})) == {1, 2}
    for several in (range(3), iter(range(3)), {0: 0, 1: 0, 2: 0}.keys(), collections.deque(range(3))):
        assert there(several) == [0, 1, 2]
    assert (there(np.random.default_rng(3)).normal(size=3) == np.random.default_rng(3).normal(size=3)).all()
    for value in (np.array([object()]), object()):  # of these only the type is told
        assert type(there(value)).__name__ == type(value).__name__ and type(there(value)) is not type(value)
    functions = []
    line = sandbox.pack(print, lambda f: functions.append(f) or 7)
    assert functions == [print] and sandbox.unpack(line, lambda number: (max, number)) == (max, 7)


def test_jax_arrays_stay_jax_arrays():
    jax = pytest.importorskip("jax")
    arrived = there(jax.numpy.arange(3, dtype="bfloat16"))
    assert isinstance(arrived, jax.Array) and arrived.dtype == "bfloat16" and arrived.tolist() == [0, 1, 2]


MALFORMED = [
    {"tuple": 3, "fields": None}, {"tuple": [1], "fields": ["class"]}, {"tuple": [1], "fields": ["a", "b"]},
    {"tuple": [0] * 101, "fields": [f"f{i}" for i in range(101)]}, {"dict": [[[], 1]]}, {"dict": [1]}, {"unknown": 1},
    {"set": [[]]}, {"random": {"bit_generator": "MT19937"}}, {"set": list(range(20_000))}, {"random": 1},
    {},
    {"dict": [[i, 0] for i in range(20_000)]}, {"kind": "array", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
    {"kind": "array", "dtype": "f8", "shape": [2], "data": "AAAAAAAAAAA="},
    {"kind": "array", "dtype": "f8", "shape": [0, 10**12], "data": ""},
    {"kind": "array", "dtype": "no", "shape": [1], "data": "AAAAAAAAAAA="},
]  # fmt: skip


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_messages_raise(message):
    with pytest.raises(Exception):  # noqa: B017  any will do: the parent stops the child
        sandbox.unpack(json.dumps(message).encode(), no_function)
