import pytest

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
