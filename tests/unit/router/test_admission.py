"""What a router takes on at once, and what it refuses."""

from contextlib import nullcontext

import pytest

from backhaul_router.admission import MAX_ENDINGS, MAX_LISTS, Admission
from backhaul_router.core.errors import ApiError
from tests.unit.router.ports import FakeClock


def admission(*, max_turns: int = 2, max_held_bytes: int = 100) -> Admission:
    return Admission(max_turns=max_turns, max_held_bytes=max_held_bytes, clock=FakeClock())


def test_a_turn_beyond_the_limit_is_refused_until_another_ends() -> None:
    limits = admission(max_turns=2)
    with limits.turn():
        with limits.turn():
            with pytest.raises(ApiError) as caught, limits.turn():
                pass
            assert (caught.value.status, caught.value.code) == (429, "too_many_turns")
            assert caught.value.headers == {"retry-after": "1"}
            assert "2 turns" in caught.value.message
        with limits.turn():
            assert limits.turn_count == 2
    assert limits.turn_count == 0


@pytest.mark.parametrize("error", [None, RuntimeError, GeneratorExit, KeyboardInterrupt])
def test_a_turn_is_counted_out_once_however_it_ends(error: type[BaseException] | None) -> None:
    limits = admission()
    expected = pytest.raises(error) if error else nullcontext()
    with expected, limits.turn() as held:
        held.grow(60)
        assert (limits.turn_count, limits.held_bytes) == (1, 60)
        if error:
            raise error
    assert (limits.turn_count, limits.held_bytes) == (0, 0)


def test_bodies_beyond_the_limit_are_refused_whoever_holds_them() -> None:
    limits = admission(max_held_bytes=100)
    with limits.turn() as first, limits.turn() as second:
        first.grow(60)
        second.grow(40)
        with pytest.raises(ApiError) as caught:
            first.grow(1)
        assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
        assert "100 bytes" in caught.value.message
        assert limits.held_bytes == 100
    assert limits.held_bytes == 0


def test_model_lists_are_limited_apart_from_turns() -> None:
    limits = admission(max_turns=1)
    lists = [limits.listing() for _ in range(MAX_LISTS)]
    for entered in lists:
        entered.__enter__()
    with pytest.raises(ApiError) as caught, limits.listing():
        pass
    assert (caught.value.status, caught.value.code) == (429, "too_many_lists")
    with limits.turn():
        pass
    for entered in lists:
        entered.__exit__(None, None, None)
    with limits.listing():
        pass


def test_endings_are_limited_and_hold_bytes_as_turns_do() -> None:
    limits = admission(max_held_bytes=MAX_ENDINGS)
    endings = [limits.ending(1) for _ in range(MAX_ENDINGS)]
    for entered in endings[:-1]:
        entered.__enter__()
    with pytest.raises(ApiError) as caught, limits.ending(2):
        pass
    assert (caught.value.status, caught.value.code) == (429, "too_many_bytes")
    with endings[-1], pytest.raises(ApiError) as caught, limits.ending():
        pass
    assert (caught.value.status, caught.value.code) == (429, "too_many_endings")
    for entered in endings[:-1]:
        entered.__exit__(None, None, None)
    assert limits.held_bytes == 0


def test_refusals_are_logged_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    limits = Admission(max_turns=1, max_held_bytes=1, clock=clock)
    with limits.turn():
        for _ in range(50):
            with pytest.raises(ApiError), limits.turn():
                pass
        clock.now += 11
        with pytest.raises(ApiError), limits.turn():
            pass
    assert "".join(capsys.readouterr()).count("refusing requests") == 2
