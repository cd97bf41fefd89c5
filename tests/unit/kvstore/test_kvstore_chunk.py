from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from kvstore.operator.patch import PatchKind
from kvstore.records import keys as chunk
from kvstore.records.keys import antecedent_key, canonical_key, content_id, embedding_key, patch_key, tenant_salt

texts = st.text(max_size=20)


def test_every_key_is_64_hex_digits() -> None:
    keys = [
        content_id(b""),
        content_id(b"x" * (5 << 20), b"salt"),
        canonical_key("m", "c", [], "bfloat16"),
        antecedent_key([], [], ordered=True),
        patch_key("c", "a", PatchKind.orbit, None),
        embedding_key("m", "c", "bfloat16"),
    ]
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)
    assert len(set(keys)) == len(keys)


def test_keys_are_stable_across_releases() -> None:
    # A change here makes every stored library useless: it must be deliberate.
    assert content_id(b"hello").startswith("0981fea24901694f")
    assert canonical_key("m", "c", [1, 2], "bfloat16").startswith("0a2f12171485683a")
    assert patch_key("c", "a", PatchKind.own, 16).startswith("3c8139111033efde")


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_integers_are_digested_as_8_bytes_each_the_lowest_first(values: list[int]) -> None:
    expected = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
    assert chunk._integers(values) == chunk._prefix_bytes(tuple(values)) == expected


def test_a_prefix_is_put_into_bytes_once_for_all_keys_of_a_request() -> None:
    prefix, before = tuple(range(100_000, 104_000)), chunk._prefix_bytes.cache_info().misses
    for antecedents in itertools.permutations("abcd"):
        antecedent_key(prefix, antecedents, ordered=True)
    assert chunk._prefix_bytes.cache_info().misses == before + 1


@given(a=st.tuples(texts, texts, texts), b=st.tuples(texts, texts, texts))
def test_fields_do_not_run_into_each_other(a: tuple[str, str, str], b: tuple[str, str, str]) -> None:
    assert (embedding_key(*a) == embedding_key(*b)) == (a == b)


@given(
    a=st.tuples(st.lists(st.integers(0, 9), max_size=3), st.lists(st.sampled_from("abc"), max_size=3)),
    b=st.tuples(st.lists(st.integers(0, 9), max_size=3), st.lists(st.sampled_from("abc"), max_size=3)),
)
def test_ordered_antecedents_are_told_apart(a: tuple[list[int], list[str]], b: tuple[list[int], list[str]]) -> None:
    assert (antecedent_key(*a, ordered=True) == antecedent_key(*b, ordered=True)) == (a == b)


def test_one_key_for_all_orderings_of_a_set() -> None:
    orderings = list(itertools.permutations(["a", "b", "c"]))
    assert len({antecedent_key([7], o, ordered=False) for o in orderings}) == 1
    assert len({antecedent_key([7], o, ordered=True) for o in orderings}) == 6
    assert antecedent_key([7], ["a"], ordered=False) != antecedent_key([7], ["a"], ordered=True)
    assert antecedent_key([7], ["a"], ordered=False) != antecedent_key([8], ["a"], ordered=False)


def test_everything_that_changes_the_kv_changes_the_key() -> None:
    base = canonical_key("m", "c", [1, 2], "bfloat16")
    others = [
        canonical_key("n", "c", [1, 2], "bfloat16"),
        canonical_key("m", "d", [1, 2], "bfloat16"),
        canonical_key("m", "c", [1, 3], "bfloat16"),
        canonical_key("m", "c", [2, 1], "bfloat16"),
        canonical_key("m", "c", [1, 2], "float32"),
    ]
    assert base not in others
    assert len(set(others)) == len(others)


def test_patches_are_told_apart_by_kind_and_rank() -> None:
    keys = {patch_key("c", "a", kind, rank) for kind in PatchKind for rank in (None, 8, 16)}
    assert len(keys) == 3 * len(PatchKind)
    assert patch_key("c", "a", PatchKind.own, 8) == patch_key("c", "a", "own", 8)


def test_patches_are_told_apart_by_form() -> None:
    forms = [(8,), (8, 0.9), (8, 0.95), (8, None, 0.5), (8, 0.9, 0.5), (8, None, 0.25), (8, None, 1.0, "aa"),
             (8, None, 1.0, "ab"), (8, None, 0.5, "aa"), (None, 0.9), (80,)]  # fmt: skip
    keys = {patch_key("c", "a", PatchKind.own, *form) for form in forms}
    assert len(keys) == len(forms)
    assert patch_key("c", "a", PatchKind.own, 8, None, 1.0, "") in keys


def test_tenants_get_unrelated_content_ids() -> None:
    ids = {content_id(b"picture", tenant_salt(tenant, secret)) for tenant in ("a", "b") for secret in (b"", b"s")}
    assert len(ids) == 4
    assert content_id(b"picture") not in ids
