"""The simulator's model: what it computes depends on everything before, and on nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from backhaul_simulator.model import END, FIRST_WORD, KV_BYTES, Model

_TOKENS = st.lists(st.integers(FIRST_WORD, 49_999), min_size=1, max_size=40)


def _content(model: Model, tokens: list[int]) -> list[bytes]:
    return list(map(model.start().append, tokens))


@given(tokens=_TOKENS, other=st.integers(FIRST_WORD, 49_999), data=st.data())
def test_another_token_changes_all_content_from_its_place_on_and_none_before(
    tokens: list[int], other: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    edited = [*tokens[:place], other, *tokens[place + 1 :]]
    mine, theirs = _content(Model(), tokens), _content(Model(), edited)
    assert mine[:place] == theirs[:place]
    if edited != tokens:
        assert all(a != b for a, b in zip(mine[place:], theirs[place:], strict=True))


@given(tokens=_TOKENS, data=st.data())
def test_content_taken_from_memory_goes_on_as_if_it_had_been_computed(tokens: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    computed = Model().start()
    for token in tokens:
        computed.append(token)
    found = Model().start()
    found.absorb(b"".join(_content(Model(), tokens)[:cut]))
    for token in tokens[cut:]:
        found.append(token)
    assert found.next() == computed.next()


@given(tokens=_TOKENS)
def test_other_weights_give_other_content(tokens: list[int]) -> None:
    assert _content(Model(), tokens) != _content(Model(weights="other"), tokens)


@given(tokens=_TOKENS, content=st.binary(min_size=KV_BYTES, max_size=KV_BYTES))
def test_a_foreign_piece_in_memory_changes_what_comes_next(tokens: list[int], content: bytes) -> None:
    pieces = _content(Model(), tokens)
    right, wrong = Model(end_rate=10**9).start(), Model(end_rate=10**9).start()
    right.absorb(b"".join(pieces))
    wrong.absorb(b"".join([content, *pieces[1:]]))
    # The word that comes next is one of 50,000, so that two may be equal by chance; the content after it is not.
    assert (right.append(FIRST_WORD) == wrong.append(FIRST_WORD)) == (content == pieces[0])


def test_an_answer_stops_at_the_end_token_but_not_before_its_least_length() -> None:
    model = Model(end_rate=2)
    for first in range(FIRST_WORD, FIRST_WORD + 50):
        answer = model.answer([first], max_tokens=30, min_tokens=5)
        assert len(answer) > 5
        assert END not in answer[:5]
        assert answer.index(END) == len(answer) - 1 if END in answer else len(answer) == 30


def test_an_answer_goes_on_beyond_the_end_token_when_that_is_ignored() -> None:
    answer = Model(end_rate=2).answer([FIRST_WORD], max_tokens=30, ignore_eos=True)
    assert len(answer) == 30
    assert END in answer


def test_an_answer_ends_with_a_stop_token() -> None:
    whole = Model().answer([FIRST_WORD], max_tokens=10, ignore_eos=True)
    assert Model().answer([FIRST_WORD], max_tokens=10, ignore_eos=True, stop_token_ids={whole[3]}) == whole[:4]
