"""Decides which x-request-id of a client is accepted. An accepted id goes into logs and back into the reply."""

MAX_LENGTH = 128  # characters


def is_request_id(value: str) -> bool:
    """Whether the value is 1 to MAX_LENGTH printable ASCII characters."""
    return 0 < len(value) <= MAX_LENGTH and value.isascii() and value.isprintable()
