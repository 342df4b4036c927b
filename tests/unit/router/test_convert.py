"""What a router takes over of what registries say."""

from typing import Any

import pytest

from backhaul_router.convert import node_from
from tests.fakes import samples


def test_a_sound_record_is_a_node_at_the_host_and_port_of_its_engine() -> None:
    node = node_from(samples.node(engine_url="http://[fe80::1]:8200/"))
    assert node is not None
    assert node.endpoint == "[fe80::1]:8200"


@pytest.mark.parametrize(
    "fields",
    [
        {"role": 0},
        {"state": 0},
        {"node_id": ""},
        {"agent_address": ""},
        {"engine_url": ""},
        {"engine_url": "http://[::1"},
        {"engine_url": "http://10.0.0.2:82000"},
        {"engine_url": "http://10.0.0.2:http"},
        {"engine_url": "10.0.0.2:8200"},
    ],
    ids=str,
)
def test_a_record_that_cannot_be_used_is_left_out(fields: dict[str, Any]) -> None:
    assert node_from(samples.node(**fields)) is None
