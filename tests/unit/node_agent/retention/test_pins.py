"""Which blocks sets pin, each counted once."""

import random

import pytest

from backhaul_node_agent.core.retention.pins import Pins


def test_a_block_counts_once_however_many_sets_hold_it() -> None:
    pins = Pins(100)
    pins.add("a", [1, 2, 3])
    pins.add("b", [2, 3, 4, 5])

    assert pins.block_count == 5
    assert (pins.alone("a"), pins.alone("b")) == (1, 2)


def test_what_a_set_leaves_behind_is_its_last_holders_alone() -> None:
    pins = Pins(100)
    for name in "abc":
        pins.add(name, [1, 2])
    pins.remove("a", [1, 2])
    assert pins.alone("b") == pins.alone("c") == 0

    pins.remove("c", [1, 2])

    assert pins.alone("b") == pins.block_count == 2
    assert "c" not in pins
    with pytest.raises(KeyError):
        pins.alone("c")


def test_what_is_no_block_of_the_engine_counts_nowhere_and_twice_is_once() -> None:
    pins = Pins(10)
    pins.add("a", [3, 3, 10, -1, 2**31])

    assert pins.block_count == pins.alone("a") == 1
    pins.remove("a", [3, 3, 10, -1, 2**31])
    assert pins.block_count == 0


@pytest.mark.parametrize("seed", range(5))
def test_after_any_changes_it_says_what_counting_all_anew_says(seed: int) -> None:
    rng = random.Random(seed)
    pins, held = Pins(40), dict[str, set[int]]()
    for number in range(200):
        if held and rng.random() < 0.45:
            name = rng.choice(list(held))
            pins.remove(name, held.pop(name))
        else:
            held[f"set-{number}"] = set(rng.sample(range(40), rng.randrange(12)))
            pins.add(f"set-{number}", held[f"set-{number}"])
        assert pins.block_count == len(set[int]().union(*held.values()))
        for name, blocks in held.items():
            others = set[int]().union(*(other for key, other in held.items() if key != name))
            assert pins.alone(name) == len(blocks - others)
