"""Arguments of run."""

from __future__ import annotations

from typing import Any

import pytest
from asyncllm_ray import deployment, run
from ray import serve

from asyncllm import InvalidRequestError


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"application": None}, "application"),
        ({"application": deployment}, "application"),
        ({"name": None}, "name"),
        ({"name": "a/b"}, "name"),
        ({"route_prefix": 5}, "route_prefix"),
        ({"route_prefix": "mia"}, "route_prefix"),
        ({"http_options": 5}, "http_options"),
        ({"http_options": {"prot": 8000}}, "http_options"),
        ({"http_options": {5: 8000}}, "http_options"),
        ({"http_options": {"port": "first"}}, "port"),
        ({"http_options": {"port": -1}}, "port"),
        ({"http_options": {"port": 65536}}, "port"),
        ({"http_options": {"host": 5}}, "http_options"),
        ({"timeout": None}, "timeout"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_arguments_are_refused_before_serve_starts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], param: str
) -> None:
    def start(**_: Any) -> None:
        raise AssertionError("Serve was started")

    monkeypatch.setattr(serve, "start", start)
    arguments: dict[str, Any] = {"application": deployment(num_threads=1), **given}
    with pytest.raises(InvalidRequestError) as caught:
        run(**arguments)
    assert caught.value.param == param


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(TypeError, match="num_replicas"):
        run(deployment(), num_replicas=2)  # pyright: ignore[reportCallIssue]
