"""The HTTP surface against its own OpenAPI document, with bodies that nobody would write."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from servers import PATIENCE_S, Served
from starlette.routing import Route

from quickturn.server.app import ROUTES
from quickturn.server.openapi import OPERATIONS, Operation

LIMITED = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8}
PAGES = {"/", "/openapi.json", "/dashboard/state", "/dashboard/{name}"}


@pytest.fixture(scope="module")
def surface(served: Served) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{served.root}/openapi.json")


@pytest.mark.parametrize(
    "operation", OPERATIONS, ids=lambda operation: f"{operation.method} {operation.path}"
)
def test_nothing_that_is_sent_breaks_the_server(
    surface: schemathesis.BaseSchema, operation: Operation
) -> None:
    @given(case=surface[operation.path][operation.method.upper()].as_strategy())
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,  # a search that finds something is for whoever looks for it
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    def send(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.update(
                {name: most for name, most in LIMITED.items() if case.body.get(name) is not None}
            )
        case.call_and_validate(checks=[not_a_server_error], timeout=PATIENCE_S)

    send()


def test_the_document_names_every_path() -> None:
    routed = {
        (route.path.replace("{model:path}", "{model}"), method.lower())
        for route in ROUTES
        if isinstance(route, Route) and route.path not in PAGES
        for method in (route.methods or ())
        if method != "HEAD"
    }
    assert routed == {(operation.path, operation.method) for operation in OPERATIONS}


def test_the_document_is_valid(surface: schemathesis.BaseSchema) -> None:
    surface.validate()
    assert len(list(surface.get_all_operations())) == len(OPERATIONS)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("top", [0, 3])
def test_a_prompt_is_scored_by_this_engine_too(served: Served, path: str, top: int) -> None:
    """Whatever a random body may ask for, the engine behind this surface has it."""
    asked = {"prompt": "ïÖô"} if path == "completions" else {"messages": [{"role": "user", "content": "ïÖô"}]}
    body = asked | {"max_tokens": 3, "prompt_logprobs": top}
    answer = httpx.post(f"{served.root}/v1/{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    scores = (
        found["prompt_logprobs"] if "prompt_logprobs" in found else found["choices"][0]["prompt_logprobs"]
    )
    assert len(scores) == found["usage"]["prompt_tokens"]
    assert scores[0] is None
