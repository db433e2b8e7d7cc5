"""What the file asks of this host."""

from ep_backend.doctor.host import Host, Unknown
from ep_backend.doctor.need import Need
from ep_backend.doctor.result import Verdict, fail, passed

LISTENING = "0A"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def port_free(host: Host, need: Need) -> Verdict:
    used = {port for table in TABLES if host.exists(table) for port in _listening(host, table)}
    wanted = {part: port for part, (_, port) in need.ports.items()}
    text = ", ".join(f"{part} {port}" for part, port in wanted.items())
    if taken := [f"{part}.port {port}" for part, port in wanted.items() if port in used]:
        port = next(port for port in wanted.values() if port in used)
        return fail(
            f"{', '.join(taken)}: something listens there", f"ss -ltnp 'sport = :{port}'   # stop it, or choose another port"
        )
    return passed(f"{text}: nothing listens there")


def file_is_sound(host: Host, need: Need) -> Verdict:
    if not need.errors:
        return passed("no error that the file alone shows")
    return fail(f"{len(need.errors)} error(s): {need.errors[0]}")


def _listening(host: Host, table: str) -> list[int]:
    found = []
    for line in host.read(table).splitlines()[1:]:
        try:
            _, local, _, state = line.split()[:4]
            if state == LISTENING:
                found.append(int(local.rpartition(":")[2], 16))
        except ValueError:
            raise Unknown(f"{table} says {line.strip()[:60]!r}, which is not understood") from None
    return found
