"""Life of one block set at its owner: a table that says what each event does in each state.

    reported ───────► HELD ──claim──► CLAIMED ──freed (read)──► gone
    found after a     ▲ │ ▲              │ │
    restart ─► FENCED ┘ │ └───returned───┘ │ lapsed
                 │      │ release, expiry  ▼
                 └──────┴──────────────► RELEASING ──freed──► gone

Rules:
- Only HELD is granted. A grant ends by the engine's notice that the blocks are free, by a return (back to HELD), or by
  its lapse, after which the set is released and never granted again.
- Only HELD and a lapsed claim lead to a release. FENCED and CLAIMED remember that a release was asked for.
- A release is sent once no pointer leads to the set any more and while this agent owns the engine, and again until the
  engine confirms or its deadline passes.
- Only the engine's word (freed, or missing in a replay) makes a set gone; its deadline alone only ends its use.

An event that the table does not list for a state is a fault of the caller: `IllegalEventError`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from backhaul_node_agent.core.block_set import BlockSet
from backhaul_node_agent.core.engine_clock import DRIFT


class State(Enum):
    """Where a block set is in its life."""

    FENCED = auto()
    HELD = auto()
    CLAIMED = auto()
    RELEASING = auto()


class Pointer(Enum):
    """Whether the registry leads to a block set, as far as its owner knows."""

    ABSENT = auto()
    PUBLISHED = auto()
    REMOVING = auto()
    """The removal is sent but not durable yet."""


class Action(Enum):
    """What the shell has to do for a set."""

    PUBLISH = auto()
    UNPUBLISH = auto()
    TELL_CLAIMED = auto()
    TELL_RETURNED = auto()
    RELEASE = auto()


class Why(Enum):
    """Why a set is released."""

    ASKED = "asked"
    DRAINING = "draining"
    SUPERSEDED = "superseded"
    OVER_BUDGET = "over_budget"
    OLD = "kept_long_enough"
    UNPUBLISHED = "never_published"
    EXPIRED = "expired"
    """Its deadline passed."""
    LAPSED = "claim_lapsed"
    """Its claim was neither used nor returned in time."""
    FENCED = "fenced"
    """It was found after a restart, and granted or unwanted before."""
    CLOCK_JUMPED = "clock_jumped"


class IllegalEventError(Exception):
    """An event that the state does not allow."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Times, in seconds."""

    claim_ttl_s: float = 30.0
    margin_s: float = 2.0
    """What is kept between a claim's deadline and everything that may only happen before or after it."""
    least_left_s: float = 6.0
    """Least time that a grant must leave. The prefill engine declines reads in the last 5 s before a deadline
    (nixl/pull_worker.py, `_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`)."""
    resend_s: float = 3.0
    """Time between two releases of the same set."""
    retained_share: float = 0.5
    """Share of an engine's blocks that its sets may pin; its running requests need the others."""
    pressure_mark: float = 0.9
    """Share of an engine's blocks above which sets give way to what runs and waits."""
    max_retention_s: float = 1800.0
    """How long a set is kept at most, counted from the end of its turn."""
    unpublished_s: float = 60.0
    """How long a set is kept that the registry does not take over."""


@dataclass(frozen=True, slots=True)
class Instant:
    """Now, by the agent's monotonic clock, and the bounds of what the engine's clock shows."""

    local: float
    earliest: float = -math.inf
    latest: float = math.inf
    owner: bool = True
    """Whether this agent is certain to be the engine's owner; another one may have granted the set."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One grant."""

    request_id: str
    deadline: float
    """Engine's clock: no read may end later."""
    lapses_at: float
    """Agent's clock: from then on no read under this grant can be under way."""


@dataclass(frozen=True, slots=True)
class Life:
    """A block set and where it is in its life."""

    block_set: BlockSet
    state: State
    deadline: float
    """Engine's clock: what the engine last confirmed."""
    pointer: Pointer = Pointer.ABSENT
    claim: Claim | None = None
    """Set exactly while CLAIMED."""
    granted_before: bool = False
    """While FENCED: some agent granted the set and did not take that back."""
    release_wanted: bool = False
    """While FENCED or CLAIMED: release it as soon as that is allowed."""
    send_at: float = -math.inf
    """While RELEASING: agent's clock, when the next release is due."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The engine confirmed a deadline."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The set is in the replay of an engine that was connected to nobody else since."""

    granted: bool
    deadline: float


@dataclass(frozen=True, slots=True)
class Found:
    """The set is in the replay of an engine that another agent may have been connected to."""

    granted: bool
    deadline: float


@dataclass(frozen=True, slots=True)
class FenceLifted:
    """Every claim that another agent can have granted has lapsed."""


