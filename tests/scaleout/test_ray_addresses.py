"""Addresses where Ray is not. No Ray is started here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specbatch.errors import SpecbatchError

pytest.importorskip("ray", reason="Ray is not installed: pip install 'specbatch[ray]'")
from specbatch.scaleout import ray_session
from specbatch.scaleout.ray_session import RaySession


@contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """The address of what accepts connections and sends `answer`; None: nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def accept() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(connection)
            if answer is not None:
                connection.recv(1)
                connection.sendall(answer)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in accepted:
            connection.close()


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"-ERR"])
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_server_that_is_not_ray_is_an_error_soon(
    scheme: str, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "_CONNECT_SECONDS", 0.3)
    began = time.monotonic()
    with server(answer) as place, pytest.raises(SpecbatchError, match="is not Ray") as caught:
        RaySession(scheme + place, 1)
    assert "6379" in str(caught.value.hint)
    assert time.monotonic() - began < 2


def test_a_server_that_speaks_as_ray_passes() -> None:
    with server(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as place:
        assert ray_session.answers_as_ray(place, 5.0)
