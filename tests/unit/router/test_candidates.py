"""Which of several block sets is claimed."""

import pytest

from backhaul_connector.anchors import AnchorChain
from backhaul_router.core.candidates import Pointer, distinct, likeliest_first, longest_match

IDENTITY = b"i" * 16


def pointer(tokens: list[int], set_id: str = "s", key: str = "k", identity: bytes = IDENTITY) -> Pointer:
    chain = AnchorChain(IDENTITY, 64)
    chain.extend(tokens)
    return Pointer(key, set_id, "e", "n", len(tokens), chain.at(len(tokens)), 64, identity)


PROMPT = list(range(300))


def test_the_longest_prefix_of_the_prompt_wins() -> None:
    short, long, fork = pointer(PROMPT[:100]), pointer(PROMPT[:200]), pointer([*PROMPT[:199], 9, 9])
    assert longest_match([short, fork, long], PROMPT) is long


def test_the_first_of_equals_wins() -> None:
    one, other = pointer(PROMPT[:100], set_id="one"), pointer(PROMPT[:100], set_id="other")
    assert longest_match([one, other], PROMPT) is one


def test_prefixes_of_the_prompt_are_likeliest_then_what_is_unsaid_then_other_prompts() -> None:
    unsaid = Pointer("k", "label", "e", "n", 0, b"", 0, b"")
    title, too_long = pointer([9] * 100, set_id="title"), pointer([*PROMPT, 1], set_id="branch")
    short, long = pointer(PROMPT[:100], set_id="short"), pointer(PROMPT[:200], set_id="long")
    assert likeliest_first([title, unsaid, too_long, short, long], PROMPT) == [long, short, unsaid, title, too_long]


def test_a_set_longer_than_the_prompt_does_not_match() -> None:
    assert longest_match([pointer([*PROMPT, 1])], PROMPT) is None


def test_another_identity_does_not_match() -> None:
    assert longest_match([pointer(PROMPT[:100], identity=b"x" * 16)], PROMPT) is None


def test_odd_pointers_do_not_match() -> None:
    odd = [Pointer("k", "s", "e", "n", count, b"", stride, IDENTITY) for count, stride in ((0, 64), (-1, 64), (5, 0))]
    assert longest_match([*odd, pointer(PROMPT[:100], identity=b"")], PROMPT) is None


@pytest.mark.parametrize("token", [2**31, 2**40, 10**30, -(2**31) - 1])
def test_tokens_that_no_model_has_do_not_match(token: int) -> None:
    assert longest_match([pointer(PROMPT[:100])], [token] * 300) is None
    assert longest_match([pointer(PROMPT[:200]), short := pointer(PROMPT[:100])], [*PROMPT[:150], token] * 2) is short


def test_a_set_under_several_keys_counts_once() -> None:
    one, same, other = pointer([1], key="a"), pointer([1], key="b"), pointer([1], set_id="t")
    assert distinct([one, same, other]) == [one, other]
