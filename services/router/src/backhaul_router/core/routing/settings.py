"""The routing file: limits, plugins and their weights, in TOML."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import msgspec

from backhaul_common.toml import parse_toml
from backhaul_router.core.health.breakers import BreakerSettings
from backhaul_router.core.routing.catalogue import FILTERS, PICKERS, REQUIRED, SCORERS
from backhaul_router.core.routing.demand import Leg
from backhaul_router.core.routing.filters.max_waiting import MaxWaitingFilter
from backhaul_router.core.routing.live import Live
from backhaul_router.core.routing.profile import Profile

DEFAULT_MAX_WAITING = 100

_TokenCount = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Which routes are considered at all."""

    alone_tokens: _TokenCount = 256
    """most tokens that a decode engine computes of a prompt of which nothing is held; 0: prefill engines compute all"""
    append_tokens: _TokenCount = 8192
    """most new tokens that the holder of a conversation computes itself; 0: prefill engines compute all"""
    disturbance: _Share = 0.1
    """what a second of computing a prompt at a decode engine costs each answer that it is giving, seconds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSettings:
    """A scorer and its weight."""

    type: str
    """which one"""
    weight: _Weight = 1.0
    """how much it counts beside the others"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """A picker."""

    type: str = "best"
    """which one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """How an engine is chosen. Filters that no turn can do without run in any case, before these."""

    filters: tuple[str, ...] = ("pairs-apart", "untried", "healthy")
    """in this order"""
    max_waiting: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = DEFAULT_MAX_WAITING
    """most requests that may wait at an engine which is given another; for the filter max-waiting"""
    scorers: tuple[ScorerSettings, ...] = ()
    """they are added up by weight; without any all engines are equal"""
    picker: PickerSettings = PickerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings(ProfileSettings):
    """For legs that compute a prompt and hand it off, with or without reading what is held of it."""

    scorers: tuple[ScorerSettings, ...] = (
        ScorerSettings(type="time", weight=1.0),
        ScorerSettings(type="least-running", weight=0.25),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings(ProfileSettings):
    """For legs that answer, after a hand-off or alone."""

    scorers: tuple[ScorerSettings, ...] = (
        ScorerSettings(type="time", weight=1.0),
        ScorerSettings(type="least-running", weight=1.0),
        ScorerSettings(type="kv-room", weight=0.25),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    """All of the file."""

    limits: LimitSettings = LimitSettings()
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    breaker: BreakerSettings = field(default_factory=BreakerSettings)


def parse_routing(text: str) -> RoutingSettings:
    """Parses a routing file. What it leaves out is as by default; a list that it holds replaces the default one.

    Raises ValueError, which names the setting, what is wrong with it, and what there is.
    """
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise ValueError(f"this is not TOML: {error}") from error
    _refuse_unknown(document, RoutingSettings, "")
    try:
        settings = msgspec.convert(document, RoutingSettings)
    except msgspec.ValidationError as error:
        raise ValueError(_readable(str(error))) from error
    _check_plugins("prefill", settings.prefill)
    _check_plugins("decode", settings.decode)
    return settings


def profiles(settings: RoutingSettings, live: Live) -> Mapping[Leg, Profile]:
    """Returns the profile of each leg."""
    of_legs = {
        Leg.PREFILL: settings.prefill,
        Leg.READ: settings.prefill,
        Leg.DECODE: settings.decode,
        Leg.ALONE: settings.decode,
    }
    return {leg: _profile(chosen, live) for leg, chosen in of_legs.items()}


def _profile(settings: ProfileSettings, live: Live) -> Profile:
    return Profile(
        [FILTERS[name](live, settings.max_waiting) for name in settings.filters],
        [(SCORERS[scorer.type](live), scorer.weight) for scorer in settings.scorers],
        PICKERS[settings.picker.type](live),
        required=[new() for new in REQUIRED],
        shortlist=live.shortlist,
    )


# What is wrong with a file


def _refuse_unknown(value: object, cls: Any, place: str) -> None:
    """Looks for keys that nothing reads, all the way down. What has the wrong type is left to `msgspec.convert`."""
    if is_dataclass(cls) and isinstance(value, Mapping):
        types = get_type_hints(cls)
        for key, inner in value.items():
            if key not in types:
                raise ValueError(f"{place}{key}: there is no such setting; there are {_listed(types)}")
            _refuse_unknown(inner, types[key], f"{place}{key}.")
    elif get_args(cls) and isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_unknown(inner, get_args(cls)[0], f"{place.removesuffix('.')}[{index}].")


def _check_plugins(table: str, settings: ProfileSettings) -> None:
    _check_names(f"{table}.filters", settings.filters, FILTERS)
    _check_names(f"{table}.scorers", [scorer.type for scorer in settings.scorers], SCORERS)
    _check_names(f"{table}.picker", [settings.picker.type], PICKERS)
    if settings.max_waiting != DEFAULT_MAX_WAITING and MaxWaitingFilter.name not in settings.filters:
        raise ValueError(f"{table}.max_waiting: nothing reads it unless {table}.filters has {MaxWaitingFilter.name!r}")


def _check_names(place: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name in {required.name for required in REQUIRED}:
            raise ValueError(
                f"{place}: {name!r} always runs and is not listed; to be listed there are {_listed(known)}"
            )
        if name not in known:
            raise ValueError(f"{place}: there is no {name!r}; there are {_listed(known)}")
        if names.count(name) > 1:
            raise ValueError(f"{place}: {name!r} is listed twice")


def _readable(problem: str) -> str:
    """Puts the setting first: msgspec writes "Expected `int` - at `$.limits.alone_tokens`"."""
    what, _, where = problem.partition(" - at `$.")
    return f"{where.removesuffix('`')}: {what[0].lower()}{what[1:]}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)
