"""Which chip a rank's process sees: its own and no other, under the index 0."""

from __future__ import annotations

import pytest

from cluster.ray_chips import logical_chip, rank_environment
from placement.errors import ConfigError


@pytest.mark.parametrize(
    ("resource", "name"),
    [("NPU", "ASCEND_RT_VISIBLE_DEVICES"), ("GPU", "CUDA_VISIBLE_DEVICES")],
)
def test_the_chip_that_ray_gave_is_the_only_one_in_its_process(resource, name):
    assert logical_chip(resource, 3, {name: "3"}) == 0


def test_a_resource_of_ours_has_no_library_to_ask():
    assert logical_chip("nrank_chip", 3, {}) == 0


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "no ASCEND_RT_VISIBLE_DEVICES"),
        ({"ASCEND_RT_VISIBLE_DEVICES": ""}, "ASCEND_RT_VISIBLE_DEVICES=;"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}, "ASCEND_RT_VISIBLE_DEVICES=0,1,2,3;"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "2"}, "ASCEND_RT_VISIBLE_DEVICES=2;"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "13"}, "ASCEND_RT_VISIBLE_DEVICES=13;"),
    ],
)
def test_another_view_is_refused_with_the_remedy(environ, told):
    with pytest.raises(ConfigError) as raised:
        logical_chip("NPU", 3, environ)
    text = str(raised.value)
    assert text.startswith("Ray gave a rank NPU 3, ")
    assert told in text
    assert "unset RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES" in text


def test_the_switches_are_off_by_name():
    assert rank_environment() == {
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
    }
