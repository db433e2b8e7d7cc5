"""The checks: each a function of a host and a need; `checks.toml` has their texts, and their order in the report."""

from collections.abc import Callable

from ep_backend.doctor.checks import deployment, gpu, machine, network, software
from ep_backend.doctor.host import Host
from ep_backend.doctor.need import Need
from ep_backend.doctor.result import Verdict, texts

Probe = Callable[[Host, Need], Verdict]
MODULES = (deployment, software, gpu, network, machine)
CHECKS: dict[str, Probe] = {
    name: next(getattr(module, name) for module in MODULES if hasattr(module, name)) for name in texts()
}
