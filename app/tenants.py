"""Whose prompts may share what: the salt under which the engine looks for prefixes that it has read before.

A hit shows in the time to the first token, so who shares prefixes can find out what others have sent. Different API
keys therefore never share; neither do requests of one key that ask for different salts (vLLM's cache_salt).
"""

import hashlib
import json


def cache_salt(authorization: str | None, requested_salt: str | None) -> str:
    """The engine's salt for a request: a SHA-256 in hexadecimal, from which nobody reads the key; "" without both."""
    token = _token(authorization or "")
    if not token and requested_salt is None:
        return ""
    # As JSON, since "ab" + "c" and "a" + "bc" must not be the same tenant.
    return hashlib.sha256(json.dumps([token, requested_salt]).encode()).hexdigest()


def _token(authorization: str) -> str:
    """The bearer token (RFC 6750, section 2.1). Other credentials are a tenant's too, so they stand for themselves."""
    scheme, _, credentials = authorization.strip().partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else authorization.strip()
