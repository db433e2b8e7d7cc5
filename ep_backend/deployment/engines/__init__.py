"""Tables of the flags and environment variables of engine versions."""
