"""Takes a process away from the machine: namespaces with a file system of their own, limits, no rights."""

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES_VERSION = 0x20080522
_SYSTEM_CALLS = {"x86_64": {"pivot_root": 155, "capset": 126}, "aarch64": {"pivot_root": 41, "capset": 91}}

_NEW_ROOT = "/sys"  # Exists everywhere, and nothing below it is needed.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# Users that no distribution gives to anybody; one for each sandbox, so that limits per user are limits per sandbox.
_FIRST_USER, _NUM_USERS = 50000, 10000

MAX_THREADS = 64
_MAX_OPEN_FILES = 64
# From this version on a user namespace counts its own processes; before, all of its user's are counted.
_COUNTS_BY_NAMESPACE = (5, 14)

_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces(paths: Sequence[str]) -> None:
    """Leave the machine's network, file system, users and processes; the next child is process 1 of the new ones.

    Of the files, `paths`, the system's libraries and an empty /tmp can be seen, the latter alone written. Raises
    OSError where the kernel does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    if _libc.unshare(flags) != 0:  # Needs CAP_SYS_ADMIN, which a new user namespace gives.
        _check(_libc.unshare(flags | _CLONE_NEWUSER), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _replace_root([*paths, *_LIBRARIES])


def _replace_root(paths: Sequence[str]) -> None:
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID, "size=1m,mode=755")
    for path in sorted(paths, key=len):
        target = _NEW_ROOT + path
        if not os.path.exists(path) or os.path.exists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path) and path in _LIBRARIES:
            os.symlink(os.readlink(path), target)
        else:
            os.mkdir(target)
            _mount(path, target, None, _MS_BIND | _MS_REC, None)
    os.mkdir(_NEW_ROOT + "/dev")
    for device in _DEVICES:
        Path(_NEW_ROOT + device).touch()
        _mount(device, _NEW_ROOT + device, None, _MS_BIND, None)
    os.mkdir(_NEW_ROOT + "/tmp")
    _make_read_only(_NEW_ROOT)
    os.chdir(_NEW_ROOT)
    # The old root is put over the new one, then taken away.
    _check(_libc.syscall(_SYSTEM_CALLS[platform.machine()]["pivot_root"], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def _make_read_only(top: str) -> None:
    """Every mount below a folder, and itself. A mount keeps its flags, as some cannot be taken off."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = {line.split()[4].encode().decode("unicode_escape") for line in lines}
    below = (point for point in points if point == top or point.startswith(top + "/"))
    for point in sorted(filter(os.path.exists, below)):  # Without those that a new mount hides.
        kept = os.statvfs(point).f_flag & (_MS_NODEV | _MS_NOEXEC)
        _mount(None, point, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | kept, None)


def mount_private_folder(max_mib: int) -> None:
    """An empty /tmp of limited size, which only this process and its children see; their working directory."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={max_mib}m,nr_inodes=1000,mode=1777")
    os.chdir("/tmp")


def give_up_rights(sandbox: int) -> None:
    """Become nobody where this process is root, for good, and keep no capability. `sandbox` chooses which nobody."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # A user namespace has root alone.
            user = _FIRST_USER + sandbox % _NUM_USERS
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    _check(_libc.syscall(_SYSTEM_CALLS[platform.machine()]["capset"], header, bytes(24)), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    # Nobody may look into this process or its children.
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def can_limit_threads(has_namespaces: bool) -> bool:
    """Whether this process, which has given up its rights, may have a limit of threads that no other program counts
    into and that holds for it: none does for root."""
    user = os.geteuid()
    if _FIRST_USER <= user < _FIRST_USER + _NUM_USERS:
        return True
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return user != 0 and has_namespaces and version >= _COUNTS_BY_NAMESPACE


def end_with_parent(parent: int) -> None:
    """Be killed when the process that started this one ends, whose id is `parent`."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(1)


def mapped_bytes() -> int:
    """The address space that this process has."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def limit_resources(memory_bytes: int, file_bytes: int, cpu_s: float, limits_threads: bool) -> None:
    """Limits of this process: address space, size of a file, processor time, threads, open files."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CPU: int(cpu_s) + 2,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if limits_threads:
        limits[resource.RLIMIT_NPROC] = MAX_THREADS
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    arguments = (text.encode() if text is not None else None for text in (source, target, kind))
    source_, target_, kind_ = arguments
    result = _libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), data.encode() if data else None)
    _check(result, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
