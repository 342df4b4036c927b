import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from backhaul_common import errors
from backhaul_common.status import CODES, to_status


def test_an_error_says_why_in_words_and_in_a_reason() -> None:
    error = errors.UnavailableError("ETCD_UNAVAILABLE", "etcd does not answer", endpoint="h:1")
    assert str(error) == "etcd does not answer (ETCD_UNAVAILABLE)"
    assert error.metadata == {"endpoint": "h:1"}


def test_every_class_of_the_tree_has_a_code_of_its_own() -> None:
    classes = errors.BackhaulError.__subclasses__()
    assert set(CODES) == set(classes)
    assert len(set(CODES.values())) == len(classes)


def test_a_class_derived_elsewhere_has_its_parents_code() -> None:
    class QuotaError(errors.ResourceExhaustedError):
        pass

    assert to_status(QuotaError("QUOTA", "full")).code == CODES[errors.ResourceExhaustedError]


@pytest.mark.parametrize("cls", CODES, ids=lambda cls: cls.__name__)
def test_every_class_appears_in_the_drawing(cls: type[errors.BackhaulError]) -> None:
    assert errors.__doc__ is not None
    assert cls.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("text", "retry_s"), [("7", 7), ("0", 0), ("Mon, 30 Nov 2026", None), ("-1", None), ("", None)]
)
def test_when_to_ask_again_is_said_in_retry_info_and_in_https_header(text: str, retry_s: int | None) -> None:
    status = to_status(errors.UnavailableError("BUSY", "busy", retry_after_s=text))
    told = dict(status.trailing_metadata or ())
    details = Status.FromString(told["grpc-status-details-bin"]).details  # type: ignore[arg-type]  # this one is bytes
    retries = [RetryInfo.FromString(one.value) for one in details if one.type_url.endswith(".RetryInfo")]

    assert [retry.retry_delay.seconds for retry in retries] == ([] if retry_s is None else [retry_s])
    assert told.get("retry-after") == (None if retry_s is None else str(retry_s))
