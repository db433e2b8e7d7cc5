"""Checks of a host before a role is started on it: what its mode needs, read without root, without torch, without a GPU."""
