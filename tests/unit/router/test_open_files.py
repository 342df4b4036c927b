"""The limit on open files is raised as far as needed and allowed."""

import resource

import pytest

from backhaul_router.open_files import allow_open_files


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Soft and hard limit of a process that is not this one."""
    limits = [1024, 4096]

    def set_limits(_: int, new: tuple[int, int]) -> None:
        limits[:] = new

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    return limits


@pytest.mark.parametrize(("needed", "soft"), [(1000, 1024), (2000, 2000), (4096, 4096), (5000, 4096)])
def test_it_is_raised_as_far_as_needed_and_allowed(limits: list[int], needed: int, soft: int) -> None:
    assert allow_open_files(needed) == min(needed, 4096)
    assert limits == [soft, 4096]


def test_without_limits_nothing_is_changed(limits: list[int]) -> None:
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert allow_open_files(10_000) == 10_000
    assert limits == [resource.RLIM_INFINITY] * 2
