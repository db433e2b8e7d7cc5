"""Control of a running deployment: a rank's side of a change of mode, and the service that asks every rank."""
