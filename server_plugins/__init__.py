"""Engine adapters, one sub-package an engine; each imports only its engine."""
