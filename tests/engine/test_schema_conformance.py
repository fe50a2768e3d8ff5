"""Two hundred schemas, the small real model, temperature 1: every answer is valid, or was refused before."""

import json
import os
import time
from typing import Any

import pytest
from schemas import REFUSED, drawn_schemas

from quickturn.engine.llm import LLM
from quickturn.engine.messages import AddRequest
from quickturn.sampling_params import Constraint, SamplingParams
from quickturn.text.structured.formats import json_schema, source
from quickturn.text.structured.schema import BadSchema
from quickturn.text.tokenizer import pack_tokens

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

COUNT = int(os.environ.get("QUICKTURN_SCHEMAS", "200"))
MAX_TOKENS = 300


def test_every_answer_is_valid_or_refused() -> None:
    seed = int(os.environ.get("QUICKTURN_SEED", time.time_ns() % (1 << 30)))
    print(f"seed {seed}")
    schemas: dict[int, dict[str, Any]] = {}
    refused = 0
    with LLM("embedded", dtype="bfloat16", memory=640 << 20, max_requests=96) as llm:
        for id, schema in enumerate([*drawn_schemas(seed, COUNT), *(schema for schema, _ in REFUSED)]):
            try:
                constraint = Constraint(source(json_schema(schema)), closes=True)
            except BadSchema:
                refused += 1
                continue
            schemas[id] = schema
            prompt = pack_tokens(llm.tokenizer.encode(f"JSON for {json.dumps(schema)[:300]}:\n"))
            sampling = SamplingParams(
                max_tokens=MAX_TOKENS, temperature=1.0, seed=seed + id, constraint=constraint
            )
            llm._core.add(AddRequest(id, prompt, sampling, time.monotonic()))
        tokens: dict[int, list[int]] = {id: [] for id in schemas}
        finish: dict[int, str] = {}
        while len(finish) < len(schemas):
            for output in llm._core.step().outputs:
                tokens[output.id] += output.tokens
                if output.finish:
                    finish[output.id] = output.error or output.finish
        texts = {id: llm.tokenizer.decode(tokens[id]) for id in schemas}
    assert refused == len(REFUSED)
    assert set(finish.values()) <= {"stop", "length"}
    broken = []
    for id, schema in schemas.items():
        items = schema.get("items")
        if isinstance(items, list):
            schema = {"type": "array", "prefixItems": items, "items": False}
        try:
            value = json.loads(texts[id])
        except ValueError:
            assert finish[id] == "length", texts[id]
            broken.append(texts[id])
            continue
        jsonschema.Draft202012Validator(schema).validate(value)
    cut = sum(reason == "length" for reason in finish.values())
    print(f"{cut} of {len(schemas)} answers were brought to an end, {refused} schemas were refused: {broken}")
    # A way out that grows faster than it's looked at: none in 1,600 answers when this was written, of which
    # one in thirty was brought to an end.
    assert len(broken) <= 3
