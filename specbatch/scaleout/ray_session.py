"""A connection to a Ray cluster, or a Ray of this host for one job. No other module imports Ray, and this one is
imported only for jobs with workers.

A Ray of this host listens to the loopback device only, with a token of its own. Its files are in a folder that is
deleted at the end, and no process of it outlives the job's process: see `reaper.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from specbatch.errors import SpecbatchError
from specbatch.scaleout.reaper import start_reaper
from specbatch.signals import deferred_signals

_LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 256 << 20  # bytes of shared memory, taken as they are used: rows and result lines are small
_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # between two looks at Ray's head
_PATIENCE = {True: 3.0, False: 40.0}  # seconds without its answer, by whether it is of this host: others can return
# The beginning of each connection to Ray, which is HTTP/2: a preface with empty settings, and settings as the answer.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS_AT, _SETTINGS = 3, 4  # position of the type in a frame of HTTP/2, and the type of a frame with settings
_REAP_SECONDS = 20.0
_MAX_FOLDER_CHARS = 30  # characters of the folder for temporary files: paths of sockets have at most 107 in all
# Ray replaces 127.0.0.1 by an outer address, except where it does not support clusters.
_NO_OUTER_ADDRESS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_OF_THIS_HOST = {
    _NO_OUTER_ADDRESS: "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it ends workers when other programs take the memory
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # 15 would slow the engines down on a busy host
    "RAY_max_direct_call_object_size": str(512 << 10),  # bytes; larger values take 1 ms more of each process
}


def _import_ray() -> Any:
    # Ray prints deaths as long paragraphs, even with log_to_driver=False. The pool's messages say what happened.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "(?s).")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else Ray sets CUDA_VISIBLE_DEVICES to nothing where a worker asks for no GPU, and the engine reports hidden GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except (ImportError, OSError) as error:  # OSError: a library of it
        raise SpecbatchError(f"workers need Ray: {error}", "pip install 'specbatch[ray]'") from error
    return ray


ray: Any = _import_ray()


class RaySession:
    """A connection to Ray. `address`: the cluster to join; None: Ray starts on this host, with `num_cpus`. If this
    process is already connected to Ray, that is used, and left as it is. It raises SpecbatchError."""

    # the session that has started or joined Ray: a process can have one at a time
    _own: ClassVar[RaySession | None] = None

    def __init__(self, address: str | None, num_cpus: int) -> None:
        self._folder: Path | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._is_of_host = address is None
        self._answered_at = self._looked_at = time.monotonic()
        self.is_lost = False  # `has_ended` was true
        self._is_own = not ray.is_initialized()
        if RaySession._own is not None:
            raise SpecbatchError(
                "this process has workers already: of another LLM, or of another job",
                "close that one first; or call ray.init() before both, and they share that Ray",
            )
        if not self._is_own:
            return
        RaySession._own = self
        try:
            if address is None:
                self._start(num_cpus)
            else:
                _connect(address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what this session has started."""
        if RaySession._own is self:
            RaySession._own = None
        if self._is_own:
            ray.shutdown()
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(_REAP_SECONDS)
            self._reaper = None

    def has_ended(self) -> bool:
        """Return whether Ray's head has not answered for a while. It is asked once a second."""
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_SECONDS and not self.is_lost:
            self._looked_at = now
            if answers_as_ray(_head_address(), _LOOK_SECONDS):
                self._answered_at = time.monotonic()
            self.is_lost = time.monotonic() - self._answered_at > _PATIENCE[self._is_of_host]
        return self.is_lost

    def nodes(self) -> list[Mapping[str, float]]:
        """The resources of each node, by Ray's names."""
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def crash_of(self, pid: int) -> str | None:
        """The signal that a worker's process has reported before it ended, such as SIGSEGV; None: not known."""
        if self._folder is None:
            return None
        for log in self._folder.glob(f"session_*/logs/worker-*-{pid}.err"):
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("*** SIG"):
                    return line.split()[1]
        return None

    def _start(self, num_cpus: int) -> None:
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # without a token, Ray writes one into the home folder
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        parent = tempfile.gettempdir()
        self._folder = Path(
            tempfile.mkdtemp(prefix="specbatch-", dir=parent if len(parent) <= _MAX_FOLDER_CHARS else "/tmp")
        )
        self._reaper = start_reaper(self._folder)
        with _environment(_OF_THIS_HOST), _no_outer_address():
            _init(
                "Ray did not start on this host",
                address="local",
                include_dashboard=False,
                num_cpus=num_cpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address=_LOOPBACK,
                _temp_dir=str(self._folder),
            )
        if (found := ray.util.get_node_ip_address()) != _LOOPBACK:
            raise SpecbatchError(f"Ray {ray.__version__} listens to the network at {found}", "install Ray 2.60")


def _connect(address: str) -> None:
    if address == "auto":
        with contextlib.suppress(ConnectionError, ValueError):  # Ray has found none, and says so below
            found = ray._private.services.canonicalize_bootstrap_address_or_die(address)
            _check_answers(found, f"auto ({found})")
    else:
        _check_answers(address.removeprefix("ray://"), address)
    _init(f"cannot join the Ray cluster at cluster.address {address}", address=address)


def _check_answers(place: str, address: str) -> None:
    """Ray itself tries for minutes, and ends the process then. `address`: the name of the place in messages."""
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        raise SpecbatchError(f"cluster.address must be auto, HOST:PORT or ray://HOST:PORT, not {address!r}")
    try:
        speaks_ray = _speaks((host, int(port)), _CONNECT_SECONDS)
    except (OSError, OverflowError) as error:
        raise SpecbatchError(
            f"nothing answers at cluster.address {address}: {error}",
            "is the head node of the Ray cluster up? `ray status` on it says so",
        ) from error
    if not speaks_ray:
        raise SpecbatchError(
            f"what answers at cluster.address {address} is not Ray",
            "the port is that of `ray start --head --port`, 6379 without it; that of ray:// is 10001",
        )


def _speaks(place: tuple[str, int], seconds: float) -> bool:
    """Return whether the listener answers as each server of Ray does. Raises OSError if nothing listens."""
    with socket.create_connection(place, seconds) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True
        try:
            connection.sendall(_PREFACE)
            answer = connection.recv(_SETTINGS_AT + 1, socket.MSG_WAITALL)
        except OSError:  # no answer in time, or the connection was closed
            return False
        return len(answer) > _SETTINGS_AT and answer[_SETTINGS_AT] == _SETTINGS


def answers_as_ray(address: str, seconds: float) -> bool:
    """Return whether a server of Ray answers at HOST:PORT within `seconds`."""
    host, _, port = address.rpartition(":")
    try:
        return _speaks((host, int(port)), seconds)
    except (OSError, ValueError):
        return False


def _head_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _init(failure: str, **options: Any) -> None:
    """`ray.init` without its output, and without its handler of SIGTERM."""
    try:
        with deferred_signals():  # an exception inside it can end this process by SIGSEGV
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (Exception, SystemExit) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SpecbatchError(f"{failure}: {reason}", "docs/cluster.md lists the usual causes") from error


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that start in the block. Variables that the user has set stay."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _no_outer_address() -> Iterator[None]:
    """Ignore an outer Ray address in the block, also in this process, which read the environment when Ray was
    imported."""
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
