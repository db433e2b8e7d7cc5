"""A deployment is one YAML file: what it may say (schema), whether it can work (checks), and running it (up, down)."""
