"""Anchors prove a common prefix, and nothing more than that."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul_connector.anchors import (
    MAX_ANCHORS,
    AnchorChain,
    Anchors,
    Verification,
    identity_of,
    spacing_of,
    stride_of,
    verified_count,
)

IDENTITY = b"i" * 16
OTHER_TOKENS = 1_000_000

counts = st.integers(0, 40_000)
parts = st.fixed_dictionaries(
    {name: st.text(max_size=4) for name in ("weights_digest", "adapter", "cache_salt", "scope")}
)


def anchors_of(tokens: list[int], extras: list[tuple[int, bytes]] | None = None, stride: int = 64) -> Anchors:
    chain = AnchorChain(IDENTITY, stride, extras or [])
    chain.extend(tokens)
    return Anchors.of(chain, IDENTITY)


@settings(max_examples=150, deadline=None)
@given(set_count=counts, prompt_count=counts, shared=counts, stride=st.sampled_from([64, 128]))
def test_never_more_is_verified_than_is_common_and_all_of_it_to_within_one_spacing(
    set_count: int, prompt_count: int, shared: int, stride: int
) -> None:
    common = min(set_count, prompt_count, shared)
    anchors = anchors_of([*range(set_count)], stride=stride)
    prompt = [*range(common), *range(OTHER_TOKENS, OTHER_TOKENS + prompt_count - common)]

    verified = verified_count(anchors, prompt)

    assert verified == (set_count if common == set_count else common - common % anchors.spacing)


@given(set_count=counts, prompt_count=counts, shared=counts, limit=st.integers(1, 5_000))
@settings(deadline=None)
def test_a_prompt_may_be_compared_in_any_pieces_and_each_token_is_digested_once(
    set_count: int, prompt_count: int, shared: int, limit: int
) -> None:
    common = min(set_count, prompt_count, shared)
    anchors = anchors_of([*range(set_count)])
    prompt = [*range(common), *range(OTHER_TOKENS, OTHER_TOKENS + prompt_count - common)]
    verification = Verification(anchors, prompt)
    digested = []
    while not verification.done:
        digested.append(verification.advance(limit))

    assert verification.verified == verified_count(anchors, prompt)
    assert all(0 < count <= limit for count in digested)
    assert sum(digested) <= min(set_count, prompt_count)
    assert verification.advance(limit) == 0


def test_a_prompt_is_digested_no_further_than_a_little_behind_the_first_difference() -> None:
    anchors = anchors_of([*range(30_000)])
    verification = Verification(anchors, [*range(2_000), *range(OTHER_TOKENS, OTHER_TOKENS + 28_000)])

    digested = verification.advance(30_000)

    assert verification.done
    assert 2_000 <= digested <= 2_000 + 1_024 + anchors.spacing


@given(set_count=st.integers(1, 600), changed=st.integers(0, 599))
def test_one_changed_token_is_seen_at_every_anchor_behind_it(set_count: int, changed: int) -> None:
    tokens = [*range(set_count)]
    chains = [AnchorChain(IDENTITY, 64), AnchorChain(IDENTITY, 64)]
    chains[0].extend(tokens)
    chains[1].extend([OTHER_TOKENS if position == changed else token for position, token in enumerate(tokens)])

    for point in [*range(0, set_count + 1, 64), set_count]:
        assert (chains[0].at(point) == chains[1].at(point)) == (point <= changed)


@given(set_count=st.integers(1, 600), position=st.integers(0, 599))
def test_an_extra_changes_the_anchors_from_its_position_on(set_count: int, position: int) -> None:
    chains = [AnchorChain(IDENTITY, 64), AnchorChain(IDENTITY, 64, [(position, b"image")])]
    for chain in chains:
        chain.extend(range(set_count))

    for point in [*range(0, set_count + 1, 64), set_count]:
        assert (chains[0].at(point) == chains[1].at(point)) == (point <= position)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([(70, b"image-b")], id="another image"),
        pytest.param([(71, b"image-a")], id="elsewhere"),
        pytest.param([(70, b"image-a"), (100, b"image-a")], id="one more"),
        pytest.param([], id="none"),
    ],
)
def test_other_extras_are_not_verified(other: list[tuple[int, bytes]]) -> None:
    tokens = [5] * 200
    anchors = anchors_of(tokens, [(70, b"image-a")])

    assert verified_count(anchors, tokens, [(70, b"image-a")]) == 200
    assert verified_count(anchors, tokens, other) == 64


def test_the_digests_are_those_that_every_release_computes() -> None:
    made = anchors_of([*range(100)], [(70, b"image")])

    assert made.digests.hex() == "698d46decdc315ee8ab27fcb132ce9daba6cff4ec96a40f27b6a990b668ad913"


def test_one_extra_does_not_pass_for_two() -> None:
    two = [(1, b"a"), (2, b"b")]
    one = [(1, b"a" + (2).to_bytes(8, "big") + b"b")]
    one_with_length = [(1, b"a" + (2).to_bytes(8, "big") + (1).to_bytes(8, "big") + b"b")]

    assert len({anchors_of([5] * 10, extras).end for extras in (two, one, one_with_length)}) == 3


def test_the_order_of_extras_does_not_matter() -> None:
    extras = [(1, b"a"), (70, b"b"), (70, b"a")]

    assert anchors_of([5] * 200, extras) == anchors_of([5] * 200, extras[::-1])


@given(cuts=st.lists(st.integers(0, 500), max_size=8))
def test_tokens_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    tokens = [*range(500)]
    chain = AnchorChain(IDENTITY, 64)
    for start, end in pairwise([0, *sorted(cuts), 500]):
        chain.extend(tokens[start:end])

    assert chain.token_count == 500
    assert Anchors.of(chain, IDENTITY) == anchors_of(tokens)


@given(one=parts, other=parts)
def test_different_identities_have_different_keys(one: dict[str, str], other: dict[str, str]) -> None:
    assert (identity_of(**one) == identity_of(**other)) == (one == other)


def test_parts_of_an_identity_do_not_run_into_each_other() -> None:
    one = identity_of(weights_digest="w", adapter="ab", cache_salt="c", scope="s")
    other = identity_of(weights_digest="w", adapter="a", cache_salt="bc", scope="s")

    assert one != other


def test_an_identity_takes_any_text_that_json_can_carry() -> None:
    salts = ["\ud800", "?", ""]

    assert len({identity_of(weights_digest="", adapter="", cache_salt=salt, scope="") for salt in salts}) == 3


def test_the_identity_keys_every_digest() -> None:
    chains = [AnchorChain(identity, 64) for identity in (b"a" * 16, b"b" * 16)]
    for chain in chains:
        chain.extend(range(100))

    assert all(chains[0].at(point) != chains[1].at(point) for point in (0, 64, 100))


@pytest.mark.parametrize(("block_size", "stride"), [(1, 64), (16, 64), (64, 64), (65, 128), (128, 128), (1056, 2048)])
def test_the_stride_is_a_power_of_two_that_holds_a_block(block_size: int, stride: int) -> None:
    assert stride_of(block_size) == stride


@given(token_count=st.integers(0, 10_000_000), stride=st.sampled_from([64, 128, 1024]))
def test_a_set_carries_few_anchors_however_long_it_is(token_count: int, stride: int) -> None:
    spacing = spacing_of(token_count, stride)

    assert token_count // spacing <= MAX_ANCHORS
    assert spacing == stride or token_count // (spacing // 2) > MAX_ANCHORS


@pytest.mark.parametrize("token_count", [-64, 1, 63, 99, 101, 128])
def test_there_is_no_anchor_between_the_steps(token_count: int) -> None:
    chain = AnchorChain(IDENTITY, 64)
    chain.extend(range(100))

    with pytest.raises(ValueError, match="no anchor"):
        chain.at(token_count)


def test_a_token_id_of_more_than_32_bits_is_an_error() -> None:
    with pytest.raises(OverflowError):
        AnchorChain(IDENTITY, 64).extend([2**31])


@pytest.mark.parametrize(
    ("token_count", "digest_count", "complete"), [(200, 4, True), (200, 3, False), (200, 5, False), (192, 4, True)]
)
def test_anchors_say_whether_they_are_complete(token_count: int, digest_count: int, complete: bool) -> None:
    assert Anchors(IDENTITY, 64, 64, token_count, bytes(16 * digest_count)).complete is complete
