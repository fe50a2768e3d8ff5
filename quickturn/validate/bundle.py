"""A validation as one file to send: report, settings and environment as JSON, and the log."""

import io
import json
import shutil
import subprocess
import tarfile
import time
from importlib.util import find_spec
from pathlib import Path

from quickturn.validate.report import Report, from_json

REPORT = "report.json"
LOG = "log.txt"

MISSING = "a bundle is compressed with zstd: pip install zstandard, or install the zstd program"


def check_writable(path: Path) -> None:
    """Raises ValueError, saying what to change, if a bundle can't be written there: better before a long run
    than after it.
    """
    if not path.name.endswith(".tar.zst"):
        raise ValueError(f"a bundle's name ends in .tar.zst, got {path.name}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no directory {path.parent}")
    if find_spec("zstandard") is None and shutil.which("zstd") is None:
        raise ValueError(MISSING)


def write(path: Path, report: Report, log: str) -> None:
    """Write the bundle; a file that was there is replaced whole or not at all."""
    content = {
        REPORT: json.dumps(report.to_json(), indent=1) + "\n",
        "settings.json": json.dumps(dict(report.settings), indent=1) + "\n",
        "environment.json": json.dumps(dict(report.environment), indent=1) + "\n",
        LOG: log,
    }
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, text in content.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"validation/{name}")
            entry.size, entry.mtime = len(data), int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(_compress(plain.getvalue()))
    beside.replace(path)


def read(path: Path) -> Report:
    """The report in a bundle. Raises ValueError for a file that is none, OSError for one that isn't there."""
    packed = path.read_bytes()
    try:
        with tarfile.open(fileobj=io.BytesIO(_decompress(packed))) as archive:
            member = archive.extractfile(f"validation/{REPORT}")
            assert member is not None
            return from_json(json.load(member))
    except (tarfile.TarError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a validation bundle: {error}") from error


def _compress(data: bytes) -> bytes:
    if find_spec("zstandard") is not None:
        import zstandard

        return zstandard.ZstdCompressor(level=10).compress(data)
    return _run(["zstd", "-q", "-10", "-c"], data)


def _decompress(data: bytes) -> bytes:
    if find_spec("zstandard") is not None:
        import zstandard

        try:
            # Of any size: what the other program wrote doesn't state it.
            return zstandard.ZstdDecompressor().decompressobj().decompress(data)
        except zstandard.ZstdError as error:
            raise ValueError(f"not a zstd file: {error}") from error
    return _run(["zstd", "-q", "-d", "-c"], data)


def _run(command: list[str], data: bytes) -> bytes:
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(MISSING)
    run = subprocess.run([program, *command[1:]], input=data, capture_output=True, check=False)
    if run.returncode != 0:
        raise ValueError(f"zstd failed: {run.stderr.decode(errors='replace').strip()}")
    return run.stdout
