"""Files that change under a running service."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from structlog.testing import capture_logs

from backhaul_common.clock import time_of_day
from backhaul_common.errors import InvalidArgumentError
from backhaul_common.tls import Identity, TlsFiles
from backhaul_common.tls.identity import observe_remaining
from backhaul_local.certificates import Authority
from tests.fakes.certificates import OVER, take

NOT_TAKEN = "new TLS files not taken, the old stay in force"


class Service:
    """One whose certificate is replaced, and whose time the test moves."""

    def __init__(self, folder: Path, life: timedelta = timedelta(days=90)) -> None:
        self.authority = Authority(folder)
        self.pair = self.authority.issue("router", life=life)
        self.later = timedelta()
        files = TlsFiles(cert=str(self.pair.cert), key=str(self.pair.key), ca=str(self.authority.path))
        self.identity = Identity("services", files, now=lambda: time_of_day() + self.later)

    def look(self) -> list[str]:
        """Returns what is logged."""
        with capture_logs() as logs:
            self.identity.look()
        return [log["event"] for log in logs]

    @property
    def shown(self) -> bytes:
        return self.identity.material.cert


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_what_does_not_change_stays_the_same_object(service: Service) -> None:
    material = service.identity.material
    assert service.look() == []
    assert service.identity.material is material


def test_a_new_certificate_is_taken(service: Service) -> None:
    take(service.authority.issue("next"), service.pair)
    assert service.look() == ["TLS files taken"]
    assert service.shown == service.pair.cert.read_bytes()
    assert service.look() == []


def test_a_file_that_is_written_anew_with_the_same_content_is_no_news(service: Service) -> None:
    material = service.identity.material
    service.pair.cert.write_bytes(service.pair.cert.read_bytes())
    assert service.look() == []
    assert service.identity.material is material


def test_a_certificate_without_its_key_is_taken_when_the_key_is_there(service: Service) -> None:
    before, following = service.shown, service.authority.issue("next")
    following.cert.replace(service.pair.cert)
    assert service.look() == [NOT_TAKEN]
    assert service.look() == []
    assert service.shown == before
    following.key.replace(service.pair.key)
    assert service.look() == ["TLS files taken"]
    assert service.shown != before


Harm = Callable[[Service], object]


@pytest.mark.parametrize(
    "harm",
    [
        lambda service: service.pair.key.unlink(),
        lambda service: service.pair.cert.write_bytes(b""),
        lambda service: take(service.authority.issue("old", life=OVER), service.pair),
    ],
    ids=["a key that is gone", "an empty certificate", "an expired certificate"],
)
def test_what_cannot_be_used_leaves_the_old_in_force(service: Service, harm: Harm) -> None:
    before = service.shown
    harm(service)
    assert service.look() == [NOT_TAKEN]
    assert service.shown == before


def test_what_may_be_used_later_is_taken_then(service: Service) -> None:
    before = service.shown
    service.later = -timedelta(days=1)
    take(service.authority.issue("tomorrow"), service.pair)
    assert (service.look(), service.look()) == ([NOT_TAKEN], [])
    service.later = timedelta()
    assert service.look() == ["TLS files taken"]
    assert service.shown != before


def test_a_service_does_not_start_with_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="TLS_FILES"):
        Service(tmp_path, life=OVER)


def test_an_end_that_is_near_is_told_once_a_day_until_there_is_another_certificate(service: Service) -> None:
    soon, over = "certificate or CA ends soon", "certificate or CA has expired: peers refuse it"
    service.later = timedelta(days=75)
    assert service.look() == []
    service.later = timedelta(days=77)
    assert (service.look(), service.look()) == ([soon], [])
    service.later = timedelta(days=78)
    assert (service.look(), service.look()) == ([soon], [])
    service.later = timedelta(days=90, hours=1)
    assert (service.look(), service.look()) == ([over], [])
    take(service.authority.issue("next", life=timedelta(days=180)), service.pair)
    assert service.look() == ["TLS files taken"]
    assert service.look() == []


def test_the_remaining_time_is_measured(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    observe_remaining([service.identity, Identity("engines", TlsFiles())])
    service.later = timedelta(days=80)
    data = reader.get_metrics_data()
    assert data is not None
    [metric] = data.resource_metrics[0].scope_metrics[0].metrics
    [point] = metric.data.data_points
    assert isinstance(point, NumberDataPoint)
    assert (metric.name, metric.unit, point.attributes) == ("backhaul.tls.remaining", "s", {"name": "services"})
    assert point.value == pytest.approx(timedelta(days=10).total_seconds(), abs=60)
    provider.shutdown()


def test_whoever_shows_nothing_and_trusts_the_system_has_nothing_that_ends() -> None:
    assert Identity("engines", TlsFiles()).left() is None
