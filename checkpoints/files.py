"""Reading small JSON files with errors a user can act on, and the identity of files on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jspec.errors import JspecError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. JspecError when it is missing, unreadable or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise JspecError(f"{path}: no such file") from error
    except OSError as error:
        raise JspecError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise JspecError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(data, dict):
        raise JspecError(f"{path}: not a JSON object; fetch the file again")
    return data


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """As `read_json`, but a file that does not exist is an empty object."""
    return read_json(path) if path.exists() else {}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """`path` holds `data`, indented."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def identity(paths: Iterable[Path]) -> str:
    """A short hash that changes when a file moves, is replaced or is edited.

    Of names, sizes and times, not of contents: those may be many gigabytes.
    """
    digest = hashlib.sha256()
    for path in sorted(paths):
        stat = path.stat()
        digest.update(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
