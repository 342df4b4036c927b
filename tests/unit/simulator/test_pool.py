"""The simulator's memory: who gets which block, and what is in it."""

import pytest

from backhaul_simulator.engine_request import EngineRequest
from backhaul_simulator.pool import BlockPool
from backhaul_simulator.prefix_cache import BlockManager
from backhaul_simulator.requests import Request


def _request(prompt: list[int], *, salt: str = "") -> EngineRequest:
    asked = Request(request_id="r", prompt=prompt, cache_salt=salt)
    return EngineRequest(asked, request_id="r", max_tokens=16, block_size=4)


def _pool(block_count: int = 8) -> BlockPool:
    return BlockPool(block_count=block_count, block_size=4)


def test_the_null_block_is_never_given_out() -> None:
    assert 0 not in _pool().take(7)


def test_more_blocks_than_are_free_are_refused_as_a_whole() -> None:
    pool = _pool()
    with pytest.raises(ValueError, match="8 blocks asked, 7 free"):
        pool.take(8)
    assert pool.free_count == 7


def test_a_freed_block_keeps_its_content_until_it_is_written_again() -> None:
    pool = _pool()
    (block,) = pool.take(1)
    pool.write(block, b"x" * 32)
    pool.free([block])
    assert pool.read(block) == b"x" * 32


def test_a_block_that_does_not_exist_can_be_neither_read_nor_written() -> None:
    pool = _pool()
    for block in (-1, 8):
        with pytest.raises(IndexError):
            pool.read(block)
        with pytest.raises(IndexError):
            pool.write(block, b"x" * 8)
    with pytest.raises(IndexError):
        pool.write(1, b"x" * 16, token=3)


def test_freed_blocks_that_the_cache_does_not_know_are_given_out_first() -> None:
    pool = _pool()
    known, unknown = pool.take(2)
    pool.cache(known, b"hash")
    pool.free([known, unknown])
    assert pool.take(7)[0] == unknown
    assert pool.cached(b"hash") is None, "the last block to be given out was the known one"


def test_of_freed_blocks_that_the_cache_knows_the_end_of_a_prompt_goes_first() -> None:
    pool = _pool(block_count=3)
    first, second = pool.take(2)
    pool.cache(first, b"1")
    pool.cache(second, b"2")
    pool.free([first, second])
    assert pool.take(1) == [second]
    assert pool.cached(b"1") == first


def test_a_block_stays_in_use_until_its_last_user_has_freed_it() -> None:
    pool = _pool()
    (block,) = pool.take(1)
    pool.touch([block])
    pool.free([block])
    assert not pool.is_free(block)
    pool.free([block])
    assert pool.is_free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])


def test_the_cache_is_not_reset_while_a_block_is_in_use() -> None:
    pool = _pool()
    (block,) = pool.take(1)
    pool.cache(block, b"hash")
    assert not pool.reset_cache()
    assert pool.cached(b"hash") == block
    pool.free([block])
    assert pool.reset_cache()
    assert pool.cached(b"hash") is None


def test_a_prompt_finds_the_blocks_of_an_equal_start_but_never_all_its_tokens() -> None:
    pool = _pool()
    manager = BlockManager(pool)
    first = _request([1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.allocate(first, 8)
    assert manager.find(_request([1, 2, 3, 4, 5, 6, 7, 8])) == first.block_ids[:1]
    assert manager.find(_request([1, 2, 3, 4, 5, 6, 7, 8, 9])) == first.block_ids
    assert manager.find(_request([1, 2, 3, 4, 0, 6, 7, 8, 9])) == first.block_ids[:1]
    assert manager.find(_request([0, 2, 3, 4, 5, 6, 7, 8, 9])) == []


def test_prompts_with_different_salts_share_nothing() -> None:
    manager = BlockManager(_pool())
    assert manager.allocate(_request([1, 2, 3, 4, 5], salt="a"), 5)
    assert manager.find(_request([1, 2, 3, 4, 5], salt="b")) == []
    assert manager.find(_request([1, 2, 3, 4, 5])) == []
    assert manager.find(_request([1, 2, 3, 4, 5], salt="a")) != []


def test_blocks_that_wait_for_a_read_are_not_cached_until_it_has_ended() -> None:
    manager = BlockManager(_pool())
    reading = _request([1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.allocate(reading, 8, cache=False)
    assert manager.find(_request([1, 2, 3, 4, 5])) == []
    manager.cache(reading, 7)
    assert manager.find(_request([1, 2, 3, 4, 5])) == reading.block_ids[:1]


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = _pool(block_count=4)
    manager = BlockManager(pool)
    assert not manager.allocate(_request([1] * 16), 16)
    assert not manager.allocate(_request([1] * 16), 4, fit_tokens=16)
    assert not manager.allocate(_request([1] * 8), 8, reserved=2)
    assert pool.free_count == 3
    assert manager.allocate(_request([1] * 8), 8, reserved=1)


def test_cached_blocks_that_nobody_uses_count_as_free_only_once() -> None:
    pool = _pool(block_count=4)
    manager = BlockManager(pool)
    first = _request([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert manager.allocate(first, 9)
    manager.free(first)
    again = _request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13])
    cached = manager.find(again)
    assert len(cached) == 2
    assert not manager.allocate(again, 13, cached=cached), "two cached blocks and two new ones are four of three"
    assert manager.allocate(again, 12, cached=cached)
