"""A filter of system calls for programs that a model wrote: what is not listed here fails.

Such a program may compute, use memory and threads, and read and write open files. It can start no process and no other
program, open no socket, send signals to no other process, and look into none. Installed by the program's own process
right before the program starts (seccomp(2)); the kernel never takes a filter off again.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Mapping

# Numbers of system calls on x86_64 and aarch64; None where an architecture does not have the call.
# fmt: off
_COMPUTING: Mapping[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62), "fstat": (5, 80),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd2": (290, 19), "ftruncate": (77, 46), "fsync": (74, 82),
    "fdatasync": (75, 83), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "shutdown": (48, 210), "getsockopt": (55, 209), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226),
    "mremap": (25, 216), "brk": (12, 214), "madvise": (28, 233), "futex": (202, 98), "set_robust_list": (273, 99),
    "rseq": (334, 293), "membarrier": (324, 283), "set_tid_address": (218, 96), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "arch_prctl": (158, None), "exit": (60, 93), "exit_group": (231, 94),
    "restart_syscall": (219, 128), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None), "setitimer": (38, 103),
    "getitimer": (36, 102), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrusage": (98, 165), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156), "getresuid": (118, 148),
    "getresgid": (120, 150), "getrandom": (318, 278), "uname": (63, 160), "sysinfo": (99, 179), "umask": (95, 166),
    "wait4": (61, 260), "waitid": (247, 95), "getpriority": (140, 141), "get_mempolicy": (239, 236),
    "getcpu": (309, 168),
}
_FILES: Mapping[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "statfs": (137, 43), "fstatfs": (138, 44),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "symlink": (88, None),
    "symlinkat": (266, 36), "truncate": (76, 45), "fallocate": (285, 47), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "utimensat": (280, 88), "flock": (73, 32),
}
# Allowed for some values of an argument only.
_CHECKED: Mapping[str, tuple[int | None, int | None]] = {
    "clone": (56, 220), "fcntl": (72, 25), "ioctl": (16, 29), "kill": (62, 129),
    "tgkill": (234, 131), "prctl": (157, 167), "prlimit64": (302, 261), "socketpair": (53, 199),
}
# fmt: on
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16

_CLONE_THREAD = 0x00010000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks, F_DUPFD_CLOEXEC. Not F_SETOWN, which sends signals to others.
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
_IOCTL_REQUESTS = (0x5401, 0x5421, 0x541B, 0x5450, 0x5451)  # TCGETS, FIONBIO, FIONREAD, FIONCLEX, FIOCLEX
_PRCTL_OPTIONS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_AF_UNIX = 1
# C libraries try newer calls first and take "not implemented", not "not permitted", as the sign to use the older one.
_FIRST_NEW_CALL = 424

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2

_THIS_PROCESS = 0xFFFFFFF0  # Stands for a process's id, of which none is so large.

Instruction = tuple[int, int, int, int]

_libc = ctypes.CDLL(None, use_errno=True)


def is_supported() -> bool:
    """Whether this machine's architecture is one that the filter knows."""
    return platform.machine() in _ARCHITECTURES and struct.pack("=H", 1) == struct.pack("<H", 1)


def filter_program(may_open_files: bool) -> bytes:
    """The filter as the kernel takes it, for `install`, which fills in the id of its process."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    numbers = {name: row[column] for name, row in {**_COMPUTING, **_FILES, **_CHECKED}.items()}
    allowed = [*_COMPUTING, *(_FILES if may_open_files else ())]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    for name in allowed:
        number = numbers[name]
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    own = (_THIS_PROCESS,)
    code += _if_argument(numbers["clone"], 0, (_CLONE_THREAD,), _ANY_BIT)
    code += _if_argument(numbers["fcntl"], 1, _FCNTL_COMMANDS)
    code += _if_argument(numbers["ioctl"], 1, _IOCTL_REQUESTS)
    code += _if_argument(numbers["prctl"], 0, _PRCTL_OPTIONS)
    code += _if_argument(numbers["kill"], 0, own)
    code += _if_argument(numbers["tgkill"], 0, own)
    code += _if_argument(numbers["prlimit64"], 0, (0, *own))
    code += _if_argument(numbers["socketpair"], 0, (_AF_UNIX,))
    code += [
        (_AT_LEAST, 0, 1, _FIRST_NEW_CALL),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _if_argument(number: int | None, index: int, values: Iterable[int], test: int = _EQUAL) -> list[Instruction]:
    """Allows the call if the argument's lower half is one of the values, or has one of their bits."""
    assert number is not None
    code: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * index)]
    for value in values:
        code += [(test, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, _ERROR | errno.EPERM))
    return [(_EQUAL, 0, len(code), number), *code]


def install(program: bytes) -> None:
    """Put the filter on this process, which must have one thread. Raises OSError where the kernel refuses."""
    program = program.replace(struct.pack("=I", _THIS_PROCESS), struct.pack("=I", os.getpid()))
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0)):
        if _libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
