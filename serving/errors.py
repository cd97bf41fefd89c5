"""Errors that travel between the roles and the HTTP surface."""

from __future__ import annotations


class RoleUnavailable(Exception):
    """A replica died or none answers; nothing was sent to the client on its behalf."""


class NoReplica(RoleUnavailable):
    """No replica of a role has answered for a while: another try at once finds none either."""
