"""What the kernel counts of this host's RDMA ports: /sys/class/infiniband, absent on hosts without such a NIC."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypedDict

SYSFS = Path("/sys/class/infiniband")
# A few that mean loss or congestion, so that no label grows: from the drivers' hw_counters and the IB port counters.
ERRORS = {
    "hw_counters": ("out_of_sequence", "packet_seq_err", "rnr_nak_retry_err", "local_ack_timeout_err", "np_cnp_sent"),
    "counters": ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards"),
}


class Port(TypedDict):
    """One port. ``rate_gbps``: of the link, 0 while it is down."""

    device: str
    port: int
    rate_gbps: float
    errors: dict[str, int]


def ports(sysfs: Path = SYSFS) -> list[Port]:
    """Every port of every device, in order of their names."""
    folders = sorted(sysfs.glob("*/ports/*"), key=lambda folder: (folder.parts[-3], int(folder.name)))
    return [_port(folder) for folder in folders]


def _port(folder: Path) -> Port:
    up = "ACTIVE" in (_text(folder / "state") or "")
    rate = re.match(r"[\d.]+", _text(folder / "rate") or "")  # "400 Gb/sec (4X NDR)"
    errors = {}
    for kind, names in ERRORS.items():
        for name in names:
            if (count := _text(folder / kind / name)) is not None and count.isdigit():
                errors[name] = int(count)
    return Port(device=folder.parts[-3], port=int(folder.name), rate_gbps=float(rate[0]) if rate and up else 0.0, errors=errors)


def _text(file: Path) -> str | None:
    """None where the driver has no such counter, or does not let it be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return None
