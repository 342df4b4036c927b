from backhaul_registry.core.ledger import Ledger, Removal, Upsert, chunks
from tests.unit.registry.values import pointer


def test_a_pointer_keeps_its_lease_and_new_ones_fill_what_has_room() -> None:
    ledger = Ledger(max_keys_per_lease=2)
    ledger.add_lease(1)
    first = [pointer("a"), pointer("b")]
    assert ledger.place(first, []) == [Upsert(item, 1) for item in first]
    assert ledger.missing_leases([pointer("a"), pointer("c")]) == 1
    ledger.add_lease(2)
    changed = pointer("a", token_count=128)
    assert ledger.place([changed, pointer("c")], []) == [Upsert(changed, 1), Upsert(pointer("c"), 2)]


def test_a_removal_makes_room() -> None:
    ledger = Ledger(max_keys_per_lease=1)
    ledger.add_lease(1)
    ledger.place([pointer("a")], [])
    assert ledger.place([], [pointer("a").id]) == [Removal(pointer("a").id)]
    assert ledger.missing_leases([pointer("b")]) == 0
    assert ledger.place([pointer("b")], []) == [Upsert(pointer("b"), 1)]
    assert ledger.keys(1) == (pointer("b").id,)


def test_leases_missing_are_counted_by_new_pointers() -> None:
    ledger = Ledger(max_keys_per_lease=10)
    ledger.add_lease(1)
    upserts = [pointer(str(number)) for number in range(31)]
    assert ledger.missing_leases(upserts) == 3
    assert ledger.missing_leases([pointer("a")] * 50) == 0


def test_the_last_word_on_a_pointer_counts() -> None:
    ledger = Ledger()
    ledger.add_lease(1)
    new = pointer("a", token_count=128)
    assert ledger.place([pointer("a"), new, pointer("b")], [pointer("b").id]) == [
        Upsert(new, 1),
        Removal(pointer("b").id),
    ]
    assert ledger.keys(1) == (new.id,)


def test_removing_an_unknown_pointer_is_written_all_the_same() -> None:
    ledger = Ledger()
    ledger.add_lease(1)
    assert ledger.place([], [pointer("x").id]) == [Removal(pointer("x").id)]


def test_chunks_cover_everything_in_order() -> None:
    assert [list(chunk) for chunk in chunks(range(5), 2)] == [[0, 1], [2, 3], [4]]
    assert list(chunks([], 2)) == []
