"""How many tokens a prompt has."""

import pytest

from backhaul_router.core.routing.tokens import MAX_MODELS, PRIOR, TokenRates


def test_a_model_of_which_nothing_is_known_has_a_token_for_four_bytes() -> None:
    assert TokenRates().estimate("m", 4000) == 4000 * PRIOR


def test_a_few_prompts_show_a_models_rate() -> None:
    rates = TokenRates()
    for byte_count in (800, 12_000, 3_000):
        rates.note("m", byte_count, byte_count // 2)
    assert rates.estimate("m", 10_000) == pytest.approx(5000, rel=0.05)
    assert rates.estimate("another", 10_000) == 2500


def test_a_rate_that_changes_is_followed() -> None:
    rates = TokenRates()
    for _ in range(100):
        rates.note("m", 5000, 1000)
    for _ in range(20):
        rates.note("m", 5000, 3000)
    assert rates.estimate("m", 5000) == pytest.approx(3000, rel=0.15)


def test_short_prompts_do_not_tell_much_of_long_ones() -> None:
    rates = TokenRates()
    for _ in range(10):
        rates.note("m", 20_000, 5000)
        rates.note("m", 10, 40)
    assert rates.estimate("m", 20_000) == pytest.approx(5000, rel=0.05)


def test_every_prompt_has_a_token() -> None:
    assert TokenRates().estimate("m", 0) == 1


@pytest.mark.parametrize(("byte_count", "token_count"), [(0, 0), (0, 10), (10, 0), (-5, 10), (10, -5)])
def test_a_prompt_without_text_or_tokens_tells_nothing(byte_count: int, token_count: int) -> None:
    rates = TokenRates()
    rates.note("m", byte_count, token_count)
    assert rates.estimate("m", 1000) == 250


@pytest.mark.parametrize(("byte_count", "token_count"), [(1, 10**400), (10**400, 1), (10**9, 1), (1, 10**9)])
def test_absurd_counts_are_bounded(byte_count: int, token_count: int) -> None:
    rates = TokenRates()
    for _ in range(50):
        rates.note("m", byte_count, token_count)
    assert 1000 / 64 <= rates.estimate("m", 1000) + 1 <= 4001


def test_so_many_models_are_remembered_and_the_one_noted_longest_ago_goes_first() -> None:
    rates = TokenRates()
    for number in range(MAX_MODELS):
        rates.note(f"m{number}", 1000, 1000)
    rates.note("m0", 1000, 1000)
    rates.note("one more", 1000, 1000)
    assert rates.estimate("m0", 1000) > 900
    assert rates.estimate("m1", 1000) == 250


def test_asking_for_models_remembers_none() -> None:
    rates = TokenRates()
    rates.note("m", 1000, 1000)
    for number in range(MAX_MODELS + 1):
        rates.estimate(f"m{number}", 1000)
    assert rates.estimate("m", 1000) > 800
