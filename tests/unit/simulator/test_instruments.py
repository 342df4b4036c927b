"""What the simulator sees of reads at the holder."""

from backhaul_simulator.instruments import Instruments
from backhaul_simulator.transfer import Kind, ReadRequest


def _read(reader: str, *, set_id: str = "set", kind: Kind = "claimed", read_id: int = 1) -> ReadRequest:
    return ReadRequest(read_id, set_id, reader, kind, 0.0, [1, 2])


def _copied(instruments: Instruments, read: ReadRequest, *block_ids: int) -> int:
    before = instruments.reads_of_freed.total()
    for block_id in block_ids:
        instruments.block_copied(read, block_id)
    return instruments.reads_of_freed.total() - before


def test_a_retained_set_that_two_requests_read_is_counted_even_after_it_was_freed() -> None:
    instruments = Instruments()
    instruments.retained("set", "claimed", [1, 2])
    instruments.read_started(_read("first"))
    instruments.read_started(_read("first", read_id=2))
    assert instruments.second_reads == 0
    instruments.released("set")
    instruments.read_started(_read("second"))
    assert instruments.second_reads == 1


def test_a_handoff_may_be_read_twice() -> None:
    instruments = Instruments()
    for reader in ("first", "second"):
        instruments.read_started(_read(reader, kind="handoff"))
    assert instruments.second_reads == 0


def test_a_copied_block_has_to_be_retained_for_the_set_that_is_read() -> None:
    instruments = Instruments()
    instruments.retained("set", "claimed", [1, 2])
    instruments.retained("other", "claimed", [3])
    assert _copied(instruments, _read("a"), 1, 2) == 0
    assert _copied(instruments, _read("b"), 1, 3, 4) == 1, "a read counts once"
    instruments.released("set")
    assert _copied(instruments, _read("c"), 1) == 1


def test_a_complete_read_that_fails_its_request_all_the_same_is_the_fences() -> None:
    instruments = Instruments()
    instruments.read_complete("late")
    instruments.read_failed("late", "claimed")
    instruments.read_failed("broken", "claimed")
    assert (instruments.failed["claimed"], instruments.late_reads_failed) == (2, 1)


def test_the_ledger_tells_sets_blocks_and_leases_by_kind_and_what_is_pinned() -> None:
    instruments = Instruments()
    instruments.retained("a", "claimed", [1, 2])
    instruments.retained("b", "claimed", [2, 3])
    instruments.retained("c", "handoff", [4])
    ledger = instruments.ledger(["a", "c"])
    assert ledger["retained"] == {
        "claimed": {"sets": 2, "blocks": 3, "leases": 1},
        "handoff": {"sets": 1, "blocks": 1, "leases": 1},
    }
    assert ledger["pinned"] == 1
