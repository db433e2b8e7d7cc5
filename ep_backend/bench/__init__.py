"""`ep-backend bench`: one boundary, one script. See :mod:`ep_backend.bench.cli`."""
