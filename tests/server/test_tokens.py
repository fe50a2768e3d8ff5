"""Tokens of texts and chats, and whose they are."""

import json
from collections.abc import Callable

import httpx
import pytest
from servers import Served, http

CHAT = [{"role": "user", "content": "Grüße"}]


def post(served: Served, path: str, **body: object) -> httpx.Response:
    return http.post(f"{served.root}{path}", json=body)


def test_a_text_and_back(served: Served) -> None:
    text = "Grüße <|im_end|> 世界"
    tokens = post(served, "/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 4096
    assert post(served, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}


def test_a_chat_has_the_tokens_that_its_answer_is_charged_for(served: Served) -> None:
    counted = post(served, "/tokenize", messages=CHAT).json()["count"]
    answer = post(served, "/v1/chat/completions", messages=CHAT, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/detokenize", {"tokens": [1, 300]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: dict[str, object], param: str) -> None:
    reply = post(served, path, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_keys_do_not_share_a_cache(own_server: Callable[..., Served]) -> None:
    """The fake engine answers with the salt that it was given, if its script says so."""
    server = own_server(api_keys=["mine", "yours"])
    assert post(server, "/tokenize", prompt="a").status_code == 401

    def salt(key: str, cache_salt: str | None = None) -> str:
        body = {
            "messages": CHAT,
            "prompt_cache_key": json.dumps({"tell_salt": True}),
            "cache_salt": cache_salt,
        }
        reply = http.post(
            f"{server.url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )
        return str(reply.json()["choices"][0]["message"]["content"])

    salts = [salt("mine"), salt("yours"), salt("mine", "a"), salt("yours", "a")]
    assert len(set(salts)) == 4
    assert salt("mine") == salts[0]
    assert "mine" not in salts[0]