@dataclass(frozen=True, slots=True)
class ClaimAsked:
    """A router asks for the set."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ClaimReturned:
    """The router's claim was never used."""


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """Nobody needs the set any more; or, `for_room`, its blocks are needed more elsewhere."""

    for_room: bool = False
    why: Why = Why.ASKED


@dataclass(frozen=True, slots=True)
class PointerGone:
    """The removal of the pointer is durable, or the registry cannot be told."""


@dataclass(frozen=True, slots=True)
class ClockJumped:
    """The engine's clock jumped: the deadline says nothing any more."""


@dataclass(frozen=True, slots=True)
class Freed:
    """The engine has freed the blocks."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Confirmed
    | Seen
    | Found
    | FenceLifted
    | ClaimAsked
    | ClaimReturned
    | ReleaseAsked
    | PointerGone
    | ClockJumped
    | Freed
    | Tick
)


@dataclass(frozen=True, slots=True)
class Step:
    """What an event did."""

    life: Life | None
    """None: the set is gone."""
    actions: tuple[Action, ...] = ()
    """In the order in which they must be done."""
    refusal: str = ""
    """Why a claim was refused."""


def step(life: Life, event: Event, at: Instant, limits: Limits) -> Step:
    """Applies one event.

    Raises IllegalEventError when the table does not allow the event in this state.
    """
    handler = _TABLE.get((life.state, type(event)))
    if handler is None:
        raise IllegalEventError(f"{type(event).__name__} while {life.state.name}")
    return handler(life, event, at, limits)


def changes(life: Life, event: Event, at: Instant, limits: Limits) -> bool:
    """Tells whether an event does anything to a set. Raises IllegalEventError as `step` does."""
    outcome = step(life, event, at, limits)
    return outcome.life is not life or bool(outcome.actions)


def born(block_set: BlockSet, deadline: float) -> Step:
    """Returns the life of a set that the engine has just retained: HELD and published."""
    return _hold(Life(block_set, State.HELD, deadline))


def found(block_set: BlockSet, deadline: float, *, granted: bool) -> Step:
    """Returns the life of a set that may have been granted by another agent: FENCED."""
    return Step(Life(block_set, State.FENCED, deadline, granted_before=granted))


def adopted(block_set: BlockSet, deadline: float, at: Instant, limits: Limits) -> Step:
    """Returns the life of a set whose grant was forgotten: CLAIMED by nobody until that grant must have lapsed."""
    lapses_at = at.local + limits.claim_ttl_s * (1 + 2 * DRIFT) + limits.margin_s
    return Step(Life(block_set, State.CLAIMED, deadline, claim=Claim("", deadline, lapses_at)))


def _hold(life: Life, *actions: Action) -> Step:
    held = replace(life, state=State.HELD, pointer=Pointer.PUBLISHED, claim=None, granted_before=False)
    return Step(held, (*actions, Action.PUBLISH))


def _unpublished(life: Life) -> tuple[Life, tuple[Action, ...]]:
    if life.pointer is not Pointer.PUBLISHED:
        return life, ()
    return replace(life, pointer=Pointer.REMOVING), (Action.UNPUBLISH,)


def _release(life: Life, at: Instant, limits: Limits, *actions: Action) -> Step:
    ending = replace(life, state=State.RELEASING, claim=None, send_at=-math.inf)
    ending, removal = _unpublished(ending)
    sent = _send_release(ending, at, limits)
    return replace(sent, actions=(*actions, *removal, *sent.actions))


def _send_release(life: Life, at: Instant, limits: Limits) -> Step:
    allowed = at.owner and life.pointer is Pointer.ABSENT and at.earliest < life.deadline
    if not allowed or at.local < life.send_at:
        return Step(life)
    return Step(replace(life, send_at=at.local + limits.resend_s), (Action.RELEASE,))


def _confirm(life: Life, event: Event, _at: Instant, _limits: Limits) -> Step:
    assert isinstance(event, Confirmed)
    return Step(replace(life, deadline=event.deadline))


def _see(life: Life, event: Event, _at: Instant, _limits: Limits) -> Step:
    # The engine's note of the grant is what a successor of this agent goes by: mend it where a cut connection lost it.
    assert isinstance(event, Seen)
    granted_before = life.granted_before or (life.state is State.FENCED and event.granted)
    seen = replace(life, deadline=event.deadline, granted_before=granted_before)
    if life.state is State.CLAIMED and not event.granted:
        return Step(seen, (Action.TELL_CLAIMED,))
    if life.state is State.HELD and event.granted:
        return Step(seen, (Action.TELL_RETURNED,))
    return Step(seen)


def _find(life: Life, event: Event, _at: Instant, _limits: Limits) -> Step:
    assert isinstance(event, Found)
    fenced, removal = _unpublished(life)
    granted = event.granted or life.granted_before or life.state is State.CLAIMED
    wanted = life.release_wanted or life.state is State.RELEASING
    fenced = replace(fenced, state=State.FENCED, claim=None, granted_before=granted, release_wanted=wanted)
    return Step(replace(fenced, deadline=event.deadline), removal)


def _lift(life: Life, _event: Event, at: Instant, limits: Limits) -> Step:
    if life.granted_before or life.release_wanted:
        return _release(life, at, limits)
    return _hold(life)


def _grant(life: Life, event: Event, at: Instant, limits: Limits) -> Step:
    assert isinstance(event, ClaimAsked)
    deadline = min(at.earliest + limits.claim_ttl_s, life.deadline - limits.margin_s)
    if deadline - at.latest < limits.least_left_s:
        return Step(life, refusal="SET_EXPIRING")
    lapses_at = at.local + (deadline - at.earliest) * (1 + 2 * DRIFT) + limits.margin_s
    claimed, removal = _unpublished(replace(life, state=State.CLAIMED))
    claimed = replace(claimed, claim=Claim(event.request_id, deadline, lapses_at))
    return Step(claimed, (Action.TELL_CLAIMED, *removal))


def _refuse(reason: str) -> "Handler":
    def handler(life: Life, _event: Event, _at: Instant, _limits: Limits) -> Step:
        return Step(life, refusal=reason)

    return handler


def _take_back(life: Life, _event: Event, at: Instant, limits: Limits) -> Step:
    if life.release_wanted:
        return _release(life, at, limits, Action.TELL_RETURNED)
    return _hold(life, Action.TELL_RETURNED)


def _release_now(life: Life, _event: Event, at: Instant, limits: Limits) -> Step:
    return _release(life, at, limits)


def _release_later(life: Life, _event: Event, _at: Instant, _limits: Limits) -> Step:
    return Step(replace(life, release_wanted=True))


def _pointer_gone(life: Life, _event: Event, at: Instant, limits: Limits) -> Step:
    if life.pointer is not Pointer.REMOVING:
        return Step(life)
    gone = replace(life, pointer=Pointer.ABSENT)
    return _send_release(gone, at, limits) if life.state is State.RELEASING else Step(gone)


def _jump_held(life: Life, _event: Event, at: Instant, limits: Limits) -> Step:
    return _release(replace(life, deadline=math.inf), at, limits)


def _jump(life: Life, _event: Event, _at: Instant, _limits: Limits) -> Step:
    return Step(replace(life, deadline=math.inf, release_wanted=True))


def _free(life: Life, _event: Event, _at: Instant, _limits: Limits) -> Step:
    _, removal = _unpublished(life)
    return Step(None, removal)


def _tick_held(life: Life, _event: Event, at: Instant, limits: Limits) -> Step:
    return _release(life, at, limits) if at.earliest >= life.deadline else Step(life)


def _tick_claimed(life: Life, _event: Event, at: Instant, limits: Limits) -> Step:
    assert life.claim is not None
    return _release(life, at, limits) if at.local >= life.claim.lapses_at else Step(life)


def _tick_releasing(life: Life, _event: Event, at: Instant, limits: Limits) -> Step:
    return _send_release(life, at, limits)


def _keep(life: Life, _event: Event, _at: Instant, _limits: Limits) -> Step:
    return Step(life)


Handler = Callable[[Life, Event, Instant, Limits], Step]

_ANYWHERE: dict[type[Event], Handler] = {
    Confirmed: _confirm,
    Seen: _see,
    Found: _find,
    PointerGone: _pointer_gone,
    Freed: _free,
}

_BY_STATE: dict[State, dict[type[Event], Handler]] = {
    State.FENCED: {
        FenceLifted: _lift,
        ClaimAsked: _refuse("SET_FENCED"),
        ReleaseAsked: _release_later,
        ClockJumped: _jump,
        Tick: _keep,
    },
    State.HELD: {
        ClaimAsked: _grant,
        ReleaseAsked: _release_now,
        ClockJumped: _jump_held,
        Tick: _tick_held,
    },
    State.CLAIMED: {
        ClaimAsked: _refuse("SET_CLAIMED"),
        ClaimReturned: _take_back,
        ReleaseAsked: _release_later,
        ClockJumped: _jump,
        Tick: _tick_claimed,
    },
    State.RELEASING: {
        ClaimAsked: _refuse("SET_UNKNOWN"),
        ReleaseAsked: _keep,
        ClockJumped: _jump,
        Tick: _tick_releasing,
    },
}

_TABLE: dict[tuple[State, type[Event]], Handler] = {
    (state, event): handler for state, row in _BY_STATE.items() for event, handler in {**_ANYWHERE, **row}.items()
}
