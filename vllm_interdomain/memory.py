"""What the C library does with memory that is given back to it."""

import ctypes

# Names in glibc's malloc.h, and bytes: the largest block that its heap gives, of which no version takes more, and how
# much may be free at the heap's end.
_MMAP_THRESHOLD, LARGEST_BLOCK = -3, 1 << 25
_TRIM_THRESHOLD, KEPT = -1, 1 << 30


def keep_freed_memory() -> None:
    """Let this process keep up to 1 GiB that it has freed, to use it again.

    As it is set at first, glibc hands large blocks back to the system, which clears a new page at each first touch: a
    fifth of the time of a prompt on a CPU. Without glibc, or with another allocator preloaded (vLLM brings one to some
    platforms), nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK)
        mallopt(_TRIM_THRESHOLD, KEPT)
