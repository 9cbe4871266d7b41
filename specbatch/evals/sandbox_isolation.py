"""Isolation of a generated program from the rest of the machine: namespaces, a root folder of its own, a filter of
system calls. It works on Linux only, and uses the standard library only, since the sandbox's process imports it by its
path.

As root, the program becomes the user `nobody` before it runs. Without root, a user namespace gives the rights to build
the rest.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from dataclasses import dataclass

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = _NEWNET | _NEWPID | _NEWIPC | _NEWNS
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 1 << 14, 1 << 18, 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR = 442  # on every machine
_RDONLY, _NOSUID = 1, 2  # flags of mount_setattr(2)
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_CAPABILITIES_3 = 0x20080522  # version of the structures of capset(2)
NOBODY = 65534
_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")  # some are links
_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class _Machine:
    """Numbers of one kind of processor."""

    audit_arch: int
    pivot_root: int
    # socket connect bind ptrace mknodat pivot_root mount umount2 unshare setns keyctl add_key request_key bpf
    # userfaultfd perf_event_open process_vm_readv process_vm_writev kexec_load io_uring_setup mount_setattr
    # (and mknod, where there is one)
    refused: tuple[int, ...]


_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        155,
        (41, 42, 49, 101, 259, 155, 165, 166, 272, 308, 250, 248, 249, 321, 323, 298, 310, 311, 246, 425, 442, 133),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        41,
        (198, 203, 200, 117, 33, 41, 40, 39, 97, 268, 219, 217, 218, 280, 282, 241, 270, 271, 104, 425, 442),
    ),
}


def isolate(writable_mib: int) -> dict[str, str]:
    """Cut this process and those that it forks off, as far as the kernel allows; returns what was reached. The working
    folder becomes one of its own, of `writable_mib`, or stays as it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    done = {"network": "sockets of Python disabled", "processes": "shared", "files": "writable"}
    try:
        if user == 0 and libc.unshare(_NAMESPACES) == 0:
            done |= {"network": "namespace", "processes": "namespace"}
        elif libc.unshare(_NEWUSER | _NAMESPACES) == 0:
            done |= {"network": "namespace", "processes": "namespace"}
            _map_user(user, group)
        else:
            if libc.unshare(_NEWUSER | _NEWNET) == 0:
                done["network"] = "namespace"
                _map_user(user, group)
            return done
        _enter_own_root(libc, os.getcwd(), writable_mib)
        done["files"] = "own root"
    except (OSError, AttributeError, KeyError):  # an old kernel, another libc or an unknown processor
        pass
    return done


def give_up_rights(become_nobody: bool) -> None:
    """Give up the rights of root and of the user namespace, and system calls that no generated program needs."""
    libc = ctypes.CDLL(None, use_errno=True)
    if become_nobody:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)  # version, this process
        libc.capset(header, (ctypes.c_uint32 * 6)())  # two of: effective, permitted, inheritable
        _filter_system_calls(libc)
    except AttributeError:  # another libc
        pass


def is_public(path: str) -> bool:
    """Return whether every user can read this file."""
    parents = os.path.realpath(path).split("/")
    folders = ("/".join(parents[:count]) or "/" for count in range(1, len(parents)))
    return all(os.stat(folder).st_mode & 0o001 for folder in folders) and bool(os.stat(path).st_mode & 0o004)


def _map_user(user: int, group: int) -> None:
    """Map the user and the group into the namespace, because a process without a name there can make no files."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _enter_own_root(libc: ctypes.CDLL, folder: str, writable_mib: int) -> None:
    """Make `folder` the root, with Python, the system's libraries and a few devices in it, all read-only, and go to
    an empty one that can be written. Raises OSError, and KeyError for an unknown processor."""
    machine = _MACHINES[platform.machine()]
    # Before all else: what is mounted here must not appear elsewhere.
    _mount(libc, None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount(libc, "tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    python = (os.path.realpath(path) for path in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix))
    shown = dict.fromkeys((*_FOLDERS, sys.prefix, *python))
    for path in shown:
        if os.path.islink(path) and path in _FOLDERS:
            os.symlink(os.readlink(path), folder + path)
        elif os.path.isdir(path) and path != "/" and not any(path.startswith(other + "/") for other in shown):
            os.makedirs(folder + path, exist_ok=True)
            _mount(libc, path, folder + path, None, _MS_BIND | _MS_REC)
    for path in (*_FILES, *_DEVICES):
        if os.path.exists(path):
            os.makedirs(os.path.dirname(folder + path), exist_ok=True)
            os.close(os.open(folder + path, os.O_CREAT | os.O_WRONLY, 0o644))
            _mount(libc, os.path.realpath(path), folder + path, None, _MS_BIND)
    # Python itself may lie below /tmp, and must stay in sight.
    work = "/sandbox" if any(path.startswith("/tmp/") for path in shown) else "/tmp"
    for name in (work, "/old"):
        os.makedirs(folder + name, exist_ok=True)
    # struct mount_attr: set, clear, propagation, userns_fd
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID, 0, _MS_PRIVATE, 0)
    size, root = ctypes.c_size_t(ctypes.sizeof(attributes)), ctypes.c_char_p(os.fsencode(folder))
    _check(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, root, _AT_RECURSIVE, attributes, size))
    _mount(libc, "tmpfs", folder + work, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={writable_mib}m,mode=1777")
    os.chdir(folder)
    _check(libc.syscall(machine.pivot_root, b".", b"old"))
    _check(libc.umount2(b"/old", _MNT_DETACH))
    os.chdir(work)
    os.environ["HOME"] = os.environ["TMPDIR"] = work


def _mount(
    libc: ctypes.CDLL, source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _check(libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _filter_system_calls(libc: ctypes.CDLL) -> None:
    """A seccomp filter (seccomp(2)) for this process and its children."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    count = len(machine.refused)
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, machine.audit_arch),
        (answer, 0, 0, kill),
        (load, 0, 0, 0),  # the number of the system call
        (at_least, count + 1, 0, 0x40000000),  # numbers of x32, which would pass by the list
        *((equal, count - i, 0, number) for i, number in enumerate(machine.refused)),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    # struct sock_fprog: length, pointer
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0)
