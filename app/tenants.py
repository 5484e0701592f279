"""Decides which requests may share cached prefixes: the engine finds a prefix only under the salt it was stored with.

A cache hit shortens the time to the first token, so a client that shares a cache could guess the prompts of others.
Different API keys therefore never share prefixes. One key's requests with different cache_salt fields (as in vLLM) do
not share them either.
"""

import hashlib
import json


def cache_salt(authorization: str | None, requested_salt: str | None) -> str:
    """Return the engine's salt for a request: a SHA-256 in hexadecimal, which hides the key.

    Returns "" for a request with neither credentials nor a salt of its own.
    """
    token = _token(authorization or "")
    if not token and requested_salt is None:
        return ""
    # JSON keeps the two values apart: ("ab", "c") and ("a", "bc") must not be the same tenant.
    return hashlib.sha256(json.dumps([token, requested_salt]).encode()).hexdigest()


def _token(authorization: str) -> str:
    """Return the bearer token (RFC 6750, section 2.1), or the whole header for any other kind of credentials."""
    scheme, _, credentials = authorization.strip().partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else authorization.strip()
