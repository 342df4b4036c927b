"""Second chances at the owner: what is asked for, what is answered, and what becomes of the rest."""

from tests.mutants.mutant import Mutant

_SHELL = "services/node-agent/src/backhaul_node_agent/harvest.py"
_CACHED = "services/node-agent/src/backhaul_node_agent/core/cached.py"
_CHANCE = "services/node-agent/src/backhaul_node_agent/core/second_chance.py"
_UNIT = "tests/unit/node_agent/"

MUTANTS = (
    Mutant(
        "harvest-for-other-weights",
        _SHELL,
        "if not self._weights_of(engine.engine_id) or self._weights_of(engine.engine_id) != request.weights_digest:",
        "if False:",
        (
            f"{_UNIT}test_harvest.py::test_the_engine_is_not_asked_when[weights]",
            f"{_UNIT}test_harvest.py::test_an_engine_whose_weights_nobody_vouches_for_is_not_asked",
        ),
    ),
    Mutant(
        "harvest-adapters",
        _SHELL,
        "request.model not in server.base_models",
        "request.model not in server.models",
        (f"{_UNIT}test_harvest.py::test_the_engine_is_not_asked_when[adapter]",),
    ),
    Mutant(
        "harvest-without-a-lease",
        _SHELL,
        "        if not self._owner.lease_valid(now) or self._owner.draining:\n",
        "        if False:\n",
        (f"{_UNIT}test_harvest.py::test_what_is_answered_when_the_lease_is_gone_is_released",),
    ),
    Mutant(
        "keep-what-nobody-reads",
        _SHELL,
        "        except BaseException:\n            self._let_loose(kept)\n            raise\n",
        "        except BaseException:\n            raise\n",
        (f"{_UNIT}test_harvest.py::test_an_answer_that_does_not_fit_is_released[other-tokens]",),
    ),
    Mutant(
        "believe-any-answer",
        _SHELL,
        "kept.token_count != count + 1 or ",
        "",
        (f"{_UNIT}test_harvest.py::test_an_answer_that_does_not_fit_is_released[other-tokens]",),
    ),
    Mutant(
        "harvest-up-to-the-lease",
        _SHELL,
        "deadline = min(kept_until - MARGIN_S, ",
        "deadline = min(kept_until, ",
        (f"{_UNIT}test_harvest.py::test_the_deadline_leaves_a_margin_to_the_engines_lease",),
    ),
    Mutant(
        "guess-again-and-again",
        _CHANCE,
        "        return now >= self.until\n",
        "        return True\n",
        (
            f"{_UNIT}test_second_chance.py::test_wrong_guesses_are_paid_with_ever_longer_pauses",
            f"{_UNIT}test_harvest.py::test_a_guess_that_was_wrong_gives_its_handle_and_a_pause",
        ),
    ),
    Mutant(
        "guess-at-little",
        _CHANCE,
        "return cached_count >= max(LEAST_TOKENS, (pointer_count + 1) // 2)",
        "return cached_count > 0",
        (
            f"{_UNIT}test_second_chance.py::test_too_few_tokens_are_not_asked_for",
            f"{_UNIT}test_harvest.py::test_a_set_whose_blocks_are_gone_loses_its_pointer_to_the_turn_that_finds_out",
        ),
    ),
    Mutant(
        "forget-a-conversation-for-its-title",
        _SHELL,
        "if pointer and second_chance.evicted(pointer, _identity(request), request.token_ids, count, size):",
        "if pointer:",
        (
            f"{_UNIT}test_harvest.py::test_a_request_that_does_not_show_what_is_gone_costs_no_pointer",
            f"{_UNIT}test_harvest.py::test_what_a_label_leads_to_is_not_known_and_not_dropped",
        ),
    ),
    Mutant(
        "ignore-gaps-in-events",
        _CACHED,
        "        if not complete:\n            self.forget()\n",
        "",
        (f"{_UNIT}test_cached.py::test_a_restarted_engine_begins_anew",),
    ),
    Mutant(
        "count-images-as-text",
        _CACHED,
        "        return extra[0]\n    return None\n",
        '        return extra[0]\n    return ""\n',
        (f"{_UNIT}test_cached.py::test_blocks_of_another_kind_are_never_found[an-image]",),
    ),
    Mutant(
        "ignore-other-cache-groups",
        _CACHED,
        "            self.countable = False\n",
        "            pass\n",
        (f"{_UNIT}test_cached.py::test_an_engine_that_does_not_cache_prefixes_as_such_is_not_counted_on",),
    ),
)
