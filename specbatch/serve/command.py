"""`specbatch serve-batches`: from the command line to a server that listens."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specbatch.config import Config
from specbatch.errors import ConfigError, SpecbatchError
from specbatch.job.terminal import print_notes
from specbatch.job.worker import Runtime

API_KEY = "SPECBATCH_API_KEY"  # the environment variable
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
_PACKAGES = ("starlette", "uvicorn", "python_multipart")


@dataclass(frozen=True)
class ServeOptions:
    """The command line. `port` 0: one that is free."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None


def serve(options: ServeOptions, config: Config, runtime: Runtime, console: Console) -> None:
    """Serve batches until a signal ends the process. It raises SpecbatchError."""
    check_packages()
    is_loopback = _is_loopback(options.host)
    if options.api_key is not None and not options.api_key.strip():
        raise ConfigError("the API key is empty", f"--api-key KEY, or {API_KEY} in the environment")
    if not is_loopback and options.api_key is None:
        raise ConfigError(
            f"--host {options.host} lets other machines in, and there is no API key",
            f"--api-key KEY, or {API_KEY} in the environment; without --host only this machine is let in",
        )
    import uvicorn

    from specbatch.serve.app import make_app
    from specbatch.serve.runner import BatchRunner
    from specbatch.serve.state import State

    with contextlib.closing(State(options.folder)) as state, _listening(options) as listener:
        runner = BatchRunner(state, config, runtime, console)
        hosts = _LOOPBACK_NAMES if is_loopback else None
        app = make_app(state, runner, options.api_key, hosts)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{listener.getsockname()[1]}/v1"
        print_notes(
            [f"{runner.model}: batches at {url} (base_url of OpenAI's client), files in {options.folder}"], console
        )
        runner.start()
        try:
            server.run(sockets=[listener])
        finally:
            runner.close()


def check_packages() -> None:
    """Raise ConfigError if a package of the server is not installed."""
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as exc:
            package = name.replace("_", "-")
            raise ConfigError(f"serve-batches needs the package {package}", "pip install 'specbatch[serve]'") from exc


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which can be that of any address
        return False


@contextlib.contextmanager
def _listening(options: ServeOptions) -> Iterator[socket.socket]:
    """Yield a socket that listens. It raises SpecbatchError."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        listener = socket.create_server(address[:2], family=family)
    except OSError as exc:
        raise SpecbatchError(
            f"cannot listen at {options.host} port {options.port}: {exc.strerror or exc}",
            "--port names another port; 0 takes a free one",
        ) from exc
    with listener:
        yield listener
