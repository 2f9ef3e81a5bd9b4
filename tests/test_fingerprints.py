"""Fingerprints: equal for equal content and nothing else, in any process."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixval.fingerprints import array_fingerprint, file_digest, fingerprint
from mixval.types import MixPlan, Part

quick = settings(deadline=None, derandomize=True, max_examples=100)
plain = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
described = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)


def test_fingerprint_is_the_digest_of_sorted_json():
    # Written out once: a change of form makes every artifact of every run look foreign.
    text = '{"a":[1,2.5,null,true],"b":"x"}'
    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert fingerprint({"b": "x", "a": [1, 2.5, None, True]}) == expected


@quick
@given(described, described)
def test_fingerprints_are_equal_exactly_for_equal_values(one, other):
    equal = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (fingerprint(one) == fingerprint(other)) == equal


@quick
@given(st.dictionaries(st.text(max_size=3), plain, min_size=2))
def test_the_order_of_keys_does_not_matter(value):
    backwards = dict(reversed(value.items()))
    assert fingerprint(value) == fingerprint(backwards)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, float("nan")]])
def test_numbers_that_json_has_not_are_refused(value):
    # NaN != NaN: a fingerprint of it would say equal where nothing is.
    with pytest.raises(ValueError, match="JSON"):
        fingerprint(value)


ARRAYS = {
    "plain": np.arange(6),
    "other value": np.array([0, 1, 2, 3, 4, 6]),
    "other type": np.arange(6, dtype=np.int32),
    "float": np.arange(6.0),
    "other shape": np.arange(6).reshape(2, 3),
    "transposed": np.arange(6).reshape(2, 3).T,
    "shorter": np.arange(5),
    "other order": np.arange(6)[::-1],
    "zeros": np.zeros(6),
    "zeros of another type": np.zeros(6, dtype=np.int64),  # the same bytes
}


def test_arrays_differ_by_value_type_and_shape():
    # Catches a digest of the bytes alone.
    assert len({array_fingerprint(array) for array in ARRAYS.values()}) == len(ARRAYS)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_in_other_memory_order_and_tensors_are_equal(name):
    # What counts is the content, not where it lies.
    array = ARRAYS[name]
    assert array_fingerprint(array) == array_fingerprint(np.asfortranarray(array))
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    assert array_fingerprint(array) == array_fingerprint(tensor)


def test_where_one_array_ends_matters():
    # Catches bytes that run together: ([1, 2], [3]) is not ([1], [2, 3]).
    one = array_fingerprint(np.array([1, 2]), np.array([3]))
    assert one != array_fingerprint(np.array([1]), np.array([2, 3]))
    assert one != array_fingerprint(np.array([3]), np.array([1, 2]))
    assert one != array_fingerprint(np.array([1, 2, 3]))


def test_fingerprints_are_the_same_in_another_process():
    code = (
        "import numpy as np\n"
        "from mixval.fingerprints import array_fingerprint, fingerprint\n"
        "print(fingerprint({'b': {'y', } and 1, 'a': 2}), array_fingerprint(np.arange(6)))\n"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "5", "PYTHONPATH": ":".join(filter(None, sys.path))},
    ).stdout.split()
    assert elsewhere == [fingerprint({"a": 2, "b": 1}), array_fingerprint(np.arange(6))]


def test_file_digest_is_sha256(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"mixval" * 100_000)
    assert file_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_plan_and_a_part_change_their_fingerprint_with_each_field():
    # Scores are joined to plans and data by these: a field left out joins the wrong ones.
    first, second, lam = np.array([0, 1]), np.array([1, 0]), np.array([0.5, 0.25])
    plan = MixPlan(first, second, lam, 1.0, 0).fingerprint
    assert plan != MixPlan(second, second, lam, 1.0, 0).fingerprint
    assert plan != MixPlan(first, first, lam, 1.0, 0).fingerprint
    assert plan != MixPlan(first, second, lam[::-1], 1.0, 0).fingerprint
    images = torch.zeros(2, 1, 2, 2, dtype=torch.uint8)
    labels = torch.tensor([0, 1])
    part = Part(images, labels, labels).fingerprint
    assert part == Part(images.clone(), labels.clone(), labels).fingerprint
    assert part != Part(images + 1, labels, labels).fingerprint
    assert part != Part(images, labels + 1, labels).fingerprint
    assert part != Part(images, labels, labels + 1).fingerprint
