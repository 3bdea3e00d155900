"""Stops a process before every system call that changes files, and kills it (SIGKILL) before the one that is asked for.

Linux only, and only what ptrace sees. A seccomp filter lets all other calls pass at full speed. Threads and processes
that the traced one starts are followed, and die with it. What a process writes through a mapping of a file is no call:
the mapping itself is seen, the stores and `msync` are not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tests.support.forks import leave

_SEIZE, _CONT, _SYSCALL_INFO = 0x4206, 7, 0x420E
_FORK, _VFORK, _CLONE, _EXEC, _SECCOMP, _EXITKILL = 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 7, 1 << 20
_EVENT_SECCOMP = 7
_WALL = 0x40000000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # of classic BPF
_AT_FDCWD, _PROT_WRITE, _MAP_SHARED = -100, 2, 1
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PATH, _AT, _FD = "path", "at", "fd"


@dataclass(frozen=True)
class Call:
    """A system call: where its arguments name files ("at": a folder's descriptor and a path), and which bits of which
    argument make it one that changes something."""

    name: str
    x86_64: int | None
    aarch64: int | None
    files: tuple[tuple[str, int], ...]
    bits: tuple[int, int] | None = None

    def number(self, machine: str) -> int | None:
        return self.x86_64 if machine == "x86_64" else self.aarch64


CALLS = (
    Call("open", 2, None, ((_PATH, 0),), (1, _WRITING)),
    Call("creat", 85, None, ((_PATH, 0),)),
    Call("openat", 257, 56, ((_AT, 0),), (2, _WRITING)),
    Call("write", 1, 64, ((_FD, 0),)),
    Call("pwrite64", 18, 68, ((_FD, 0),)),
    Call("writev", 20, 66, ((_FD, 0),)),
    Call("pwritev", 296, 70, ((_FD, 0),)),
    Call("pwritev2", 328, 287, ((_FD, 0),)),
    Call("sendfile", 40, 71, ((_FD, 0),)),
    Call("copy_file_range", 326, 285, ((_FD, 2),)),
    Call("rename", 82, None, ((_PATH, 0), (_PATH, 1))),
    Call("renameat", 264, 38, ((_AT, 0), (_AT, 2))),
    Call("renameat2", 316, 276, ((_AT, 0), (_AT, 2))),
    Call("unlink", 87, None, ((_PATH, 0),)),
    Call("unlinkat", 263, 35, ((_AT, 0),)),
    Call("mkdir", 83, None, ((_PATH, 0),)),
    Call("mkdirat", 258, 34, ((_AT, 0),)),
    Call("rmdir", 84, None, ((_PATH, 0),)),
    Call("link", 86, None, ((_PATH, 0), (_PATH, 1))),
    Call("linkat", 265, 37, ((_AT, 0), (_AT, 2))),
    Call("symlink", 88, None, ((_PATH, 1),)),
    Call("symlinkat", 266, 36, ((_AT, 1),)),
    Call("truncate", 76, 45, ((_PATH, 0),)),
    Call("ftruncate", 77, 46, ((_FD, 0),)),
    Call("fallocate", 285, 47, ((_FD, 0),)),
    Call("fsync", 74, 82, ((_FD, 0),)),
    Call("fdatasync", 75, 83, ((_FD, 0),)),
    Call("chmod", 90, None, ((_PATH, 0),)),
    Call("fchmod", 91, 52, ((_FD, 0),)),
    Call("fchmodat", 268, 53, ((_AT, 0),)),
    Call("utimensat", 280, 88, ((_AT, 0),)),
    Call("mmap", 9, 222, ((_FD, 4),), (3, _MAP_SHARED)),
)
"""`openat2` and `io_uring` are missing: neither Python nor the libraries here use them to write."""

Where = Callable[[str], bool]
"""Whether a path is of those that are watched."""


@dataclass
class Trace:
    """What was seen: the points (call and path, in order), whether it was killed, or else its exit status (negative: a
    signal), and whether it ran longer than it may."""

    points: list[tuple[str, str]] = field(default_factory=list)
    killed: bool = False
    status: int | None = None


class NoTracing(Exception):
    """This system, or this place in it, does not let a process trace its children."""


def traced(serve: Callable[[], int], watched: Where, kill_at: int | None = None) -> Trace:
    """Runs `serve` in a fork of this process; `serve` gives an exit status.

    Args:
        watched: which files count.
        kill_at: the number, from 0, of the call before which the fork and all that it started are killed; None: never.

    Raises:
        NoTracing: where it cannot be done.
    """
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in _AUDIT or sys.byteorder != "little":
        raise NoTracing(f"no tracing on {sys.platform}, {machine}")
    names = {call.number(machine): call for call in CALLS if call.number(machine) is not None}
    libc = _libc()
    ready, go = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.close(told)
        _child(serve, machine, ready, tell)
    os.close(ready)
    os.close(tell)
    try:
        options = _FORK | _VFORK | _CLONE | _EXEC | _SECCOMP | _EXITKILL
        if libc.ptrace(_SEIZE, child, 0, options):
            number = ctypes.get_errno()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise NoTracing(f"ptrace is refused ({os.strerror(number)})")
        os.write(go, b".")
        found = _follow(libc, child, names, watched, kill_at)
        if os.read(told, 1) == b"!":
            raise NoTracing("seccomp is refused")
        return found
    finally:
        os.close(go)
        os.close(told)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return libc


def _child(serve: Callable[[], int], machine: str, ready: int, tell: int) -> NoReturn:
    """Never returns."""

    def filtered() -> int:
        os.read(ready, 1)
        if not _filter(machine):
            os.write(tell, b"!")
            os._exit(71)
        os.close(ready)
        os.close(tell)
        return serve()

    leave(filtered)


def _filter(machine: str) -> bool:
    """Lets the kernel stop at the calls of `CALLS`, in this process and all that it starts. False where it refuses."""
    program = [
        struct.pack("=HBBI", _LOAD, 0, 0, 4),  # the architecture
        struct.pack("=HBBI", _EQUAL, 1, 0, _AUDIT[machine]),
        struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW),
    ]
    for call in CALLS:
        number = call.number(machine)
        if number is None:
            continue
        program.append(struct.pack("=HBBI", _LOAD, 0, 0, 0))  # the call
        if call.bits is None:
            program.append(struct.pack("=HBBI", _EQUAL, 0, 1, number))
        else:
            argument, mask = call.bits
            program.append(struct.pack("=HBBI", _EQUAL, 0, 4, number))
            program.append(struct.pack("=HBBI", _LOAD, 0, 0, 16 + 8 * argument))
            program.append(struct.pack("=HBBI", _ANY_BIT, 1, 0, mask))
            program.append(struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW))
        program.append(struct.pack("=HBBI", _RETURN, 0, 0, _TRACE))
    program.append(struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = _libc()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return not libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(head), 0, 0)


def _follow(
    libc: ctypes.CDLL, child: int, names: dict[int | None, Call], watched: Where, kill_at: int | None
) -> Trace:
    """Waits for every stop of the child and what it starts, until all have ended."""
    found, alive = Trace(), {child}
    while alive:
        try:
            task, status = os.waitpid(-1, _WALL)
        except ChildProcessError:
            break
        if not os.WIFSTOPPED(status):
            alive.discard(task)
            if task == child:
                found.status = os.waitstatus_to_exitcode(status)
            continue
        alive.add(task)
        event, stop, deliver = status >> 16, os.WSTOPSIG(status), 0
        if event == _EVENT_SECCOMP:
            point = None if found.killed else _point(libc, task, names, watched)
            if point is not None:
                if kill_at == len(found.points):
                    found.killed = True
                    for other in alive:
                        _kill(other)
                    continue
                found.points.append(point)
        elif not event:
            deliver = stop
        if libc.ptrace(_CONT, task, 0, deliver) and ctypes.get_errno() not in (errno.ESRCH, 0):
            raise OSError(ctypes.get_errno(), "ptrace")
    return found


def _kill(task: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(task, signal.SIGKILL)


def _point(
    libc: ctypes.CDLL, task: int, names: dict[int | None, Call], watched: Where
) -> tuple[str, str] | None:
    """The call that a stopped task is about to make, and the first watched path that it names; None where it has none."""
    info = ctypes.create_string_buffer(88)
    if libc.ptrace(_SYSCALL_INFO, task, len(info), ctypes.addressof(info)) < 0:
        raise NoTracing("PTRACE_GET_SYSCALL_INFO is refused: it needs Linux 5.3")
    number, *arguments = struct.unpack_from("<7Q", info.raw, 24)
    call = names.get(number)
    if call is None or (call.name == "mmap" and not arguments[2] & _PROT_WRITE):
        return None
    for path in _paths(task, call, arguments):
        if path is not None and watched(path):
            return call.name, path
    return None


def _paths(task: int, call: Call, arguments: list[int]) -> list[str | None]:
    paths = []
    for how, place in call.files:
        if how == _FD:
            paths.append(_opened(task, _signed(arguments[place])))
        elif how == _PATH:
            paths.append(_named(task, _AT_FDCWD, arguments[place]))
        else:
            paths.append(_named(task, _signed(arguments[place]), arguments[place + 1]))
    return paths


def _signed(value: int) -> int:
    return ctypes.c_int32(value & 0xFFFFFFFF).value


def _opened(task: int, descriptor: int) -> str | None:
    """The file of a descriptor."""
    if descriptor < 0:
        return None
    try:
        return str(Path(f"/proc/{task}/fd/{descriptor}").readlink()).removesuffix(" (deleted)")
    except OSError:
        return None


def _named(task: int, folder: int, address: int) -> str | None:
    """The path at an address of the task's memory; without one, the folder's own."""
    try:
        name = _text(task, address) if address else ""
        if name.startswith("/"):
            return os.path.normpath(name)
        base = Path(f"/proc/{task}/cwd" if folder == _AT_FDCWD else f"/proc/{task}/fd/{folder}").readlink()
    except OSError:
        return None
    return os.path.normpath(os.path.join(base, name))  # noqa: PTH118


def _text(task: int, address: int) -> str:
    """A string that ends with a zero byte; pages are read one by one, since the next may not be there."""
    found = b""
    with Path(f"/proc/{task}/mem").open("rb", 0) as memory:
        while b"\0" not in found and len(found) < 1 << 16:
            memory.seek(address + len(found))
            found += memory.read(4096 - (address + len(found)) % 4096)
    return os.fsdecode(found.split(b"\0")[0])
