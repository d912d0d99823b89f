"""Memory that is left on the host, for whatever is planned to lie there."""

from pathlib import Path


def host_room() -> int | None:
    """Return the bytes that this process may still allocate on the host, by system and control group."""
    # None if unknown.
    rooms = [room for room in (_system_room(), _cgroup_room()) if room is not None]
    return min(rooms) if rooms else None


def _cgroup_room() -> int | None:
    """Return how much this process's control group may still take, in bytes; None without a limit."""
    root = Path("/sys/fs/cgroup")
    pairs = (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    for limit_name, used_name in pairs:
        try:
            limit, used = (root / limit_name).read_text().strip(), (root / used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            return max(0, int(limit) - int(used))
    return None


def _system_room() -> int | None:
    """Return the memory that new work may take without swapping, in bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
