"""Tests of patches, by the examples of the Kubernetes documentation."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.engines.patch import merge

NGINX = {"name": "nginx", "image": "nginx", "args": ["a"]}
REDIS = {"name": "redis", "image": "redis"}


@pytest.mark.parametrize(
    ("value", "patch", "result"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}}, {"a": 1, "b": {"c": 4, "d": 3}}),
        ({"a": 1, "b": 2}, {"b": None}, {"a": 1}),
        ({}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
        ({"containers": [NGINX]}, {"containers": [REDIS]}, {"containers": [NGINX, REDIS]}),
        (
            {"containers": [NGINX, REDIS]},
            {"containers": [{"name": "nginx", "args": ["b", "c"]}]},
            {"containers": [{**NGINX, "args": ["b", "c"]}, REDIS]},
        ),
        (
            {"containers": [NGINX, REDIS]},
            {"containers": [{"name": "nginx", "$patch": "delete"}]},
            {"containers": [REDIS]},
        ),
        (
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"key": "b"}]},
            {"tolerations": [{"key": "b"}]},
        ),
        (
            {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]},
            {"volumes": [{"name": "tmp", "$patch": "replace", "hostPath": {"path": "/x"}}]},
            {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
        ),
        ({"a": {"b": 1}}, {"a": {"$patch": "replace", "c": 2}}, {"a": {"c": 2}}),
        ({"a": [1]}, {"a": "text"}, {"a": "text"}),
    ],
)
def test_a_patch_is_merged_as_kubectl_does(value: Any, patch: Any, result: Any) -> None:
    before = repr(value)
    assert merge(value, patch) == result
    assert repr(value) == before
