"""The OpenAPI document is sound, and what schemathesis makes of it never comes to a 5xx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from starlette.routing import Route

from exactkv.serve.static import page_routes
from tests.serve.conftest import Running, until

QUIET = list(HealthCheck)


def test_the_document_has_every_path(running: Running) -> None:
    document = httpx.get(f"{running.url}/openapi.json").json()
    routes = {r.path.replace(":path", "") for r in running.server.config.app.routes if isinstance(r, Route)}  # type: ignore[union-attr]
    assert set(document["paths"]) == routes - {"/openapi.json"} - {route.path for route in page_routes()}
    assert "security" not in document
    text = str(document)
    assert "#/$defs" not in text and text.count("#/components/schemas/") > 20


def test_keys_are_in_the_document(start: Callable[..., Running]) -> None:
    document = httpx.get(f"{start(api_keys=('key',)).url}/openapi.json").json()
    assert document["security"] == [{"key": []}] and document["paths"]["/health"]["get"]["security"] == []


def search(running: Running, examples: int) -> dict[int, int]:
    """Ask so many things of every operation; returns how many of each status there were."""
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    statuses: dict[int, int] = {}
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    for found in schema.get_all_operations():
        operation = found.ok()
        cases = operation.as_strategy()

        @settings(max_examples=examples, deadline=None, suppress_health_check=QUIET, phases=[Phase.generate])
        @given(case=cases)
        def ask(case: Any) -> None:
            if isinstance(case.body, dict):  # or replies would be long
                for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                    if isinstance(case.body.get(name), int):
                        case.body[name] = min(case.body[name], 3)
                case.body["model"] = "tiny"
            response = case.call(timeout=60)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            case.validate_response(response, checks=checks)

        ask()
    until(running.idle)
    return statuses


def test_schemathesis_finds_no_fault_of_the_server(running: Running) -> None:
    statuses = search(running, 3)
    assert statuses.get(200, 0) > 5 and max(statuses) < 500


@pytest.mark.slow
def test_schemathesis_searches_longer(running: Running) -> None:
    statuses = search(running, 300)
    assert statuses.get(200, 0) > 500 and max(statuses) < 500
