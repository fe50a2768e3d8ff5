"""A server as a process: prints one JSON line with the address when it takes requests."""

import asyncio
import json
import sys
from typing import Any

import uvloop

from quickturn.config import EngineConfig
from quickturn.server import serving
from quickturn.server.state import Limits
from quickturn.server.waiting_room import QueueLimits


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    limits = Limits(**options.get("limits", {}))
    serve = options.get("serve", {})
    config = serving.ServeConfig(
        port=0,
        core=options.get("core", "fake_core:FakeCore"),
        limits=limits,
        queue=QueueLimits(**options.get("queue", {})),
        api_keys=frozenset(options.get("api_keys", ())),
        shutdown_timeout=options.get("shutdown_timeout", 30.0),
        log_level="warning",
        **{name: tuple(value) if isinstance(value, list) else value for name, value in serve.items()},
    )
    fields = {"served_model_name": "fake", **options.get("engine", {})}
    engine = EngineConfig(options["model"], max_context=options.get("max_context"), **fields)

    def announce(ready: object, address: str) -> None:
        print(json.dumps({"url": address}), flush=True)

    run = uvloop.run if options.get("uvloop", True) else asyncio.run
    run(serving.serve(engine, config, on_ready=announce))


if __name__ == "__main__":
    main()
